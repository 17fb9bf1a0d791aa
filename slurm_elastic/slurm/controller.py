"""The one place that asks Slurm anything: scontrol and scancel, always with a time-out.

Nothing here raises when Slurm does not answer: containers have no scontrol, and slurmctld may be down exactly when a
job is being preempted. Then the answer is None or unknown, and each kind of failure is logged once.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import re
import signal
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from slurm_elastic.errors import UsageError
from slurm_elastic.slurm.hostlist import expand

__all__ = [
    "Controller",
    "ControllerClock",
    "JobView",
    "NodeState",
    "NodeView",
    "parse_clock",
    "parse_jobs",
    "parse_nodes",
]

_log = logging.getLogger(__name__)

_DOWN = frozenset({"DOWN", "ERROR", "FAIL", "FUTURE", "INVAL", "POWERED_DOWN", "POWERING_DOWN", "REBOOT_ISSUED"})
_DRAINED = frozenset({"DRAIN", "DRAINED", "DRAINING", "FAILING"})
_UNKNOWN = frozenset({"UNKNOWN", "NOT_RESPONDING", "NO_RESPOND"})

_SILENCE = re.compile(r"Unable to contact slurm controller|Socket timed out|Connection refused|Zero Bytes were")
"""What scontrol says when slurmctld is down or too busy (slurm_errno.c)."""
_FREE_TEXT = frozenset({"JobName", "Comment", "AdminComment", "SystemComment", "Extra", "Command", "WorkDir"})
"""Keys of ``scontrol show job`` whose values may hold blanks and text that looks like other keys."""


class NodeState(enum.Enum):
    """What Slurm thinks of a node."""

    UP = "up"
    DOWN = "down"
    """Does not come back by itself: down, failed, powered off, rebooting."""
    DRAINED = "drained"
    """Gets no new job; one that runs there may go on. Slurm's DRAINING and DRAINED."""
    UNKNOWN = "unknown"
    """Not responding but not given up yet (SlurmdTimeout), or Slurm could not be asked."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node of ``scontrol show node``."""

    name: str
    address: str | None
    """NodeAddr: an address or a name, the only one that is certain to reach the node's slurmd."""
    state: NodeState


@dataclass(frozen=True, slots=True)
class JobView:
    """One job of ``scontrol show job``. Times are seconds since the epoch by the controller's clock."""

    job_id: str
    array_job_id: str | None
    array_task_id: str | None
    """Index of an array element; for elements not started yet it may be a list such as ``3-7%2``."""
    state: str
    """JobState. COMPLETING hides the state below it; see `reason` and `restarts`."""
    reason: str | None
    """Reason, such as TimeLimit, NodeDown or BeginTime; None if Slurm gives none."""
    restarts: int
    """Restarts: more than SLURM_RESTART_COUNT means that Slurm has requeued the job already."""
    requeue: bool
    """Requeue: whether Slurm may requeue the job."""
    preempt_time: int | None
    """PreemptTime: set as soon as the job is chosen for preemption. None also where preemption is off."""
    end_time: int | None
    """EndTime: moves to `preempt_time` plus GraceTime on preemption."""
    nodes: tuple[str, ...]
    """NodeList: without nodes that Slurm took away from a ``--no-kill`` job; empty while pending."""
    held: bool = False
    """Priority=0: ``scontrol hold``, or Slurm itself, holds the job. One that runs then runs on, but does not start
    again before somebody calls ``scontrol release`` (scontrol(1), "hold")."""


@dataclass(frozen=True, slots=True)
class ControllerClock:
    """The controller's own time, to be compared with the times in a `JobView`."""

    now: int
    """Seconds since the epoch."""
    kill_wait: int
    """KillWait: seconds between SIGTERM and SIGKILL when Slurm ends a job."""


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    output: str
    complaint: str


