"""Waits until nodes have left a run, and tells what that has cost, in the words of the agents' own lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection

from slurm_elastic.agent.fact_lines import FactLines, Reached
from slurm_elastic.cli._run_view import ago
from slurm_elastic.observe.records import RunRecords, read_records
from slurm_elastic.observe.status import AgentView, run_status
from slurm_elastic.rendezvous.run_events import Entry
from slurm_elastic.rundir import RunContents, RunDir
from slurm_elastic.slurm import compress

_PAUSE = 0.3
"""Seconds between two looks at the records."""
_SETTLE = 5.0
"""Seconds in which the others go on after the last of the nodes has left; else they wait for nodes."""
_OF_ROUNDS = frozenset({"node_lost", "node_left", "round_ended", "round_formed", "run_ended"})


def wait_until_left(
    run_dir: RunDir, nodes: Collection[str], before: RunRecords, timeout: float | None, pause: float = _PAUSE
) -> int:
    """Wait until the agents on nodes have ended, and print what that has cost, or why they have not.

    Args:
        run_dir: Directory of the run.
        nodes: Nodes that have been asked to leave.
        before: The records of the run from before that.
        timeout: Seconds to wait at most; None for no limit.
        pause: Seconds between two looks at the records.

    Returns:
        The exit code: 0 if the nodes have left, 1 if the time is over, 130 after Ctrl-C.
    """
    begin = time.monotonic()
    agents = {view.agent for view in _alive(before) if view.node in nodes}
    gone: float | None = None
    try:
        while True:
            records, now = read_records(RunContents(run_dir), run_dir.run_id), time.monotonic()
            alive = _alive(records)
            staying = [view for view in alive if view.agent in agents]
            lines, settled = cost(before, records)
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


def cost(before: RunRecords, records: RunRecords) -> tuple[list[str], bool]:
    """Return the lines about what has happened in a run between two looks, and True if its rounds go on or are over."""
    newest = {event.node: event.time for event in before.events}
    events = [
        event for event in records.events if event.kind in _OF_ROUNDS and event.time > newest.get(event.node, 0.0)
    ]
    workers = [worker for each in records.progress if each.round == before.newest_round for worker in each.workers]
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
