"""The present state of a run, as its records, Slurm and its leader tell it, and its slow ranks. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from slurm_elastic.agent.event_log import json_number
from slurm_elastic.failures.history import find_loops
from slurm_elastic.observe.records import Event, RunRecords, Worker, identity_of, number
from slurm_elastic.observe.views import (
    GOES_ON,
    RUNS,
    TRAINS,
    WAITS,
    AgentView,
    Failure,
    JobInQueue,
    LiveAgent,
    LiveRun,
    LiveWorker,
    NoticeView,
    RankScore,
    Replacing,
    RunState,
    RunStatus,
    SlowRankView,
    live_json,
)
from slurm_elastic.slow_ranks import scores
from slurm_elastic.slurm import QueuedJob
from slurm_elastic.slurm.hostlist import compress, natural_key
from slurm_elastic.text import parse_time

_NEWEST_EVENTS = 10
_OWN_ID = re.compile(r"([0-9]+(?:_[0-9]+)?)(?:\.[0-9]+)?")
"""Id of a run of one step, with the name of its job: ``12``, ``12.1``, ``12_3``."""
_NOT_PLANNED = 300 * 86400.0
"""Seconds from now."""


def run_status(
    records: RunRecords,
    now: float,
    jobs: Sequence[QueuedJob] | None = None,
    leader_answers: bool | None = None,
    live: LiveRun | None = None,
) -> RunStatus:
    """Return the state of a run.

    Args:
        jobs: All jobs of this user in the queue; None if Slurm was not asked, or did not answer.
        leader_answers: True if the leader on record answers; None if it was not asked.
        live: What the leader has answered; None if it was not asked, or has not answered.
    """
    agents = _agents(records)
    if live is not None:
        agents = _with_answers(agents, live, now)
    newest = records.newest
    cause, final = _root_cause(records)
    queued = None if jobs is None else _in_queue(jobs, jobs_of(records), now)
    state, problems = _state(records, agents, queued, leader_answers, final)
    goes_on = state in GOES_ON
    training = [agent for agent in agents if agent.state in TRAINS] if state is RunState.RUNNING else []
    in_round = [event for event in records.progress if event.round == newest.number]
    limit = next(
        (event.whole("max_restarts") for event in reversed(records.progress) if event.kind == "agent_started"), None
    )
    answered = [worker for agent in agents for worker in agent.answers]
    steps = [worker.step for event in in_round for worker in event.workers if worker.reports]
    steps += [answer.step for answer in answered]
    told: list[LiveWorker | Worker] = [*answered]
    told += [worker for event in reversed(records.progress) for worker in event.workers]
    losses = ((worker.loss, worker.loss_step) for worker in told if worker.rank == 0)
    loss, loss_step = next((pair for pair in losses if pair[0] is not None), (None, None))
    saved = [answer.checkpoint for answer in answered if answer.checkpoint is not None]
    saved = saved or [worker.checkpoint for worker in told if worker.checkpoint is not None][:1]
    answered_speeds = [answer.steps_per_second for answer in answered if answer.steps_per_second is not None]
    recorded_speeds = speeds(in_round)
    history = ((event.time, event.fields) for event in (*records.events, *records.progress))
    return RunStatus(
        run=records.run_id,
        directory=records.directory,
        state=state,
        command=records.command,
        round=newest.number if newest.number >= 0 else None,
        reason=newest.reason,
        nodes=len({agent.node for agent in training}),
        world_size=sum(agent.workers for agent in training),
        restarts=newest.restarts,
        restarts_left=None if limit is None else max(0, limit - newest.restarts),
        step=max((step for step in steps if step is not None), default=None),
        checkpoint=max(saved, default=None),
        loss=None if loss is None else float(loss),
        loss_step=loss_step,
        steps_per_second=round(recorded_speeds[-1][1], 3) if recorded_speeds else min(answered_speeds, default=None),
        leader=str((records.endpoint or {}).get("agent", newest.leader)).partition("/")[0],
        leader_answers=leader_answers if goes_on else None,
        live=live,
        agents=agents if goes_on else tuple(_over(agent) for agent in agents),
        replacing=_replacing(records) if goes_on else None,
        notices=_notices(records, agents, now) if goes_on else (),
        jobs=queued,
        root_cause=cause,
        slow=slow_ranks(records.events, newest.number) if state is RunState.RUNNING else (),
        scores=() if live is None else rank_scores(live.reports, newest.number),
        loops=find_loops(history, now) if goes_on else (),
        events=records.events[-_NEWEST_EVENTS:],
        updated=max((events[-1].time for events in (records.events, records.progress) if events), default=None),
        holds="" if goes_on else _holds(agents, queued or ()),
        problems=(*records.problems, *problems, *(live.problems if live is not None else ())),
    )


def _replacing(records: RunRecords) -> Replacing | None:
    claims = {int(name): claim for name, claim in records.replacements.items() if name.isdecimal()}
    after, limit = (claims.get(0, {}).get(name) for name in ("after", "limit"))
    if not isinstance(after, int | float) or not isinstance(limit, int):
        return None
    refused = sum(bool(record.get("refused")) for record in records.replaced.values())
    return Replacing(after, len(claims) - 1 - refused, limit)


def jobs_of(records: RunRecords) -> frozenset[str]:
    """Return the ids of the jobs whose agents have taken part in the run, and its own id, if that may be a job's."""
    jobs = {identity_of(agent).job for agent in {event.agent for event in records.progress}}
    if own := _OWN_ID.fullmatch(records.run_id):
        jobs.add(own[1])
    return frozenset(jobs - {"", "0"})


