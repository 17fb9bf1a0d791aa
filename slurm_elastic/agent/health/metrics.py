"""The metrics page, in Prometheus' text format by prometheus_client. Pure, but for its import.

Names follow https://prometheus.io/docs/practices/naming/: one prefix, base units, `_total` for what only grows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from slurm_elastic._version import __version__
from slurm_elastic.agent.health.state import AgentState, Readings, Stage, lost_seconds
from slurm_elastic.slow_ranks import scores

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""Of the page; it tells Prometheus the format's version."""

_PREFIX = "slurm_elastic_"
_CHANGE_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds, in seconds, of the histogram of round changes."""
_Values = float | Mapping[str, float] | Mapping[tuple[str, ...], float]
"""The value of a metric, or its values by what its labels are."""


def metrics_page(state: AgentState, readings: Readings) -> bytes:
    """Return the page. Every metric has the labels `run` and `node`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(state, readings))
    return generate_latest(registry)


class _Collected(Collector):
    def __init__(self, state: AgentState, readings: Readings) -> None:
        self._state, self._readings = state, readings
        self._constant = (state.run, state.node)

    def collect(self) -> Iterator[Metric]:
        yield from self._about_agent()
        yield from self._about_rounds()
        yield from self._about_workers()

    def _about_agent(self) -> Iterator[Metric]:
        state, readings = self._state, self._readings
        gauge, counter = self._gauge, self._counter
        about: dict[tuple[str, ...], float] = {(state.job, __version__): 1.0}
        yield gauge("agent_info", "The agent: its job and version.", about, "job", "version")
        stages = {stage.value: float(stage is state.stage) for stage in Stage}
        yield gauge("agent_state", "1 for what the agent is doing, else 0.", stages, "state")
        yield gauge("agent_leads", "1 on the agent that leads the run, else 0.", readings.leads)
        yield counter("agent_cpu_seconds", "CPU time of the agent's own process.", readings.cpu_seconds)
        text = "Resident memory of the agent's own process."
        yield gauge("agent_resident_memory_bytes", text, readings.resident_bytes)
        notices = Counter(state.notices)
        yield counter("notices", "Notices that this node has to go, by their reason.", notices, "reason")
        text = "Records without the secret of the run that this agent dropped while it led."
        yield counter("rejected_records", text, readings.rejected)
        yield gauge("snapshot_bytes", "Memory that this node holds for snapshots.", readings.snapshot_bytes)
        if readings.safe_step is not None:
            text = "Step of the newest snapshot of which other nodes have copies."
            yield gauge("snapshot_safe_step", text, readings.safe_step)

    def _about_rounds(self) -> Iterator[Metric]:
        state, info, now = self._state, self._state.round_info, self._readings.now
        assignment = info.assignment if info is not None else None
        gauge, counter = self._gauge, self._counter
        yield gauge("round", "Number of the round; -1 before the first.", assignment.round if assignment else -1)
        yield gauge("members", "Nodes in the round.", assignment.nodes if assignment else 0)
        yield gauge("world_size", "Workers in the round, of all nodes.", assignment.world_size if assignment else 0)
        yield counter("rounds", "Rounds that contained this node, by their reason.", Counter(state.rounds), "reason")
        yield self._round_changes()
        training = state.training + (now - state.since if state.stage is Stage.TRAINING else 0.0)
        yield counter("training_seconds", "Seconds in which workers ran on this node.", training)
        text = "Seconds in which workers should have run and did not."
        yield counter("lost_seconds", text, lost_seconds(state, now))
        yield counter("restarts", "Restarts charged to the run; the same on every node.", state.restarts)
        left = max(0, state.max_restarts - state.restarts)
        yield gauge("restarts_left", "Restarts that the run has left.", left)

    def _round_changes(self) -> Metric:
        changes = self._state.changes
        family = HistogramMetricFamily(
            f"{_PREFIX}round_change_seconds",
            "From the end of one round's workers on this node, or the agent's start, to the start of the next's.",
            labels=("run", "node"),
        )
        within = [(str(most), sum(change <= most for change in changes)) for most in _CHANGE_BUCKETS]
        family.add_metric(self._constant, [*within, ("+Inf", len(changes))], sum(changes))
        return family

    def _about_workers(self) -> Iterator[Metric]:
        state, readings = self._state, self._readings
        gauge, counter = self._gauge, self._counter
        here = state.round_info.workers if state.round_info is not None and state.stage is Stage.TRAINING else ()
        yield gauge("workers", "Workers that run on this node.", len(here))
        yield counter("steps", "Steps taken by the workers of this node together.", readings.steps)
        ranks = {local: str(rank) for rank, local, _ in here}
        progress = {ranks[worker.local_rank]: worker for worker in readings.progress if worker.local_rank in ranks}
        for name, field, text in (
            ("step", "step", "The step that a worker reached last."),
            ("step_age_seconds", "seconds_since_boundary", "Seconds since it reached that."),
            ("loss", "loss", "The loss that a worker reported last."),
        ):
            values = {rank: getattr(worker, field) for rank, worker in progress.items()}
            known = {rank: float(value) for rank, value in values.items() if value is not None}
            yield gauge(f"worker_{name}", text, known, "rank")
        paces = {ranks[local]: pace for local, pace in readings.paces.items() if local in ranks}
        for name, text in (
            ("busy", "outside of collectives"),
            ("loading", "waiting for input"),
            ("waiting", "in collectives"),
        ):
            seconds: dict[str, float] = {rank: getattr(pace, name) for rank, pace in paces.items()}
            yield gauge(f"worker_{name}_seconds", f"Seconds per step {text}, lately.", seconds, "rank")
        individual = {rank: scores({0: pace})[0].individual for rank, pace in paces.items()}
        text = "Its best time outside of collectives by that of now."
        yield gauge("worker_individual_score", text, individual, "rank")
        slow = {str(slow_rank.rank): slow_rank.score.relative or 0.0 for slow_rank in readings.slow}
        text = (
            "Ranks of the run that stay slow, with the others' time outside of collectives by their own; on the agent "
        )
        yield gauge("slow_rank_score", f"{text}of rank 0.", slow, "rank")
        yield counter("watchdog_hangs", "Workers that the watchdog found hanging.", state.hangs)
        yield counter("watchdog_kills", "Workers that the watchdog killed.", state.kills)
        yield counter("watchdog_ignored_requests", "What the watchdog ignored.", readings.ignored)
        if readings.watchdog_age is not None:
            text = "Seconds since the watchdog showed that it lives."
            yield gauge("watchdog_age_seconds", text, readings.watchdog_age)

    def _gauge(self, name: str, text: str, values: _Values, *labels: str) -> Metric:
        return self._filled(GaugeMetricFamily(_PREFIX + name, text, labels=("run", "node", *labels)), values)

    def _counter(self, name: str, text: str, values: _Values, *labels: str) -> Metric:
        return self._filled(CounterMetricFamily(_PREFIX + name, text, labels=("run", "node", *labels)), values)

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, values: _Values) -> Metric:
        for label, value in values.items() if isinstance(values, Mapping) else (((), float(values)),):
            family.add_metric((*self._constant, *((label,) if isinstance(label, str) else label)), value)
        return family