class Controller:
    """Asks slurmctld. Calls block for up to ``timeout`` seconds each: not for a thread that watches for signals."""

    def __init__(self, timeout: float = 5.0) -> None:
        self._timeout = timeout
        self._logged: set[tuple[str, str]] = set()
        self.is_silent = False
        """Whether slurmctld did not answer the last question, so that asking again may help. Not where there is no
        scontrol, or where it is not configured, as in a container."""
        # SLURM_CLUSTERS, which sbatch --clusters leaves behind, would send the question to another cluster, by way of
        # slurmdbd. Epoch seconds need no time zone: scontrol(1), SLURM_TIME_FORMAT, which takes strftime's formats.
        self._environ = {key: value for key, value in os.environ.items() if key != "SLURM_CLUSTERS"}
        self._environ.update(SLURM_TIME_FORMAT="%s", LC_ALL="C")

    def node_address(self, name: str) -> str | None:
        """Return the NodeAddr of a node, None if unknown. It may equal the name."""
        view = self._nodes((name,)).get(name)
        return view.address if view else None

    def knows_node(self, name: str) -> bool | None:
        """Return whether there is a node of that name, None if Slurm does not say."""
        # For an unknown one sinfo prints nothing and exits with 0; --all for nodes of hidden partitions.
        answer = self._ask("sinfo", "--noheader", "--all", "--format=%N", f"--nodes={name}")
        return bool(answer.output.strip()) if answer is not None and answer.status == 0 else None

    def node_states(self, names: Iterable[str]) -> dict[str, NodeState]:
        """Return what Slurm thinks of every one of the nodes, by one question."""
        asked = tuple(names)
        views = self._nodes(asked)
        return {name: views[name].state if name in views else NodeState.UNKNOWN for name in asked}

    def job(self, job_id: str) -> JobView | None:
        """Return what Slurm says about a job (``12``) or an array element (``12_3``), None if it says nothing."""
        answer = self._ask("scontrol", "show", "job", job_id)
        for view in parse_jobs(answer.output) if answer else ():
            if job_id in (view.job_id, f"{view.array_job_id}_{view.array_task_id}"):
                return view
        return None

    def elements(self, array_job_id: str) -> tuple[JobView, ...]:
        """Return what Slurm says about all elements of an array that it knows, nothing if it does not answer."""
        answer = self._ask("scontrol", "show", "job", array_job_id)
        return parse_jobs(answer.output) if answer else ()

    def is_queued(self, job_id: str) -> bool | None:
        """Return whether a job, or any element of an array, waits or runs; None if Slurm does not say.

        A job that is put back into the queue is there all the time. Finished jobs are not in squeue's list, and some
        minutes later (MinJobAge, slurm.conf(5)) their ids are unknown.
        """
        answer = self._ask("squeue", "--noheader", "--format=%T", "--jobs", job_id)
        if answer is None:
            return None
        if answer.status == 0:
            return bool(answer.output.strip())
        return False if "Invalid job id" in answer.complaint else None

    def clock(self) -> ControllerClock | None:
        """Return the controller's time, None if it does not answer.

        ``scontrol show config`` is the one command whose head line, "Configuration data as of", is filled in by
        slurmctld (proc_req.c, _fill_ctld_conf). RunTime of a job and the time left of squeue are worked out from the
        clock of the machine that asks.
        """
        answer = self._ask("scontrol", "show", "config")
        return parse_clock(answer.output) if answer else None

    def requeue(self, job_id: str) -> bool:
        """Requeue a job, which ends this incarnation of it. Returns whether Slurm did.

        Slurm refuses for jobs that are pending already and for those submitted with ``--no-requeue``.
        """
        answer = self._ask("scontrol", "requeue", job_id)
        return answer is not None and answer.status == 0

    def cancel(self, job_id: str) -> bool:
        """Cancel a job or array element. Returns whether Slurm took the order."""
        answer = self._ask("scancel", job_id)
        return answer is not None and answer.status == 0

    def _nodes(self, names: tuple[str, ...]) -> dict[str, NodeView]:
        # scontrol exits with 1 if one of several nodes is not known to it, and still prints the others.
        answer = self._ask("scontrol", "--oneliner", "show", "node", ",".join(names)) if names else None
        return parse_nodes(answer.output) if answer else {}

    def _ask(self, *command: str) -> _Answer | None:
        self.is_silent = False
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=self._environ,
                start_new_session=True,
            )
        except OSError as error:
            self._log_once(command, f"cannot be started: {error.strerror}")
            return None
        try:
            output, complaint = process.communicate(timeout=self._timeout)
        except subprocess.TimeoutExpired:
            _kill(process)
            self.is_silent = True
            self._log_once(command, f"gave no answer within {self._timeout:g} s")
            return None
        if process.returncode != 0:
            # Under proctrack/linuxproc a signal for the job hits what it has started, too.
            self.is_silent = process.returncode < 0 or _SILENCE.search(complaint) is not None
            self._log_once(command, f"failed: {complaint.strip() or f'exit code {process.returncode}'}")
        return _Answer(process.returncode, output, complaint)

    def _log_once(self, command: tuple[str, ...], what: str) -> None:
        kind = (" ".join(command[:-1]), what)
        if kind not in self._logged:
            self._logged.add(kind)
            _log.warning("%s %s", " ".join(command), what)


