"""A rehearsal: one run without mishaps, one with them, and what was seen of both."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from slurm_elastic.errors import UsageError
from slurm_elastic.finding import Finding, exit_code
from slurm_elastic.observe.records import RunRecords, read_records
from slurm_elastic.observe.report import Report, report
from slurm_elastic.observe.status import run_status
from slurm_elastic.rehearsal.checks import findings, require_comparable
from slurm_elastic.rehearsal.facts import Happened, RunFacts, changes_of, losses
from slurm_elastic.rehearsal.files import NewNames, Recordings, WatchedFiles, entries, leave_half, newest_in_place
from slurm_elastic.rehearsal.nodes import Node, Nodes
from slurm_elastic.rehearsal.scenario import Kind, Mishap, Plan, first_free, node_name, plan, spread
from slurm_elastic.rundir import RunDir, RunDirError
from slurm_elastic.text import printable

_WARNING = re.compile(r"(?:\] |warning: )snapshots: (.+)$")
"""A line of an agent or a worker; lines of workers begin with their node and rank in brackets."""
_NOTICES = {Kind.PREEMPT: signal.SIGTERM, Kind.TIMELIMIT: signal.SIGUSR2}
_POLL = 0.01
_STRAGGLERS = 5.0
"""Seconds in which all ranks reach a step that one has reached."""
_LATE = 5.0
"""Seconds in which a worker that was paused saves and ends."""
_HANG = 5.0
"""Seconds without a step after which a worker hangs, at the least."""


@dataclass(frozen=True)
class Options:
    """The wishes of the user.

    Attributes:
        command: The script with its arguments; an argument may contain ``{run}``, which stands for the directory of
            the run.
        kinds: To be spread over the training where there are no `mishaps`.
        tolerance: By which part of themselves losses may differ.
        links: Files and directories that the script finds in its current directory.
        timeout: Seconds without a step after which a run is ended.
        say: Takes a line about what happens.
    """

    command: tuple[str, ...]
    nodes: int = 3
    mishaps: tuple[Mishap, ...] | None = None
    kinds: tuple[Kind, ...] = (Kind.PREEMPT, Kind.JOIN, Kind.KILL)
    tolerance: float = 0.02
    agent_options: tuple[str, ...] = ()
    links: tuple[Path, ...] = ()
    keep: Path | None = None
    timeout: float = 300.0
    say: Callable[[str], None] = print


@dataclass(frozen=True)
class Rehearsal:
    """A rehearsal that is over; `losses` are those of the disturbed run that counted, by step."""

    plan: Plan
    undisturbed: RunFacts
    disturbed: RunFacts
    findings: tuple[Finding, ...]
    steps_lost: int
    losses: dict[int, float]
    report: Report

    @property
    def ok(self) -> bool:
        """True if nothing has to be fixed."""
        return exit_code(self.findings) == 0


def rehearse(options: Options) -> Rehearsal:
    """Run the script without and with mishaps, and judge what was seen.

    All processes are ended and, without `Options.keep`, all files removed, however this ends. A script or scenario that
    cannot be rehearsed raises UsageError.
    """
    script = Path(options.command[0])
    if not script.is_file():
        raise UsageError(f"{script} is no file; name a Python script")
    if options.nodes < 1 or options.nodes > 64:
        raise UsageError(f"--nodes {options.nodes}: a rehearsal has 1 to 64 nodes on this machine")
    # It may not be possible, which is told before the first run.
    _planned(options, len(options.kinds) + 1)
    with _directory(options.keep) as base, contextlib.closing(NewNames(Path(base))) as names:
        directory = Path(base)
        nothing = Plan(options.nodes, options.nodes)
        undisturbed = RehearsedRun(options, directory / "undisturbed", nothing, names, RunFacts()).facts()
        planned = _planned(options, require_comparable(undisturbed, options.mishaps))
        run = RehearsedRun(options, directory / "disturbed", planned, names, undisturbed)
        disturbed = run.facts()
        results = findings(planned, undisturbed, disturbed, options.tolerance)
        lost = sum(change.lost for change in changes_of(disturbed))
        return Rehearsal(planned, undisturbed, disturbed, tuple(results), lost, losses(disturbed), run.report())


def _planned(options: Options, steps: int) -> Plan:
    mishaps = options.mishaps
    return plan(spread(options.kinds, options.nodes, steps) if mishaps is None else mishaps, options.nodes)


def _directory(keep: Path | None) -> AbstractContextManager[str]:
    if keep is None:
        return tempfile.TemporaryDirectory(prefix="slurm-elastic-rehearsal-", ignore_cleanup_errors=True)
    try:
        keep.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"--keep {keep}: {error.strerror}; name a directory that does not exist") from None
    return contextlib.nullcontext(str(keep.absolute()))


class RehearsedRun:
    """One run of the script; `before` is what was seen of the run without mishaps, nothing if this is that one."""

    def __init__(self, options: Options, directory: Path, planned: Plan, names: NewNames, before: RunFacts) -> None:
        self._options, self._directory, self._plan, self._names = options, directory, planned, names
        self._saved_before = {step for worker in before.workers for step in worker.checkpoints}
        self._halves: dict[int, Path] = {}
        work = directory / "work"
        work.mkdir(parents=True)
        for path in options.links:
            if not path.exists():
                raise UsageError(f"--link {path}: there is no such file or directory")
            (work / path.name).symlink_to(path.absolute())
        (directory / "mishaps.json").write_text(json.dumps([mishap.step for mishap in planned.mishaps]))
        self._run_dir = RunDir.for_run(directory.parent, f"{directory.name}-{os.getpid()}")
        words = [f"--run-id={self._run_dir.run_id}", f"--run-dir={directory.parent}", *options.agent_options]
        if any(mishap.kind is Kind.HANG for mishap in planned.mishaps):
            words += [f"--hang-timeout={max(_HANG, *(5 * worker.pause for worker in before.workers)):g}"]
        words += [str(Path(options.command[0]).absolute())]
        words += [word.replace("{run}", str(directory)) for word in options.command[1:]]
        self._nodes = Nodes(directory, planned, words)
        self._recordings = Recordings(directory)
        self._roots = (work, self._run_dir.path)
        self._files = WatchedFiles(self._roots)
        self._happened: list[Happened] = []
        self._under_way = False
        self._restart: list[int] = []
        self._paused: tuple[Node, Happened] | None = None
        self._woken = 0.0
        """When the workers of the paused node went on; 0 while they stand still."""

    def facts(self) -> RunFacts:
        """Run the script through its mishaps, to its end."""
        try:
            self._nodes.start(range(self._plan.nodes))
            gave_up = self._follow()
            self._files.look(complete=False)
            left = () if gave_up else self._nodes.leftover()
            self._recordings.read()
            return self._seen(gave_up, left)
        finally:
            self._nodes.kill(self._nodes.all)
            self._files.close()

    def report(self) -> Report:
        """Return the report of the run, which is over."""
        records = self._records()
        return report(records, run_status(records, time.time()), time.time())

    def _follow(self) -> str:
        """Let the mishaps happen until no agent runs; return why the rehearsal ended the run, empty if it did not."""
        since, reached = time.monotonic(), 0.0
        while self._nodes.present or self._restart:
            now = time.monotonic()
            self._end_overdue(now)
            self._names.read()
            if self._restart and not self._nodes.present:
                indices, self._restart = self._restart, []
                self._nodes.start(indices)
            if self._recordings.read():
                since = now
            elif now - since > self._options.timeout:
                return f"no worker has taken a step for {self._options.timeout:g} s"
            self._note_end_of_mishap()
            self._wake_late(now)
            index, waiting, workers = self._recordings.waiting()
            # The last line of a worker that was killed says for ever that it waits.
            if index != len(self._happened) or self._under_way or self._waits_for_place(index):
                reached = 0.0
                time.sleep(_POLL)
                continue
            reached = reached or now
            if waiting == workers or now - reached > _STRAGGLERS:
                self._files.look(complete=waiting == workers)
                self._let_happen(index)
                reached = 0.0
        return ""

    def _waits_for_place(self, index: int) -> bool:
        """Return True if a node would join while one that has to leave still ends: it gets the place of that one."""
        joins = self._plan.mishaps[index].kind is Kind.JOIN
        return joins and any(node.deadline is not None for node in self._nodes.present)

    def _let_happen(self, index: int) -> None:
        mishap, round_ = self._plan.mishaps[index], self._recordings.newest
        nodes, free = self._victims(mishap), first_free([node.index for node in self._nodes.present])
        self._options.say(f"{mishap} ({nodes[0].name})" if mishap.kind is Kind.LEADER else str(mishap))
        if mishap.kind in (Kind.KILL, Kind.LEADER, Kind.FAIL):
            self._leave_half(mishap, round_)
        happened = Happened(mishap, time.monotonic(), round_)
        self._happened.append(happened)
        match mishap.kind:
            case Kind.KILL | Kind.LEADER:
                self._nodes.kill(nodes)
            case Kind.FAIL:
                self._signal_workers(nodes[0], round_, signal.SIGKILL, most=1)
            case Kind.HANG:
                self._signal_workers(nodes[0], round_, signal.SIGSTOP, most=1)
            case Kind.PAUSE:
                self._nodes.signal(nodes, signal.SIGSTOP)
                self._paused = nodes[0], happened
            case Kind.PREEMPT | Kind.TIMELIMIT:
                for node in nodes:
                    node.deadline = happened.at + (mishap.seconds or 0.0)
                    node.process.send_signal(_NOTICES[mishap.kind])
            case Kind.JOIN:
                self._nodes.start([free])
        if mishap.kind is Kind.TIMELIMIT:
            self._restart = [node.index for node in nodes]
        self._under_way = True

    def _leave_half(self, mishap: Mishap, round_: int) -> None:
        """Leave what would be there if the workers were killed while they write the checkpoint of a later step."""
        saved = {step for worker in self._recordings.workers() for step in worker.checkpoints}
        self._names.read()
        left = set(self._halves.values())
        paths = (path for path in entries(self._roots) if left.isdisjoint((path, *path.parents)))
        source = newest_in_place(paths, saved, self._names.in_place)
        if source is None or source.step > mishap.step:
            return
        # One that the script will not write itself.
        taken = self._saved_before | {mishap_.step for mishap_ in self._plan.mishaps}
        step = next(step for step in itertools.count(mishap.step + 1) if step not in taken)
        self._halves[round_] = source.of_step(step)
        leave_half(source.path, self._halves[round_])

    def _note_end_of_mishap(self) -> None:
        """Let workers pass the step of the last mishap: of an announced one when its stop has begun."""
        if self._under_way:
            last = self._happened[-1]
            late = time.monotonic() - last.at > self._options.timeout / 2
            if late or not last.mishap.announced or self._recordings.stopped(last.round):
                (self._directory / f"done.{len(self._happened) - 1}").touch()
                self._under_way = False

    def _wake_late(self, now: float) -> None:
        """Let the workers of a paused node go on when others have saved in its place; then end the node."""
        if self._paused is None:
            return
        node, happened = self._paused
        if self._woken:
            if now - self._woken > _LATE or self._recordings.ended(happened.round, node.name):
                self._nodes.kill([node])
                self._paused, self._woken = None, 0.0
        elif self._nodes.present == [node] or self._recordings.saved(happened.round, happened.mishap.step):
            (self._directory / f"save.{self._happened.index(happened)}").write_text(node.name)
            self._woken = now
            self._signal_workers(node, happened.round, signal.SIGCONT)

    def _victims(self, mishap: Mishap) -> list[Node]:
        """Return the nodes that a mishap strikes; none for one that joins."""
        if mishap.kind in (Kind.JOIN, Kind.TIMELIMIT):
            return self._nodes.present if mishap.kind is Kind.TIMELIMIT else []
        present = [node for node in self._nodes.present if self._paused is None or node is not self._paused[0]]
        if mishap.node is not None:
            name = node_name(mishap.node)
        elif mishap.kind is Kind.PAUSE:
            name = self._recordings.of_round(self._recordings.newest)[0].node
        else:
            name = self._leader()
        victim = next((node for node in present if node.name == name), None)
        if victim is None and mishap.node is not None:
            raise UsageError(f"'{mishap}': that node is not there; it led and has gone, so name another one")
        return [victim or present[0]]

    def _leader(self) -> str:
        with contextlib.suppress(RunDirError):
            return run_status(self._records(), time.time()).leader
        return ""

    def _signal_workers(self, node: Node, round_: int, number: signal.Signals, most: int | None = None) -> None:
        """Send a signal to the workers of a node, or to `most` of them, from the lowest rank on."""
        workers = [worker for worker in self._recordings.of_round(round_) if worker.node == node.name]
        for worker in workers[:most]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, number)

    def _end_overdue(self, now: float) -> None:
        for node in self._nodes.present:
            if node.deadline is not None and now >= node.deadline:
                self._options.say(f"{node.name} is killed: its notice is over")
                self._nodes.kill([node])

    def _records(self) -> RunRecords:
        return read_records(self._run_dir)

    def _seen(self, gave_up: str, left: tuple[str, ...]) -> RunFacts:
        output = (self._directory / "output.txt").read_text(errors="replace").splitlines()
        if not self._run_dir.path.exists():
            last = printable(output[-1] if output else "", 500)
            return RunFacts(gave_up=gave_up or "no agent has started", failure=last)
        warned = [match[1] for line in output if (match := _WARNING.search(line)) is not None]
        records = self._records()
        status = run_status(records, time.time())
        return RunFacts(
            workers=self._recordings.workers(),
            happened=tuple(self._happened),
            finished=records.done is not None,
            restarts=status.restarts,
            failure=printable(status.root_cause.text if status.root_cause is not None else "", 500),
            warnings=tuple(dict.fromkeys(printable(text, 500) for text in warned)),
            cut_short=_cut_short(records),
            overwritten=tuple(self._short(path) for path in sorted(self._files.overwritten)),
            halves={round_: self._short(path) for round_, path in self._halves.items()},
            left=left,
            gave_up=gave_up,
        )

    def _short(self, path: Path) -> str:
        root = next(root for root in self._roots if path.is_relative_to(root))
        return str(path.relative_to(root))


def _cut_short(records: RunRecords) -> dict[int, float]:
    """Return the rounds that were to end at a step and ended without one, with the time by the monotonic clock."""
    offset = time.time() - time.monotonic()
    planned = {event.round for event in records.events if event.kind == "round_ending"}
    ended = [event for event in records.events if event.kind == "round_ended" and not event.whole("step")]
    return {event.round: event.time - offset for event in ended if event.round is not None and event.round in planned}