def agents_of(records: RunRecords, job: str, restarts: int) -> tuple[AgentView, ...]:
    """Return the agents of one start of a job, in the order of nodes."""
    return tuple(view for view in _agents(records) if view.job == job and identity_of(view.agent).restarts == restarts)


def status_json(status: RunStatus) -> dict[str, Any]:
    """Return the state of a run as JSON; docs/events.md has the schema."""
    content = asdict(status)
    content["state"] = status.state.value
    content["live"] = None if status.live is None else live_json(status.live)
    content["loss"] = json_number(status.loss)
    content["events"] = [dict(event.fields) for event in status.events]
    return {"schema": 1, **content}


def _agents(records: RunRecords) -> tuple[AgentView, ...]:
    """Return the newest agent of every node and job, in the order of domains and nodes."""
    by_agent: dict[str, AgentView] = {}
    for event in records.progress:
        if event.agent:
            by_agent[event.agent] = _next(by_agent.get(event.agent), event)
    oldest_first = sorted(by_agent.values(), key=lambda view: (identity_of(view.agent).restarts, view.since))
    # Slurm starts a job again when it has ended all processes of its last start.
    starts = {view.job: identity_of(view.agent).restarts for view in oldest_first}
    by_place = {(view.node, view.job): view for view in oldest_first}
    views = (_seen_by_leader(view, records.events) for view in by_place.values())
    views = (view if identity_of(view.agent).restarts == starts[view.job] else _over(view) for view in views)
    return tuple(sorted(views, key=_place))


def _place(view: AgentView) -> tuple[Any, ...]:
    """Sort key of agents: nodes of a failure domain are beside each other."""
    return natural_key(view.domain), natural_key(view.node), view.job


def _with_answers(agents: Sequence[AgentView], live: LiveRun, now: float) -> tuple[AgentView, ...]:
    """Return the agents with what they have answered themselves, and those that have written no record yet."""
    views = {view.agent: view for view in agents}
    for name in live.agents:
        identity = identity_of(name)
        views.setdefault(name, AgentView(identity.node, identity.job, name, "joining", now))
    return tuple(sorted((_answering(view, live.agents.get(view.agent), now) for view in views.values()), key=_place))


def _answering(view: AgentView, answer: LiveAgent | None, now: float) -> AgentView:
    if answer is None:
        return view
    ranks = [worker.rank for worker in answer.workers]
    return replace(
        view,
        state=answer.state,
        since=now - answer.seconds,
        round=view.round if answer.round is None else answer.round,
        rank=min(ranks, default=view.rank),
        workers=len(ranks) + answer.workers_left_out or view.workers,
        exit_code=None,
        live=answer,
    )