def parse_nodes(text: str) -> dict[str, NodeView]:
    """Parse ``scontrol --oneliner show node``."""
    views = {}
    for line in text.splitlines():
        # Free text (OS, Comment, Reason, Extra) holds blanks; of the keys looked at here, none follows a field that
        # a user fills, so the first one of each is Slurm's own.
        fields = dict(reversed(re.findall(r"(?:^|\s)(NodeName|NodeAddr|State)=(\S+)", line)))
        if "NodeName" in fields:
            name = fields["NodeName"]
            views[name] = NodeView(name, fields.get("NodeAddr"), _node_state(fields.get("State", "")))
    return views


def parse_jobs(text: str) -> tuple[JobView, ...]:
    """Parse ``scontrol show job``, printed with SLURM_TIME_FORMAT=%s; for an array it prints several jobs."""
    records = re.split(r"^(?=JobId=)", text, flags=re.MULTILINE)
    return tuple(_job_view(_job_fields(record)) for record in records if record.startswith("JobId="))


def parse_clock(text: str) -> ControllerClock | None:
    """Parse ``scontrol show config``, printed with SLURM_TIME_FORMAT=%s; None if it holds no time."""
    now = re.search(r"^Configuration data as of ([0-9]{1,18})$", text, flags=re.MULTILINE)
    kill_wait = re.search(r"^KillWait\s*=\s*([0-9]{1,9}) sec$", text, flags=re.MULTILINE)
    return ControllerClock(int(now[1]), int(kill_wait[1])) if now and kill_wait else None


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a program with what it started; one stuck in the kernel is left to the reaper of its parent."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()


def _node_state(text: str) -> NodeState:
    """Read ``MIXED+DRAIN`` or ``DOWN*``; before 21.08 a star stood for NOT_RESPONDING."""
    words = set(re.findall(r"[A-Z_]+", text))
    if words & _DOWN:
        return NodeState.DOWN
    if "*" in text or words & _UNKNOWN or not words:
        return NodeState.UNKNOWN
    return NodeState.DRAINED if words & _DRAINED else NodeState.UP


def _job_fields(record: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in record.splitlines():
        for word in line.split():
            key, sign, value = word.partition("=")
            if key in _FREE_TEXT:
                break
            if sign:
                fields.setdefault(key, value)
    return fields


def _job_view(fields: dict[str, str]) -> JobView:
    return JobView(
        job_id=fields["JobId"],
        array_job_id=fields.get("ArrayJobId"),
        array_task_id=fields.get("ArrayTaskId"),
        state=fields.get("JobState", ""),
        reason=reason if (reason := fields.get("Reason")) != "None" else None,
        restarts=_seconds(fields.get("Restarts")) or 0,
        requeue=fields.get("Requeue") == "1",
        preempt_time=_seconds(fields.get("PreemptTime")),
        end_time=_seconds(fields.get("EndTime")),
        nodes=_node_list(fields.get("NodeList", "")),
        held=fields.get("Priority") == "0",
    )


def _seconds(text: str | None) -> int | None:
    """Read a number; Slurm writes None, Unknown or N/A for times that are not set."""
    return int(text) if text and re.fullmatch(r"[0-9]{1,18}", text) else None


def _node_list(text: str) -> tuple[str, ...]:
    try:
        return expand(text) if text not in ("", "(null)") else ()
    except UsageError:
        return ()
