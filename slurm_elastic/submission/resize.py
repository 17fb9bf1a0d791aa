"""The size of a run that trains, changed: further jobs whose agents join it, and nodes that leave it.

`plan_resize` decides, and is pure. Whatever asks for another size decides by what the leader and Slurm say at that
moment; jobs that were submitted for a run are known by their comment, which Slurm keeps.
"""

from __future__ import annotations

import getpass
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from slurm_elastic.agent.job.replacement import Result, comment, grows
from slurm_elastic.agent.option_values import GROWS_VARIABLE
from slurm_elastic.errors import UsageError
from slurm_elastic.observe.views import LiveRun, live_run
from slurm_elastic.rendezvous.connect import RendezvousConfig
from slurm_elastic.rendezvous.leader_client import (
    LeaderEndpoint,
    NoAnswerError,
    ask_status,
    ask_to_leave,
    client_name,
    find_leader,
)
from slurm_elastic.rendezvous.membership.agents import AgentIdentity, LeaveReason, job_of
from slurm_elastic.rendezvous.transport.messages import LeaveRequest
from slurm_elastic.rundir import RunContents, RunDir
from slurm_elastic.slurm import Controller, QueuedJob, natural_key
from slurm_elastic.submission.batch_script import WHOLE_ARRAY, BatchScript, require_possible
from slurm_elastic.submission.sbatch import Started, UnansweredError, read_start, submit

_ONCE = frozenset({"array", "begin", "comment", "deadline", "dependency", "nodefile", "nodelist", "nodes", "wait"})
"""Options of sbatch that were for the first job alone."""
_SBATCH_LIMIT = 60.0
"""Seconds that sbatch may take for a replacement."""
_ALIKE = (
    frozenset({"gres", "gpus", "gpus-per-node", "tres-per-node"}),
    frozenset({"mem", "mem-per-cpu", "mem-per-gpu"}),
)
"""Options of sbatch of which one replaces the others."""


@dataclass(frozen=True, slots=True)
class ResizePlan:
    """The actions for another size, and what has come of them.

    Attributes:
        submit: Nodes to ask Slurm for.
        cancel: Jobs that have not started yet, to cancel.
        leave: Nodes whose agents leave, by their job as in `job_of`.
        job: The job that was submitted; empty for none.
    """

    submit: int = 0
    cancel: tuple[str, ...] = ()
    leave: tuple[tuple[str, tuple[str, ...]], ...] = ()
    job: str = ""


def plan_resize(
    change: int | None, size: int, agents: Sequence[str], coming: Sequence[QueuedJob], least: int, most: int
) -> ResizePlan:
    """Decide what is done for another size.

    Jobs that have not started yet go first, each as a whole, then nodes: of the newest job first, and in a job from its
    last node on.

    Args:
        change: Nodes more or less; None if `size` says how many there shall be.
        size: Nodes that there shall be, if `change` is None.
        agents: Identities of the agents that are not leaving.
        coming: Jobs that were submitted for the run and have no agent yet.
        least, most: The bounds of the run.

    Raises:
        UsageError: That is beyond the bounds of the run.
    """
    now = len(agents) + sum(job.nodes for job in coming)
    target = size if change is None else now + change
    asked = f", and {now - len(agents)} asked for" if now > len(agents) else ""
    if target > most and target > now:
        raise UsageError(
            f"the run has {len(agents)} nodes{asked}, and at most {most} train, by the --nnodes of its start; start it "
            f"with a larger maximum, as in --nnodes={least}:{target}"
        )
    if target < least and target < now:
        raise UsageError(
            f"the run has {len(agents)} nodes{asked}, and needs {least}, by the --nnodes of its start; to end it, "
            "slurm-elastic drain RUN --all"
        )
    surplus, cancel = now - target, []
    for job in sorted(coming, key=lambda job: natural_key(job.name), reverse=True):
        if surplus > 0:
            cancel.append(job.name)
            surplus -= job.nodes
    leave: dict[str, list[str]] = {}
    for agent in sorted(agents, key=_newest_first, reverse=True)[: max(0, surplus)]:
        leave.setdefault(job_of(agent), []).append(agent.partition("/")[0])
    return ResizePlan(max(0, -surplus), tuple(cancel), tuple((job, tuple(nodes)) for job, nodes in leave.items()))


def _newest_first(agent: str) -> tuple[int, object]:
    identity = AgentIdentity.parse(agent)
    return (int(identity.job), natural_key(identity.node)) if identity is not None else (0, ())