def _next(view: AgentView | None, event: Event) -> AgentView:
    if view is None:
        view = AgentView(event.node, identity_of(event.agent).job, event.agent, "training", event.time, event.round)
    match event.kind:
        case "agent_started":
            return replace(view, state="joining", since=event.time, domain=event.word("domain"))
        case "workers_started":
            rank, workers = event.whole("rank"), event.whole("local_world_size") or 0
            return replace(view, state="training", since=event.time, round=event.round, rank=rank, workers=workers)
        case "workers_ended":
            return replace(view, state="joining", since=event.time)
        case "agent_ended":
            return replace(view, state="ended", since=event.time, exit_code=event.whole("exit_code"))
    return view


_STATE_AFTER = {"node_lost": "lost", "leader_changed": "lost", "node_left": "ended", "node_spare": "spare"}
"""The state of a node's agent after what a leader has recorded of it; the next leader records that one was lost."""


def _seen_by_leader(view: AgentView, events: Sequence[Event]) -> AgentView:
    """Return an agent with what the leader has recorded of its node since its own last record."""
    if view.state == "ended":
        return view
    for event in reversed(events):
        if event.time < view.since:
            break
        if view.node in event.nodes and (state := _STATE_AFTER.get(event.kind)) is not None:
            return replace(view, state=state, since=event.time)
    return view


def _over(view: AgentView) -> AgentView:
    """Return an agent of a run that is over: it ended without a record, as one that is killed."""
    return replace(view, state="ended") if view.alive else view


def _state(
    records: RunRecords,
    agents: Sequence[AgentView],
    queued: Sequence[JobInQueue] | None,
    leader_answers: bool | None,
    failed: bool,
) -> tuple[RunState, list[str]]:
    if records.done is not None:
        return RunState.FINISHED, []
    alive = [agent for agent in agents if agent.alive]
    problems = []
    in_slurm = queued is not None and any(agent.job != "0" for agent in agents)
    if in_slurm and queued is not None and not any(job.state in RUNS for job in queued):
        # Slurm knows better than records whose writers were killed.
        alive = [agent for agent in alive if agent.job == "0"]
    elif alive and leader_answers is False:
        if in_slurm:
            problems.append(
                "the leader does not answer: it starts, has been lost just now, or cannot be reached from here"
            )
        else:
            alive = []
    if failed and not any(agent.state not in TRAINS for agent in alive):
        return RunState.FAILED, []
    if any(agent.state in TRAINS for agent in alive):
        return RunState.RUNNING, problems
    if alive or any(job.state in WAITS | RUNS for job in queued or ()):
        return RunState.WAITING, problems
    return (RunState.FAILED if failed else RunState.STOPPED), problems


def _holds(agents: Sequence[AgentView], queued: Sequence[JobInQueue]) -> str:
    """Return why jobs of a run that is over still hold their nodes; empty if none does."""
    jobs = [job for job in queued if job.state in RUNS]
    if not jobs:
        return ""
    nodes = [agent.node for agent in agents if agent.alive]
    why = f"agents on {compress(nodes)} have not ended" if nodes else "its agents have ended, its batch script has not"
    if all(job.state == "COMPLETING" for job in jobs):
        why = "Slurm is ending its processes"
    return f"job {', '.join(job.job for job in jobs)} still holds its nodes: {why}"


def _root_cause(records: RunRecords) -> tuple[Failure | None, bool]:
    """Return the root cause, and whether it has ended the run."""
    for record in records.failures.values():
        # No identity is used twice: with another agent it is the failure of an earlier incarnation.
        if not records.rounds or str(record.get("agent")) in records.newest.agents:
            text = str(record.get("message") or f"exit code {record.get('exit_code')}")
            log = str(record.get("log") or record.get("error_file") or "")
            return _cause(record, str(record.get("node", "")), record.get("rank"), text, log), True
    for event in reversed(records.events):
        node = next(iter(event.nodes), "")
        if event.kind == "run_ended":
            failed = event.word("outcome") in ("failed", "timed_out")
            started = any(other.kind == "agent_started" and other.time > event.time for other in records.progress)
            if failed and not started:
                return _cause(event.fields, node, event.whole("rank"), event.text), True
        if event.kind == "round_ended" and event.word("reason") == "worker_failed":
            return _cause(event.fields, node, None, event.word("detail") or event.text), False
    return None, False


def _cause(fields: Mapping[str, Any], node: str, rank: object, text: str, log: str = "") -> Failure:
    words = {name: str(fields.get(name) or "") for name in ("cause", "domain", "outlook")}
    return Failure(node, rank if isinstance(rank, int) else None, text, log, **words)


