"""Requeues a job whose part in the run is over, once per incarnation; no other module does.

`job_end` decides; this module asks Slurm and the run directory, and executes.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from slurm_elastic import typed_json
from slurm_elastic.agent.job.job_end import requeue_decision
from slurm_elastic.agent.option_values import OptionValues
from slurm_elastic.errors import ExitCode
from slurm_elastic.failures.history import bad_domains, bad_nodes, node_domains, nodes_to_exclude, strikes
from slurm_elastic.rundir import JobRecords, RunContents, RunDir
from slurm_elastic.slurm import Cause, Controller, Diagnosis, JobView, SlurmJob, classify
from slurm_elastic.text import parse_time

_EXIT_CODE = f"; exit code {ExitCode.LEFT.value}, in srun's words, is that of agents that have left"
_WAIT = 600.0
"""Seconds to wait for a slurmctld that does not answer. Meanwhile it gives the nodes to no other job either."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0
_FINAL = (ExitCode.FINISHED, ExitCode.FAILED, ExitCode.USAGE, ExitCode.FENCED)
_TRUSTED_NOTICES = (Cause.REQUEUE_WANTED, Cause.DRAINED, Cause.PREEMPTED, Cause.TIME_LIMIT_NEAR)


def requeue_job(
    run_dir: RunDir,
    job: SlurmJob,
    status: int,
    *,
    controller: Controller,
    values: OptionValues,
    failed: bool,
    say: Callable[[str], None],
    others_go_on: bool = False,
    wait: float = _WAIT,
) -> bool:
    """Requeue the job if it has to go on; return True if it will start again.

    Args:
        status: The highest exit code of its agents.
        others_go_on: True if other agents of the job may still train, so that it is requeued only if Slurm ends it
            anyway, or a person has requested it.

    Raises:
        RunDirError: The run directory cannot be read or written.
    """
    restart_count, records = job.restart_count, JobRecords(run_dir, job.job_id)
    notice = records.notice(restart_count) or {}
    if failed or status in _FINAL or (others_go_on and not notice):
        return False
    deadline = time.monotonic() + wait
    view = _ask(controller, job.name, deadline)
    # Flags such as SIGNALING hide RUNNING (job_state_string of Slurm).
    runs = view is not None and view.state != "PENDING" and not view.has_ended
    config, signals = controller.config() if runs else None, _signals(notice)
    finding = classify(signals, 0.0, view, restart_count, config=config, meaning=values.meaning)
    earlier, progress = records.requeues(), notice.get("progress")
    # The progress of the run: the last checkpoint if the trainer reports it, else the newest round.
    mark = f"round {run_dir.newest('rounds')}" if progress is None else f"checkpoint {progress}"
    marks = ["round None", *(record.get("mark") for record in earlier)]
    decision = requeue_decision(
        _cause(notice, finding),
        view,
        restart_count,
        warned=bool({signal.SIGUSR1, signal.SIGUSR2} & set(signals)),
        counted=sum(record.get("counted") is True for record in earlier),
        idle=sum(1 for _ in itertools.takewhile(lambda earlier_mark: earlier_mark == mark, reversed(marks))),
        most=values.max_requeues,
    )
    if others_go_on and finding.cause is Cause.SIGNALLED and decision.counted:
        return False
    if not decision.request:
        if decision.why:
            say(f"job {job.name}: {decision.why}")
        return decision.by_slurm
    ours = {node for before in earlier for node in before.get("excluded") or ()}
    users = [node for node in (view.excluded if view is not None else ()) if node not in ours]
    struck = struck_nodes(run_dir, values.max_excluded, lambda line: say(f"job {job.name}: {line}"))
    bad = struck[: _room(controller, job, view, users)] if struck else ()
    record = {"why": decision.why, "counted": decision.counted, "mark": mark, "excluded": list(bad)}
    if not records.claim_requeue(restart_count, record):
        return True
    # Printed before the requeue, which ends this process, too.
    say(f"job {job.name}: {decision.why}{_EXIT_CODE if status == ExitCode.LEFT else ''}")
    why_not = _requeue(controller, job, deadline, if_running=runs)
    if why_not:
        say(f"job {job.name}: not requeued: {why_not}; submit it again to go on")
        return False
    excluded = tuple(dict.fromkeys([*users, *bad]))
    if excluded != (view.excluded if view is not None else ()):
        fact = f"it excludes {', '.join(excluded) or 'no node'} from now on"
        why = "their strikes are in the events of the run" if bad else "the strikes of others have expired"
        if controller.exclude(job.name, excluded):
            say(f"job {job.name}: {fact}: {why}")
        else:
            say(f"job {job.name}: Slurm did not accept that {fact}; bad nodes: {', '.join(bad)}")
    return True


