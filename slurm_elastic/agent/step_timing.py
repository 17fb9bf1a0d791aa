"""A feature of the agent: measures the pace of its workers, and names ranks of the run that stay slow.

The agent of rank 0 asks the leader for the reports of all agents, as `slurm-elastic status` does, and compares all
ranks; `slurm_elastic.slow_ranks` decides.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from slurm_elastic import typed_json
from slurm_elastic.agent.features import Feature, RunningRound
from slurm_elastic.agent.health.state import Readings
from slurm_elastic.control.agent_side import WorkerProgress
from slurm_elastic.errors import SlurmElasticError
from slurm_elastic.rendezvous.leader_client import ask_status, find_leader
from slurm_elastic.rendezvous.run_events import Entry
from slurm_elastic.rundir import RunDir
from slurm_elastic.slow_ranks import Meter, Pace, Reading, SlowRank, SlowRanks, read, step

logger = logging.getLogger("slurm_elastic")

_NODES_PER_SECOND = 32
"""Agents that are asked per second at the most, on average: a sixteenth of what a leader takes."""
_END = 1.0
"""Seconds for which the agent waits at its end for a look that is under way."""
_NUMBERS = ("pace_seconds", "busy_seconds", "loading_seconds", "waiting_seconds", "best_busy_seconds")


def leader_reports(run_dir: RunDir) -> Mapping[str, str]:
    """Return the reports of all agents, JSON by their identities; SlurmElasticError if the leader has none now."""
    return ask_status(find_leader(run_dir))[1]


class StepTimingFeature(Feature):
    """Measures paces in a thread, and on the agent of rank 0 compares those of all ranks."""

    def __init__(
        self, reports: Callable[[], Mapping[str, str]], record: Callable[[Entry, int], None], look: float
    ) -> None:
        self._reports, self._record, self._look = reports, record, look
        self._running: RunningRound | None = None
        self._measured: tuple[RunningRound | None, Mapping[int, Pace]] = None, {}
        self._slow = SlowRanks()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def workers_started(self, running: RunningRound) -> None:
        self._running = running
        if self._thread is None:
            self._thread = threading.Thread(target=self._live, name="slurm-elastic-timing", daemon=True)
            self._thread.start()

    def round_ended(self, progress: Sequence[WorkerProgress]) -> None:
        self._running = None

    def run_ended(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(_END)

    def status(self, readings: Readings) -> Readings:
        running, paces = self._measured
        # Until the thread wakes, they are those of the last round.
        if running is not self._running:
            return readings
        return replace(readings, paces=paces, slow=tuple(self._slow.named.values()))

    def _live(self) -> None:
        before: RunningRound | None = None
        meters: dict[int, Meter] = {}
        next_look = 0.0
        while not self._over.wait(self._look / 2):
            running = self._running
            if running is not before:
                before, meters = running, {}
                self._measured, self._slow = (running, {}), SlowRanks()
            if running is None:
                continue
            now = time.monotonic()
            for worker in running.progress():
                reading = _reading(worker, now)
                if reading is not None:
                    meters[worker.local_rank] = read(meters.get(worker.local_rank, Meter()), reading, self._look)
            paces = {rank: meter.pace for rank, meter in meters.items() if meter.pace is not None}
            self._measured = running, paces
            assignment = running.assignment
            if paces and assignment.place.base_rank == 0 and assignment.world_size > 1 and now >= next_look:
                next_look = now + max(self._look, assignment.nodes / _NODES_PER_SECOND) - 0.01
                self._compare(assignment.round)

    def _compare(self, round_: int) -> None:
        try:
            reports = self._reports()
        except SlurmElasticError as error:
            # A leader that changes now, or has no time: the next look comes.
            logger.debug("no look at the pace of ranks: %s", error)
            return
        paces, nodes = paces_of(reports, round_)
        self._slow, changed = step(self._slow, paces)
        for rank in changed:
            entry = slow_event(round_, nodes.get(rank.rank, ""), rank)
            self._record(entry, logging.INFO if rank.over else logging.WARNING)


def paces_of(reports: Mapping[str, str], round_: int) -> tuple[dict[int, Pace], dict[int, str]]:
    """Return the paces of the workers of a round by rank, and their nodes, from the reports of agents."""
    paces: dict[int, Pace] = {}
    nodes: dict[int, str] = {}
    for agent, text in reports.items():
        try:
            report = typed_json.loads(text)
            here = report.get("round") == round_ and report.get("state") == "training"
            for worker in report["workers"] if here else ():
                nodes[int(worker["rank"])] = agent.partition("/")[0]
                if "busy_seconds" in worker:
                    whole, busy, loading, waiting, best = (float(worker[name]) for name in _NUMBERS)
                    paces[int(worker["rank"])] = Pace(whole, busy, loading, waiting, best, int(worker["paces"]))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            logger.debug("the report of %s cannot be read", agent)
    return paces, nodes


def slow_event(round_: int, node: str, slow: SlowRank) -> Entry:
    """Return the event of a rank that stays slow, or is slow no more."""
    pace, score = slow.pace, slow.score
    others = score.others or 0.0
    text = f"rank {slow.rank} on {node} "
    text += "is slow no more: it " if slow.over else "is slow and holds up the others: it "
    text += f"works {pace.busy:.3g} s per step outside of collectives, the others {others:.3g} s"
    if not slow.over and pace.loading >= (pace.busy - others) / 2:
        text += f"; it waits {pace.loading:.3g} s of that for input"
    seconds = {"step": pace.step, "busy": pace.busy, "others_busy": others, "loading": pace.loading}
    fields: dict[str, object] = {
        "round": round_,
        "rank": slow.rank,
        "nodes": [node],
        "relative_score": round(score.relative or 0.0, 3),
        "individual_score": round(score.individual, 3),
        **{f"{name}_seconds": round(number, 6) for name, number in seconds.items()},
    }
    return Entry("rank_fast" if slow.over else "rank_slow", text, fields)


def _reading(worker: WorkerProgress, now: float) -> Reading | None:
    use, last = worker.since_first, worker.seconds_since_boundary
    if use is None or use.waiting is None or last is None:
        return None
    return Reading(worker.boundary, now - last, use.waiting, use.loading, use.saving + use.restoring)
