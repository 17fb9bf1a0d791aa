"""``slurm-elastic drain`` and ``requeue``: make nodes, or the whole run, leave with notice."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Sequence

from slurm_elastic.agent.event_log import FactLines, Reached
from slurm_elastic.cli._command import Command, Parser
from slurm_elastic.cli._run_view import add_run, open_running, request_leave
from slurm_elastic.cli._terminal import ago
from slurm_elastic.errors import UsageError
from slurm_elastic.observe.records import RunRecords, read_records
from slurm_elastic.observe.status import run_status
from slurm_elastic.observe.views import AgentView
from slurm_elastic.rendezvous.run_events import Entry
from slurm_elastic.rundir import RunDir
from slurm_elastic.slurm import compress, expand

_PAUSE = 0.3
"""Seconds between two looks at the records."""
_SETTLE = 5.0
"""Seconds in which the others go on after the last of the nodes has left; else they wait for nodes."""
_OF_ROUNDS = frozenset({"node_lost", "node_left", "round_ended", "round_formed", "run_ended"})


class Drain(Command):
    """Asks the leader to make agents leave; the other agents go on training."""

    name = "drain"
    summary = "make nodes leave a run with notice, for instance before maintenance"
    examples = """\
  slurm-elastic drain 1234 node7
  slurm-elastic drain 1234 'node[7-9]' --run-dir /scratch/me
  slurm-elastic drain 1234 node7 --wait        returns when node7 has left
  slurm-elastic drain 1234 --all        the run stops with a checkpoint; its job ends and is not requeued
"""

    def add_options(self, parser: Parser) -> None:
        add_run(parser)
        parser.add_argument("nodes", metavar="NODE", nargs="*", default=(), help="Slurm's name; also node[1-3]")
        parser.add_argument("--all", action="store_true", help="every node of the run")
        parser.add_argument("--wait", action="store_true", help="return when the nodes have left, and say what it cost")
        parser.add_argument(
            "--timeout", metavar="SECONDS", type=float, help="with --wait, after this long say why they have not left"
        )

    def run(self, arguments: Sequence[str]) -> int:
        options = self.parser().parse_args(arguments)
        if options.all == bool(options.nodes):
            raise UsageError("name the nodes that have to leave, or give --all")
        nodes = tuple(dict.fromkeys(node for text in options.nodes for node in expand(text)))
        run_dir = open_running(options)
        before = read_records(run_dir)
        answer = request_leave(run_dir, nodes, "drained")
        if answer.unknown:
            plural = "are" if len(answer.unknown) > 1 else "is"
            raise UsageError(
                f"{', '.join(answer.unknown)} {plural} not in run {options.run_id}"
                + (f"; asked to leave: {', '.join(answer.nodes)}" if answer.nodes else "")
            )
        if answer.nodes:
            print(f"asked to leave: {', '.join(answer.nodes)}", flush=True)
            if options.wait:
                return wait_until_left(run_dir, answer.nodes, before, options.timeout)
        else:
            print(f"no agent of run {options.run_id} is running; nothing to drain")
        return 0


class Requeue(Command):
    """Asks the leader to make all agents leave; then each of their jobs is requeued."""

    name = "requeue"
    summary = "make a run save, give its nodes back and start again when Slurm has new ones"
    examples = """\
  slurm-elastic requeue 1234
  slurm-elastic requeue my-run --run-dir /scratch/me
"""

    def add_options(self, parser: Parser) -> None:
        add_run(parser)

    def run(self, arguments: Sequence[str]) -> int:
        options = self.parser().parse_args(arguments)
        answer = request_leave(open_running(options), (), "requeued")
        if answer.nodes:
            print(f"asked to leave and come back: {', '.join(answer.nodes)}")
        else:
            print(f"no agent of run {options.run_id} is running; nothing to requeue")
        return 0


def wait_until_left(
    run_dir: RunDir, nodes: Collection[str], before: RunRecords, timeout: float | None, pause: float = _PAUSE
) -> int:
    """Wait until the agents on nodes have ended, and print what that has cost, or why they have not.

    Returns the exit code: 0 if the nodes have left, 1 if `timeout` seconds are over, 130 after Ctrl-C.
    """
    begin = time.monotonic()
    agents = {view.agent for view in _alive(before) if view.node in nodes}
    gone: float | None = None
    try:
        while True:
            records, now = read_records(run_dir), time.monotonic()
            alive = _alive(records)
            staying = [view for view in alive if view.agent in agents]
            lines, settled = _cost(before, records)
            if not staying:
                gone = gone or now
                if settled or not alive or now - gone >= _SETTLE:
                    print("\n".join(lines or (f"{compress(nodes)} left after {ago(now - begin)}",)))
                    return 0
            elif timeout is not None and now - begin >= timeout:
                doing = ", ".join(f"{view.node} ({view.state})" for view in staying)
                print(f"after {timeout:g} s not left: {doing}; what they do: slurm-elastic status {run_dir.run_id}")
                return 1
            time.sleep(pause)
    except KeyboardInterrupt:
        print(f"{compress(nodes)} will leave all the same", file=sys.stderr)
        return 130


def _cost(before: RunRecords, records: RunRecords) -> tuple[list[str], bool]:
    """Return the lines about what has happened in a run between two looks, and True if its rounds go on or are over."""
    newest = {event.node: event.time for event in before.events}
    events = [
        event for event in records.events if event.kind in _OF_ROUNDS and event.time > newest.get(event.node, 0.0)
    ]
    workers = [worker for each in records.progress if each.round == before.newest.number for worker in each.workers]
    steps = [worker.step for worker in workers if worker.step is not None]
    saved = [worker.checkpoint for worker in workers if worker.checkpoint is not None]
    nodes = len(before.rounds[-1].nodes) if before.rounds else None
    reached = Reached(max(steps, default=None), max(saved, default=None), nodes)
    facts = FactLines(records.run_id, 0, lambda: reached)
    lines = [line for event in events for line in facts.tell(Entry(event.kind, event.text, dict(event.fields)))]
    settled = bool(events) and events[-1].kind in ("round_formed", "run_ended")
    return lines + list(facts.rest("waits for other nodes")), settled or records.done is not None


def _alive(records: RunRecords) -> list[AgentView]:
    return [view for view in run_status(records, time.time()).agents if view.alive]
