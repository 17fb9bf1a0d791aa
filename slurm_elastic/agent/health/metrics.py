"""The metrics page, in Prometheus' text format by prometheus_client. Pure, but for its import.

Names follow https://prometheus.io/docs/practices/naming/: one prefix, base units, `_total` for what only grows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from slurm_elastic._version import __version__
from slurm_elastic.agent.health.state import CHANGE_BUCKETS, AgentState, Readings, Stage, lost_seconds
from slurm_elastic.slow_ranks import scores

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""Of the page; it tells Prometheus the format's version."""

_PREFIX = "slurm_elastic_"
_Rows = Mapping[tuple[()], float] | Mapping[tuple[str], float] | Mapping[tuple[str, str], float]


def metrics_page(state: AgentState, readings: Readings) -> bytes:
    """Return the page. Every metric has the labels `run` and `node`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(state, readings))
    return generate_latest(registry)


class _Collected(Collector):
    def __init__(self, state: AgentState, readings: Readings) -> None:
        self._state, self._readings = state, readings
        self._constant = (state.run, state.node)

    def describe(self) -> Iterable[Metric]:
        """No descriptions, so that registering collects nothing."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        yield from self._about_agent()
        yield from self._about_rounds()
        yield from self._about_workers()

    def _about_agent(self) -> Iterator[Metric]:
        state, readings = self._state, self._readings
        yield self._gauge(
            "agent_info", "The agent: its job and version.", ("job", "version"), {(state.job, __version__): 1}
        )
        stages = {(stage.value,): float(stage is state.stage) for stage in Stage}
        yield self._gauge("agent_state", "1 for what the agent is doing, else 0.", ("state",), stages)
        yield self._plain_gauge("agent_leads", "1 on the agent that leads the run, else 0.", readings.leads)
        yield self._plain_counter("agent_cpu_seconds", "CPU time of the agent's own process.", readings.cpu_seconds)
        yield self._plain_gauge(
            "agent_resident_memory_bytes", "Resident memory of the agent's own process.", readings.resident_bytes
        )
        notices = {(notice,): float(state.notices.count(notice)) for notice in state.notices}
        yield self._counter("notices", "Notices that this node has to go, by their reason.", ("reason",), notices)
        yield self._plain_counter(
            "rejected_records",
            "Records without the secret of the run that this agent dropped while it led.",
            readings.rejected,
        )
        yield self._plain_gauge("snapshot_bytes", "Memory that this node holds for snapshots.", readings.snapshot_bytes)
        if readings.safe_step is not None:
            text = "Step of the newest snapshot of which other nodes have copies."
            yield self._plain_gauge("snapshot_safe_step", text, readings.safe_step)

    def _about_rounds(self) -> Iterator[Metric]:
        state, readings, info = self._state, self._readings, self._state.round_info
        yield self._plain_gauge("round", "Number of the round; -1 before the first.", info.round if info else -1)
        yield self._plain_gauge("members", "Nodes in the round.", info.nodes if info else 0)
        yield self._plain_gauge("world_size", "Workers in the round, of all nodes.", info.world_size if info else 0)
        rounds = {(reason,): float(count) for reason, count in state.rounds}
        yield self._counter("rounds", "Rounds that contained this node, by their reason.", ("reason",), rounds)
        yield self._round_changes()
        training = state.training
        if state.stage is Stage.TRAINING:
            training += readings.now - state.since
        yield self._plain_counter("training_seconds", "Seconds in which workers ran on this node.", training)
        lost = lost_seconds(state, readings.now)
        yield self._plain_counter("lost_seconds", "Seconds in which workers should have run and did not.", lost)
        yield self._plain_counter("restarts", "Restarts charged to the run; the same on every node.", state.restarts)
        left = max(0, state.max_restarts - state.restarts)
        yield self._plain_gauge("restarts_left", "Restarts that the run has left.", left)

    def _round_changes(self) -> Metric:
        state = self._state
        sums = [sum(state.changes[: number + 1]) for number in range(len(state.changes))]
        bounds = [*(str(bound) for bound in CHANGE_BUCKETS), "+Inf"]
        family = HistogramMetricFamily(
            f"{_PREFIX}round_change_seconds",
            "From the end of one round's workers on this node, or the agent's start, to the start of the next's.",
            labels=("run", "node"),
        )
        family.add_metric(self._constant, list(zip(bounds, sums, strict=True)), state.change_seconds)
        return family

    def _about_workers(self) -> Iterator[Metric]:
        state, readings = self._state, self._readings
        here = state.round_info.workers if state.round_info is not None and state.stage is Stage.TRAINING else ()
        yield self._plain_gauge("workers", "Workers that run on this node.", len(here))
        total = state.steps + sum(worker.boundary for worker in readings.progress)
        yield self._plain_counter("steps", "Steps taken by the workers of this node together.", total)
        ranks = {worker.local_rank: (str(worker.rank),) for worker in here}
        progress = {ranks[worker.local_rank]: worker for worker in readings.progress if worker.local_rank in ranks}
        for name, text, values in (
            ("step", "The step that a worker reached last.", {rank: w.step for rank, w in progress.items()}),
            (
                "step_age_seconds",
                "Seconds since it reached that.",
                {rank: w.seconds_since_boundary for rank, w in progress.items()},
            ),
            ("loss", "The loss that a worker reported last.", {rank: w.loss for rank, w in progress.items()}),
        ):
            known = {rank: float(value) for rank, value in values.items() if value is not None}
            yield self._gauge(f"worker_{name}", text, ("rank",), known)
        paces = {ranks[local]: pace for local, pace in readings.paces.items() if local in ranks}
        for name, text, seconds in (
            ("busy", "outside of collectives", {rank: pace.busy for rank, pace in paces.items()}),
            ("loading", "waiting for input", {rank: pace.loading for rank, pace in paces.items()}),
            ("waiting", "in collectives", {rank: pace.waiting for rank, pace in paces.items()}),
        ):
            yield self._gauge(f"worker_{name}_seconds", f"Seconds per step {text}, lately.", ("rank",), seconds)
        individual = {rank: scores({0: pace})[0].individual for rank, pace in paces.items()}
        yield self._gauge(
            "worker_individual_score", "Its best time outside of collectives by that of now.", ("rank",), individual
        )
        slow = {(str(slow_rank.rank),): slow_rank.score.relative or 0.0 for slow_rank in readings.slow}
        yield self._gauge(
            "slow_rank_score",
            "Ranks of the run that stay slow, with the others' time outside of collectives by their own; on the agent "
            "of rank 0.",
            ("rank",),
            slow,
        )
        yield self._plain_counter("watchdog_hangs", "Workers that the watchdog found hanging.", state.hangs)
        yield self._plain_counter("watchdog_kills", "Workers that the watchdog killed.", state.kills)
        yield self._plain_counter("watchdog_ignored_requests", "What the watchdog ignored.", readings.ignored)
        if readings.watchdog_age is not None:
            yield self._plain_gauge(
                "watchdog_age_seconds", "Seconds since the watchdog showed that it lives.", readings.watchdog_age
            )

    def _plain_gauge(self, name: str, text: str, value: float) -> Metric:
        return self._gauge(name, text, (), {(): float(value)})

    def _plain_counter(self, name: str, text: str, value: float) -> Metric:
        return self._counter(name, text, (), {(): float(value)})

    def _gauge(self, name: str, text: str, labels: Sequence[str], rows: _Rows) -> Metric:
        return self._filled(GaugeMetricFamily(_PREFIX + name, text, labels=("run", "node", *labels)), rows)

    def _counter(self, name: str, text: str, labels: Sequence[str], rows: _Rows) -> Metric:
        return self._filled(CounterMetricFamily(_PREFIX + name, text, labels=("run", "node", *labels)), rows)

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, rows: _Rows) -> Metric:
        for labels, value in rows.items():
            family.add_metric((*self._constant, *labels), value)
        return family