def _in_queue(jobs: Iterable[QueuedJob], ids: frozenset[str], now: float) -> tuple[JobInQueue, ...]:
    elements = any("_" in name for name in ids)
    queued = []
    for job in jobs:
        # An element that is a run of its own may have the id of its array as that of its job.
        if job.name in ids or (not elements and (job.job_id in ids or job.array_job_id in ids)):
            start = job.start_time if job.state == "PENDING" else None
            # Slurm counts a job without a limit as one of a year: behind it, a year from now means that it is unknown.
            planned = None if start is None or start - now > _NOT_PLANNED else start
            queued.append(JobInQueue(job.name, job.state, job.reason, planned))
    return tuple(queued)


def _notices(records: RunRecords, agents: Sequence[AgentView], now: float) -> tuple[NoticeView, ...]:
    notices = [
        NoticeView(agent.job, leave.text or leave.reason, leave.seconds, agent.node)
        for agent in agents
        if agent.live is not None and (leave := agent.live.leave) is not None
    ]
    told = {notice.job for notice in notices}
    leaving = {f"{agent.job}.{identity_of(agent.agent).restarts}": agent.job for agent in agents if agent.alive}
    for name, record in records.notices.items():
        if name in leaving and leaving[name] not in told:
            when, seconds = parse_time(record.get("time")), number(record.get("seconds"))
            left = None if when is None or seconds is None else round(max(0.0, seconds - (now - when)), 1)
            notices.append(NoticeView(leaving[name], str(record.get("text", "")), left))
    return tuple(notices)


def speeds(progress: Sequence[Event]) -> tuple[tuple[float, float], ...]:
    """Return the steps per second between records of rank 0 in a round, each by the time in the middle of them."""
    started: dict[tuple[str, int | None], float] = {}
    before: dict[tuple[str, int | None], tuple[int, float]] = {}
    points = []
    for event in progress:
        key = event.agent, event.round
        if event.kind == "workers_started":
            started[key] = event.time
        if event.kind not in ("progress", "workers_ended") or key not in started:
            continue
        worker = next((candidate for candidate in event.workers if candidate.reports and candidate.rank == 0), None)
        if worker is None or worker.first is None or worker.last is None:
            continue
        steps, at = before.get(key, (1, worker.first))
        if worker.steps > steps and worker.last > at:
            points.append((started[key] + (at + worker.last) / 2, (worker.steps - steps) / (worker.last - at)))
        before[key] = worker.steps, worker.last
    return tuple(points)


def slow_by_round(events: Sequence[Event]) -> dict[int, tuple[SlowRankView, ...]]:
    """Return the ranks that were slow in each round, in the order in which they were named."""
    by_round: dict[int, list[SlowRankView]] = {}
    for event in events:
        rank, round_ = event.whole("rank"), event.round
        if event.kind not in ("rank_slow", "rank_fast") or rank is None or round_ is None:
            continue
        of_round = by_round.setdefault(round_, [])
        if event.kind == "rank_slow":
            node = next(iter(event.nodes), "")
            of_round.append(SlowRankView(rank, node, event.time, None, event.number("relative_score"), event.text))
        else:
            for index, view in enumerate(of_round):
                if view.rank == rank and view.until is None:
                    of_round[index] = replace(view, until=event.time)
    return {round_: tuple(views) for round_, views in by_round.items()}


def slow_ranks(events: Sequence[Event], round_: int) -> tuple[SlowRankView, ...]:
    """Return the ranks of a round that stay slow."""
    return tuple(view for view in slow_by_round(events).get(round_, ()) if view.until is None)


def rank_scores(reports: Mapping[str, str], round_: int) -> tuple[RankScore, ...]:
    """Return the scores of all ranks of a round whose pace is known, in the order of ranks, from agents' reports."""
    # It imports msgspec.
    from slurm_elastic.agent.step_timing import paces_of

    paces, nodes = paces_of(reports, round_)
    ranked = []
    for rank, score in sorted(scores(paces).items()):
        relative = None if score.relative is None else round(score.relative, 3)
        seconds = paces[rank].busy, paces[rank].loading, paces[rank].waiting
        ranked.append(RankScore(rank, nodes[rank], relative, round(score.individual, 3), *seconds))
    return tuple(ranked)