def resize(
    run_dir: RunDir, *, change: int | None = None, size: int = 0, options: Mapping[str, str | None] | None = None
) -> ResizePlan:
    """Give a run that trains another number of nodes. Returns when Slurm and the leader have been asked.

    Args:
        change, size: See `plan_resize`.
        options: Options of sbatch for a further job, which replace those of the first one.

    Raises:
        UsageError: The run does not train, or that is beyond its bounds, or sbatch refuses the job.
    """
    if run_dir.is_done():
        raise UsageError(f"run {run_dir.run_id} is finished")
    for name in options or ():
        require_possible(name)
        if name in _ONCE:
            raise UsageError(f"--{name} is not possible: slurm-elastic sets it for the jobs of a run")
    controller = Controller()
    leader, live = _ask(run_dir)
    queue = controller.own_jobs(by_element=True)
    if queue is None:
        raise UsageError("squeue gives no answer on this machine; do this on a login node, outside of containers")
    begun = {AgentIdentity.parse(agent) for agent in live.agents}
    jobs = {identity.job for identity in begun if identity is not None} | RunContents(run_dir).jobs()
    agents = [agent for agent, report in live.agents.items() if report.leave is None]
    coming = [
        job
        for job in queue
        if grows(job, run_dir)
        and (job.state in ("PENDING", "CONFIGURING") or (job.state == "RUNNING" and job.job_id not in jobs))
    ]
    plan = plan_resize(change, size, agents, coming, live.answer.min_nodes, live.answer.max_nodes)
    # First what may be refused.
    if plan.submit:
        plan = _submit(run_dir, plan, live, options or {})
    for name in plan.cancel:
        controller.cancel(name)
    for start, nodes in plan.leave:
        detail = f"drained by {getpass.getuser()}"
        ask_to_leave(leader, LeaveRequest(client_name(), nodes, start, LeaveReason.DRAINED, None, detail))
    return plan


def _ask(run_dir: RunDir) -> tuple[LeaderEndpoint, LiveRun]:
    begin = time.monotonic()
    try:
        leader = find_leader(run_dir)
        answer, reports = ask_status(leader)
    except NoAnswerError as error:
        raise UsageError(f"run {run_dir.run_id} does not train: {error}") from None
    live = live_run(answer, reports, time.monotonic() - begin)
    silent = live.answer.silent
    if silent or live.answer.phase == "closed":
        why = f"no answer from {silent}; try again" if silent else "it is ending"
        raise UsageError(f"run {run_dir.run_id} keeps its size: {why}")
    return leader, live


def further_jobs(run_dir: RunDir) -> tuple[QueuedJob, ...]:
    """Return the jobs in the queue that were submitted to make the run larger; empty if Slurm does not answer."""
    return tuple(job for job in Controller().own_jobs(by_element=True) or () if grows(job, run_dir))


class ReplacementJobs:
    """Submits jobs for nodes that a run has lost; see `slurm_elastic.agent.job.replacement.Submission`."""

    def time_limit(self, run_dir: RunDir) -> str | None:
        """Return the time limit of the first job, empty for none; None if it is not on record how it was submitted."""
        started = read_start(run_dir)
        return None if started is None else started.options.get("time", "")

    def submit(self, run: RendezvousConfig, number: int, nodes: int, exclude: Sequence[str]) -> Result | None:
        """Submit a job for a claim; None if it is not known whether there is a job now."""
        started = read_start(run.run_dir)
        if started is None:
            return Result(refused="how the run was started is not on record any more")
        users = [started.options["exclude"]] if "exclude" in started.options else []
        options = {"exclude": ",".join([*users, *exclude])} if exclude else {}
        script = further_job(run.run_dir, started, nodes, f"{run.min_nodes}:{run.max_nodes}", options, number)
        try:
            return Result(submit([f"--chdir={started.directory}"], script=script.text(), timeout=_SBATCH_LIMIT))
        except UnansweredError:
            return None
        except UsageError as error:
            return Result(refused=str(error))


def _submit(run_dir: RunDir, plan: ResizePlan, live: LiveRun, options: Mapping[str, str | None]) -> ResizePlan:
    started = read_start(run_dir)
    if started is None:
        raise UsageError(
            f"how run {run_dir.run_id} was started is not on record: its batch script has to have the lines of "
            "slurm-elastic template, with job-end wait beside srun, and one run"
        )
    script = further_job(run_dir, started, plan.submit, f"{live.answer.min_nodes}:{live.answer.max_nodes}", options)
    chdir = [f"--chdir={started.directory}"] if "chdir" not in options else []
    return replace(plan, job=submit(chdir, script=script.text()))


def further_job(
    run_dir: RunDir,
    started: Started,
    nodes: int,
    bounds: str,
    options: Mapping[str, str | None],
    replacement: int | None = None,
) -> BatchScript:
    """Return the batch script of a further job of a run.

    Args:
        bounds: ``--nnodes`` of the run.
        options: Options of sbatch, which replace those of the first job.
        replacement: Its number, if it replaces nodes that were lost.
    """
    script = BatchScript.from_template(started.script)
    merged: dict[str, str | None] = {}
    for layer in (dict(script.options), started.options, options):
        replaced = {other for name in layer for alike in _ALIKE if name in alike for other in alike}
        merged = {name: value for name, value in merged.items() if name not in replaced} | dict(layer)
    name = merged.get("job-name") or "elastic"
    size = {"array": f"0-{nodes - 1}", "nodes": "1"} if WHOLE_ARRAY in started.script else {"nodes": str(nodes)}
    name = name if "job-name" in options else f"{name}-grow" if replacement is None else f"{name}-replace"
    made = {"job-name": name, "comment": comment(run_dir, replacement), **size}
    variables = {
        **started.variables,
        "PET_RDZV_ID": run_dir.run_id,
        "PET_RUN_DIR": str(run_dir.path.parent.parent),
        "PET_NNODES": bounds,
        GROWS_VARIABLE: run_dir.run_id,
    }
    kept = {name: value for name, value in merged.items() if name not in _ONCE}
    return replace(
        script,
        options=tuple({**kept, **made}.items()),
        arguments=started.arguments,
        setup=tuple(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
    )
