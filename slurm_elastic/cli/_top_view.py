"""The view of ``slurm-elastic top``, by textual. Whatever blocks runs in threads."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.markup import escape
from textual import work
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, RichLog, Static

from slurm_elastic.cli._run_view import Queue, present_status, request_leave
from slurm_elastic.cli._terminal import COLOURS, ago, clock, rank_list
from slurm_elastic.cli.commands.status import facts
from slurm_elastic.cli.commands.top import last_lines, stacks
from slurm_elastic.errors import SlurmElasticError
from slurm_elastic.observe.views import GOES_ON, TRAINS, AgentView, RunState, RunStatus
from slurm_elastic.rundir import RunDir
from slurm_elastic.text import printable

_SPARK = 10
"""Step times that are kept and shown of a node."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_PAUSES = 3.0
"""The least time between two looks, in times of one: a run of 500 nodes has a thousand files on a shared disk."""
_ASK_SLURM = 30.0
"""Seconds between two questions to Slurm."""
_CALM = ("training", "done", "spare", "ended")


class TopView(App[None]):
    """The state of a run, read again after an interval in seconds."""

    CSS = """
    #facts { height: auto; max-height: 40%; padding: 0 1; }
    #nodes { height: 2fr; }
    #title { height: 1; padding: 0 1; background: $panel; }
    #lower { height: 1fr; padding: 0 1; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "quit"),
        ("e", "show('events')", "events"),
        ("l", "show('log')", "log"),
        ("left_square_bracket", "rank(-1)", "rank -"),
        ("right_square_bracket", "rank(1)", "rank +"),
        ("s", "show('stacks')", "stacks"),
        ("d", "drain", "drain"),
        ("r", "requeue", "requeue"),
    ]

    def __init__(self, run_dir: RunDir, interval: float) -> None:
        super().__init__()
        self._run_dir, self._interval = run_dir, interval
        self._queue, self._asked = Queue(), time.monotonic()
        self._status: RunStatus | None = None
        self._times: dict[str, StepTimes] = {}
        self._shown, self._rank = "events", 0
        self._rows: dict[str, dict[str, str]] = {}
        self._table: DataTable[str] = DataTable(id="nodes", cursor_type="row", zebra_stripes=True)
        self._facts, self._title = Static(id="facts"), Static(id="title")
        self._lower = RichLog(id="lower", wrap=False, auto_scroll=True, max_lines=5000)

    def compose(self) -> ComposeResult:
        """Arrange the widgets."""
        yield self._facts
        yield self._table
        yield self._title
        yield self._lower
        yield Footer()

    def on_mount(self) -> None:
        """Begin to look."""
        self._facts.update(f"run {escape(self._run_dir.run_id)}")
        self._look()

    def on_data_table_row_highlighted(self) -> None:
        """Show the first rank of the node that is selected now."""
        self._rank = 0
        if self._shown != "stacks":
            self._show_lower()

    def action_show(self, what: str) -> None:
        """Show events, or the log or stacks of what is selected."""
        self._shown = what
        self._show_lower()

    def action_rank(self, by: int) -> None:
        """Select another rank of the node."""
        agent = self._selected()
        if agent is not None and agent.workers:
            self._rank = (self._rank + by) % agent.workers
            self.action_show("log")

    def action_drain(self) -> None:
        """Drain the selected node, after a question."""
        agent = self._selected()
        if agent is not None:
            node = agent.node
            self._ask(f"Drain {node}? Its workers save, it leaves the run, and the others go on.", "drained", (node,))

    def action_requeue(self) -> None:
        """Requeue the run, after a question."""
        self._ask(f"Requeue run {self._run_dir.run_id}? All workers save, and its job starts again.", "requeued", ())

    def _ask(self, question: str, reason: str, nodes: tuple[str, ...]) -> None:
        def answered(yes: bool | None) -> None:
            if yes:
                self._leave(reason, nodes)

        self.push_screen(_Question(question), answered)

    # In threads.

    @work(thread=True, exclusive=True, group="status")
    def _look(self) -> None:
        begin = time.monotonic()
        try:
            if begin - self._asked > _ASK_SLURM:
                self._queue, self._asked = Queue(), begin
            status = present_status(self._run_dir, self._queue, live=True)
        except SlurmElasticError as error:
            self.call_from_thread(self.notify, escape(str(error)), severity="error")
        else:
            self.call_from_thread(self._seen, status)
        pause = max(self._interval, _PAUSES * (time.monotonic() - begin))
        self.call_from_thread(self.set_timer, pause, self._look)

    @work(thread=True, exclusive=True, group="lower")
    def _read(self, what: str, agent: AgentView, rank: int) -> None:
        try:
            if what == "stacks":
                lines = stacks(self._run_dir, agent.node)
            else:
                lines = [] if agent.round is None else last_lines(self._run_dir, agent.round, rank)
        except SlurmElasticError as error:
            lines = [str(error)]
        self.call_from_thread(self._fill, lines or ["nothing yet"])

    @work(thread=True, group="leave")
    def _leave(self, reason: str, nodes: tuple[str, ...]) -> None:
        try:
            answer = request_leave(self._run_dir, nodes, reason)
            line = f"asked to leave: {', '.join(answer.nodes)}" if answer.nodes else "no agent there"
        except SlurmElasticError as error:
            line = str(error)
        self.call_from_thread(self.notify, escape(line))

    # In the main thread.

    def _seen(self, status: RunStatus) -> None:
        now = time.time()
        self._status, self._times = status, advance(self._times, status, now)
        self._facts.update("\n".join(_facts(status, now)))
        agents = attention_first(status)
        rows = {agent.agent: _row(agent, self._times.get(agent.agent), status, now) for agent in agents}
        if list(rows) != list(self._rows) or any(row.keys() != self._rows[name].keys() for name, row in rows.items()):
            self._fill_table(rows)
        else:
            for name, row in rows.items():
                for column, cell in row.items():
                    if cell != self._rows[name][column]:
                        self._table.update_cell(name, column, cell)
        self._rows = rows
        if self._shown != "stacks":
            self._show_lower()

    def _fill_table(self, rows: dict[str, dict[str, str]]) -> None:
        """Fill the table anew, with the cursor on the node on which it was."""
        selected = self._selected_name()
        self._table.clear(columns=True)
        for title in next(iter(rows.values()), {}):
            self._table.add_column(title, key=title)
        for name, row in rows.items():
            self._table.add_row(*row.values(), key=name)
        if selected in rows:
            self._table.move_cursor(row=list(rows).index(selected))

    def _show_lower(self) -> None:
        agent = self._selected()
        if self._shown == "events" or agent is None:
            self._title.update("events")
            status, now = self._status, time.time()
            events = status.events if status is not None else ()
            self._fill(f"{clock(event.time, now)}  {printable(event.text)}" for event in events)
        elif self._shown == "log":
            rank = (agent.rank or 0) + self._rank
            self._title.update(f"log of rank {rank} on {escape(agent.node)}")
            self._read("log", agent, rank)
        else:
            self._title.update(f"stacks of {escape(agent.node)}")
            self._read("stacks", agent, 0)

    def _fill(self, lines: Iterable[str]) -> None:
        self._lower.clear()
        for line in lines:
            self._lower.write(line)

    def _selected(self) -> AgentView | None:
        name = self._selected_name()
        agents = self._status.agents if self._status is not None else ()
        return next((agent for agent in agents if agent.agent == name), None)

    def _selected_name(self) -> str:
        index = self._table.cursor_row
        names = list(self._rows)
        return names[index] if 0 <= index < len(names) else ""


class _Question(ModalScreen[bool]):
    """A question that has to be answered by y; everything else is no."""

    CSS = """
    _Question { align: center middle; }
    _Question > Vertical { width: 60; height: auto; padding: 1 2; border: thick $warning; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("y", "dismiss(True)", "yes"),
        ("n,escape,enter,q", "dismiss(False)", "no"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Vertical(Static(escape(self._question)), Static("\n[b]y[/b] yes   [b]n[/b] no"))


def attention_first(status: RunStatus) -> list[AgentView]:
    """Return the agents of a run, first those of which a person may have to know; else their order stays.

    Those are lost, on their way in or out, slow, or have a notice.
    """
    noticed = {notice.node for notice in status.notices} | {slow.node for slow in status.slow if slow.until is None}
    return sorted(status.agents, key=lambda agent: agent.state in _CALM and agent.node not in noticed)


def _facts(status: RunStatus, now: float) -> Iterable[str]:
    state = f"[bold {COLOURS[status.state][0]}]{status.state.value}[/]"
    shown = (f"[dim]{name}[/] {escape(value)}" for name, value in facts(status, now) if name != "command")
    yield "   ".join((f"run [b]{escape(status.run)}[/b] {state}", *shown))
    if status.live is None and status.state in GOES_ON:
        yield "[yellow]no live answer: from the run directory[/]"
    states = Counter(agent.state for agent in attention_first(status))
    if len(states) > 1:
        yield "nodes: " + ", ".join(f"{count} {escape(state)}" for state, count in states.items())
    if status.root_cause is not None and status.state is RunState.FAILED:
        yield f"[red]root cause[/] {escape(printable(status.root_cause.text.strip().rpartition(chr(10))[2], 150))}"


def _row(agent: AgentView, times: StepTimes | None, status: RunStatus, now: float) -> dict[str, str]:
    """Return the cells of an agent by the titles of their columns."""
    seconds = times.seconds if times is not None else ()
    scores = [score.relative_score for score in status.scores if score.rank in agent.ranks]
    relative = [score for score in scores if score is not None]
    domain = {"DOMAIN": escape(printable(agent.domain))} if status.has_domains else {}
    return {
        "NODE": escape(agent.node),
        **domain,
        "STATE": agent.state,
        "ROUND": "" if agent.round is None else str(agent.round),
        "RANKS": rank_list(agent.ranks) if agent.state in TRAINS else "",
        "STEP": _least(worker.step for worker in agent.answers),
        "S/STEP": f"{seconds[-1]:.3g}" if seconds else "",
        "STEP TIMES": sparkline(seconds).ljust(_SPARK),
        "SCORE": f"{min(relative):.2f}" if relative else "",
        "SAVED": _least(worker.checkpoint for worker in agent.answers),
        "JOB": escape(agent.job),
        "SINCE": ago(now - agent.since),
    }


def _least(values: Iterable[int | None]) -> str:
    numbers = [value for value in values if value is not None]
    return str(min(numbers)) if numbers else ""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times of one agent's steps.

    Attributes:
        steps: Calls of should_stop of its slowest worker in that round.
        at: Seconds since 1970 of the last of them.
        seconds: Per step, averaged over the steps between two samples that differ; the newest last.
    """

    round: int | None
    steps: int
    at: float
    seconds: tuple[float, ...] = ()


def advance(times: Mapping[str, StepTimes], status: RunStatus, now: float) -> dict[str, StepTimes]:
    """Return the step times of all agents whose workers have answered of steps, by identity, with one more answer."""
    next_times = {}
    for agent in status.agents:
        stepping = [worker for worker in agent.answers if worker.steps]
        if not stepping:
            continue
        slowest = min(stepping, key=lambda worker: worker.steps)
        before, at = times.get(agent.agent), now - (slowest.step_seconds or 0.0)
        seconds = () if before is None else before.seconds
        if before is not None and before.round == agent.round and slowest.steps >= before.steps:
            if slowest.steps == before.steps:
                at = before.at
            else:
                seconds = (*seconds, max(0.0, at - before.at) / (slowest.steps - before.steps))[-_SPARK:]
        next_times[agent.agent] = StepTimes(agent.round, slowest.steps, at, seconds)
    return next_times


def sparkline(values: Sequence[float]) -> str:
    """Return values as blocks, the lowest for 0 and the highest for the largest of them."""
    most = max(values, default=0.0) or 1.0
    return "".join(_BLOCKS[min(len(_BLOCKS) - 1, int(value / most * len(_BLOCKS)))] for value in values)