def _cause(notice: Mapping[str, Any], finding: Diagnosis) -> Cause:
    """Return the cause in the agents' notice, if that is from Slurm or a person, and Slurm names no other one now.

    A slurmctld that was killed in the meantime does not know any more that it has preempted the job.
    """
    noted = {cause.name: cause for cause in _TRUSTED_NOTICES}.get(notice.get("cause", ""))
    return noted if noted is not None and finding.cause in (Cause.SIGNALLED, Cause.UNKNOWN) else finding.cause


def _signals(notice: Mapping[str, Any]) -> tuple[signal.Signals, ...]:
    names = notice.get("signals")
    members = signal.Signals.__members__
    return tuple(members[name] for name in names if name in members) if isinstance(names, list) else ()


def struck_nodes(run_dir: RunDir, most: int, say: Callable[[str], None] = lambda _: None) -> tuple[str, ...]:
    """Return the nodes that have strikes, by the events of all starts of the run; say which domains have several."""
    if not most:
        return ()
    history = read_history(run_dir)
    bad, domains = bad_nodes(strikes(history), time.time()), node_domains(history)
    for domain, number in bad_domains(bad, domains).items():
        say(f"{number} nodes of failure domain {domain} are bad: look at what they share, such as a switch")
    return nodes_to_exclude(bad, domains, most)


def _room(controller: Controller, job: SlurmJob, view: JobView | None, users: Sequence[str]) -> int:
    """Return how many nodes the partition can spare beside `users`: with too few left the job would never start."""
    partitions = controller.partitions() if view is not None else None
    sizes = [row.nodes for row in partitions or () if view is not None and row.name == view.partition]
    return max(0, sizes[0] - len(users) - len(job.job_nodes)) if sizes else 0


def _requeue(controller: Controller, job: SlurmJob, deadline: float, *, if_running: bool) -> str:
    """Requeue the job; return why Slurm has not, empty if it has."""
    for _ in _attempts(deadline):
        accepted = controller.requeue(job.name, if_running=if_running)
        silent = controller.is_silent
        if accepted and not if_running:
            return ""
        view = controller.job(job.name)
        if view is not None and (view.restarts > job.restart_count or view.state == "PENDING"):
            return ""
        if accepted:
            if view is None or not view.has_ended:
                return ""
            if classify((), 0.0, view, job.restart_count).cause is Cause.CANCELLED:
                return "it was cancelled or has ended meanwhile"
            # Its time limit or another cause that it comes back from has ended it meanwhile.
            return _requeue(controller, job, deadline, if_running=False)
        if not silent:
            break
    return "scontrol requeue failed"


def _ask(controller: Controller, name: str, deadline: float) -> JobView | None:
    for _ in _attempts(deadline):
        view = controller.job(name)
        if view is not None or not controller.is_silent:
            return view
    return None


def _attempts(deadline: float) -> Iterator[None]:
    """Yield for each attempt to get an answer of slurmctld, with pauses, until the deadline."""
    pause = _FIRST_PAUSE
    while True:
        yield
        if time.monotonic() > deadline:
            return
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def read_history(run_dir: RunDir, *, progress: bool = True) -> list[tuple[float, dict[str, Any]]]:
    """Return the events, and the progress, of all starts of the run, each with its time in seconds since 1970."""
    contents = RunContents(run_dir)
    history = []
    for file in [*contents.events(), *(contents.progress() if progress else ())]:
        for line in file.content.splitlines():
            # An agent may have been killed while it wrote this line.
            with contextlib.suppress(ValueError):
                event = typed_json.loads(line)
                if isinstance(event, dict) and (when := parse_time(event.get("time"))) is not None:
                    history.append((when, event))
    return history
