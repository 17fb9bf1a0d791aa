"""Parsers for the output of scontrol, squeue and sacctmgr: jobs, nodes, and facts about the site."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from slurm_elastic.errors import UsageError
from slurm_elastic.slurm.hostlist import expand

_DOWN = frozenset({"DOWN", "ERROR", "FAIL", "FUTURE", "INVAL", "POWERED_DOWN", "POWERING_DOWN", "REBOOT_ISSUED"})
_DRAINED = frozenset({"DRAIN", "DRAINED", "DRAINING", "FAILING"})
_UNKNOWN = frozenset({"UNKNOWN", "NOT_RESPONDING", "NO_RESPOND"})

_FREE_TEXT = frozenset({"JobName", "Comment", "AdminComment", "SystemComment", "Extra", "Command", "WorkDir"}) | {
    "SubmitLine"
}
"""Keys of ``scontrol show job`` whose values may hold blanks and text that looks like other keys. SubmitLine, which
Slurm 26.05 prints, is a whole command line."""


_REQUESTED = {
    "Partition": "partition",
    "Account": "account",
    "QOS": "qos",
    "Reservation": "reservation",
    "TimeLimit": "time",
    "Features": "constraint",
    "Licenses": "licenses",
    "ExcNodeList": "exclude",
    "CPUs/Task": "cpus-per-task",
    "MinMemoryNode": "mem",
    "MinMemoryCPU": "mem-per-cpu",
}
_UNASKED = frozenset({"", "(null)", "N/A", "0", "UNLIMITED", "Partition_Limit"})
"""Values of `_REQUESTED` that say nothing."""


class NodeState(enum.Enum):
    """The state of a node in Slurm."""

    UP = "up"
    DOWN = "down"
    """Down, failed, powered off or rebooting."""
    DRAINED = "drained"
    """Gets no new job; its jobs may go on. Slurm's DRAINING and DRAINED."""
    UNKNOWN = "unknown"
    """Not responding, and SlurmdTimeout is not over; or Slurm does not answer."""


_ENDED = frozenset({"BOOT_FAIL", "CANCELLED", "COMPLETED", "COMPLETING", "DEADLINE", "FAILED", "NODE_FAIL"}) | {
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
}


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node of ``scontrol show node``."""

    address: str | None
    """NodeAddr: an address or a name; it certainly reaches the node's slurmd."""
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
    """Reason, such as TimeLimit, NodeDown or BeginTime; None for none."""
    restarts: int
    """Restarts: more than SLURM_RESTART_COUNT means that Slurm has requeued the job already."""
    requeue: bool
    """Requeue: True if Slurm may requeue the job."""
    preempt_time: int | None
    """PreemptTime: set as soon as the job is chosen for preemption. None also where preemption is off."""
    end_time: int | None
    """EndTime: moves to `preempt_time` plus GraceTime on preemption. None where scontrol prints Unknown: of a pending
    job, and of any job without a time limit until its end, in the grace of a preemption too (info_job.c, 22.05 to
    26.05)."""
    nodes: tuple[str, ...]
    """NodeList: without nodes that Slurm took away from a ``--no-kill`` job; empty while pending."""
    excluded: tuple[str, ...] = ()
    """ExcNodeList: nodes on which the job does not start, of ``sbatch --exclude`` or set since then."""
    held: bool = False
    """Priority=0: ``scontrol hold``, or Slurm itself, holds the job. One that runs then runs on, but does not start
    again before ``scontrol release`` (scontrol(1), "hold")."""
    unlimited: bool = False
    """TimeLimit=UNLIMITED: Slurm sends such a job no warning, and tells no EndTime."""
    partition: str | None = None
    """Partition in which the job runs."""
    qos: str | None = None
    """QOS, None without accounting."""
    start_time: int | None = None
    """StartTime of this start of the job."""
    het_job_id: str | None = None
    """HetJobId: the id that all components of a heterogeneous job share; None for any other job."""
    exit_code: int = 0
    """ExitCode: of the batch script, and 128 more than the number of the signal that ended it; 0 before its end."""
    batch_host: str = ""
    """BatchHost: where the batch script runs or ran; Slurm may have taken that node away since. Empty without one."""

    @property
    def has_ended(self) -> bool:
        """True if this start of the job is over, also while its processes end."""
        return self.state in _ENDED


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job in the queue, as squeue lists it."""

    name: str
    """The job's id for people: ``12``, ``12_3``, or ``12_[4-7]`` for elements that have not started yet."""
    job_id: str
    state: str
    nodes: int
    comment: str = ""
    array_job_id: str = ""
    """The same as `job_id` for a job that is no array element."""
    reason: str | None = None
    """Why a job waits; None for none."""
    start_time: int | None = None
    """Of a pending job the expected start in seconds since 1970, None where Slurm has not planned it yet."""
    work_dir: str = ""
    """The directory in which the job was submitted."""


_BETWEEN = "\x1f"
"""The unit separator of ASCII: directories and comments may contain any other character."""
QUEUE_FORMAT = _BETWEEN.join(("%i", "%A", "%T", "%D", "%F", "%r", "%S", "%Z", "%k"))
"""squeue(1). Of a comment with several lines the first one counts."""


def parse_nodes(text: str) -> dict[str, NodeView]:
    """Parse ``scontrol --oneliner show node``; nodes by name."""
    views = {}
    for line in text.splitlines():
        # Free text (OS, Comment, Reason, Extra) holds blanks; of the keys looked at here, none follows a field that
        # a user fills, so the first one of each is Slurm's own.
        fields = dict(reversed(re.findall(r"(?:^|\s)(NodeName|NodeAddr|State)=(\S+)", line)))
        if "NodeName" in fields:
            views[fields["NodeName"]] = NodeView(fields.get("NodeAddr"), _node_state(fields.get("State", "")))
    return views


def parse_jobs(text: str) -> tuple[JobView, ...]:
    """Parse ``scontrol show job``, printed with SLURM_TIME_FORMAT=%s; for an array it prints several jobs."""
    records = re.split(r"^(?=JobId=)", text, flags=re.MULTILINE)
    return tuple(_job_view(_job_fields(record)) for record in records if record.startswith("JobId="))


def parse_requested(text: str) -> dict[str, str] | None:
    """Return options of sbatch, by their long names, that ``scontrol show job`` tells; None for no job."""
    record = next(iter(re.split(r"^(?=JobId=)", text, flags=re.MULTILINE)[1:]), "")
    fields = {name: value for name, value in _job_fields(record).items() if value not in _UNASKED}
    # 22.05 prints gres:gpu:4, later releases gres/gpu:4.
    words = [word[5:].replace("=", ":") for word in fields.get("TresPerNode", "").split(",") if word.startswith("gres")]
    options = {option: fields[name] for name, option in _REQUESTED.items() if name in fields}
    return ({**options, "gres": ",".join(words)} if words else options) if record else None


def parse_queue(text: str) -> tuple[QueuedJob, ...]:
    """Parse squeue with `QUEUE_FORMAT`, printed with SLURM_TIME_FORMAT=%s."""
    jobs = []
    for line in text.split("\n"):
        words = line.split(_BETWEEN)
        if len(words) == 9 and (count := _seconds(words[3])) is not None:
            name, job, state, _nodes, array, reason, start, work_dir, comment = words
            why, planned = None if reason == "None" else reason, _seconds(start)
            jobs.append(QueuedJob(name, job, state, count, comment.strip(), array, why, planned, work_dir))
    return tuple(jobs)


def parse_duration(text: str) -> int | None:
    """Return the seconds of a time as Slurm prints it, such as ``1-00:00:15``; None for UNLIMITED or NONE."""
    match = re.fullmatch(r"(?:([0-9]{1,6})-)?([0-9]{1,2}):([0-9]{2}):([0-9]{2})", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


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
        batch_host=fields.get("BatchHost", ""),
        excluded=_node_list(fields.get("ExcNodeList", "")),
        held=fields.get("Priority") == "0",
        unlimited=fields.get("TimeLimit") == "UNLIMITED",
        partition=fields.get("Partition"),
        qos=qos if (qos := fields.get("QOS")) != "(null)" else None,
        start_time=_seconds(fields.get("StartTime")),
        het_job_id=fields.get("HetJobId"),
        exit_code=_exit_code(fields.get("ExitCode", "")),
    )


def _exit_code(text: str) -> int:
    code, _, number = text.partition(":")
    return _seconds(code) or (128 + signal if (signal := _seconds(number)) else 0)


def _seconds(text: str | None) -> int | None:
    """Read a number; Slurm writes None, Unknown or N/A for times that are not set."""
    return int(text) if text and re.fullmatch(r"[0-9]{1,18}", text) else None


def _node_list(text: str) -> tuple[str, ...]:
    try:
        return expand(text) if text not in ("", "(null)") else ()
    except UsageError:
        return ()


QOS_FORMAT = "Name,GraceTime,PreemptMode"
"""sacctmgr(1), ``format=`` of ``show qos``."""


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """``scontrol show config``: the keys of slurm.conf(5) with the values in force."""

    fields: Mapping[str, str] = field(default_factory=dict)
    now: int = 0
    """The controller's own time in seconds since the epoch, for comparison with the times in a `JobView`."""

    @property
    def release(self) -> tuple[int, int] | None:
        """Slurm's release, such as 22 and 5; None if it is not told."""
        match = re.match(r"([0-9]{1,4})\.([0-9]{1,4})\b", self.text("SLURM_VERSION"))
        return (int(match[1]), int(match[2])) if match else None

    @property
    def kill_wait(self) -> int:
        """Seconds between SIGTERM and SIGKILL when Slurm ends a job."""
        return self.number("KillWait") or 0

    def text(self, key: str) -> str:
        """Return a value; empty where the release does not have the key or the value is ``(null)``."""
        value = self.fields.get(key, "")
        return "" if value in ("(null)", "N/A") else value

    def number(self, key: str) -> int | None:
        """Return the leading number of a value such as ``30 sec``; None if there is none."""
        match = re.match(r"[0-9]{1,9}\b", self.text(key))
        return int(match[0]) if match else None

    def parameters(self, key: str) -> dict[str, str]:
        """Return the words of a list such as SlurmctldParameters: ``a=1,b`` is ``{"a": "1", "b": ""}``."""
        words = (word.partition("=") for word in self.text(key).split(",") if word)
        return {name.strip().lower(): value for name, _, value in words}


@dataclass(frozen=True, slots=True)
class PartitionView:
    """One partition of ``scontrol show partition``. Times are in seconds; None for no limit."""

    name: str
    is_default: bool
    state: str
    """UP, DOWN, DRAIN or INACTIVE."""
    grace: int
    """GraceTime."""
    preempt_mode: str
    """PreemptMode, such as ``REQUEUE`` or ``OFF``."""
    max_time: int | None
    default_time: int | None
    """DefaultTime, or MaxTime where the site sets none."""
    nodes: int
    """Number of nodes."""


@dataclass(frozen=True, slots=True)
class QosView:
    """One QOS."""

    name: str
    grace: int
    preempt_mode: str
    """Empty where it is that of the cluster."""


def parse_config(text: str) -> ClusterConfig | None:
    """Parse ``scontrol show config``, printed with SLURM_TIME_FORMAT=%s; None if it holds no time."""
    now = re.search(r"^Configuration data as of ([0-9]{1,18})$", text, flags=re.MULTILINE)
    pairs = re.findall(r"^([A-Za-z_][\w\[\]]*)\s*= ?(.*?)\s*$", text, flags=re.MULTILINE)
    # Since 23.02 (cgroup.conf(5)) a second table follows; none of its keys is in the first one.
    return ClusterConfig(dict(reversed(pairs)), int(now[1])) if now else None


def parse_partitions(text: str) -> tuple[PartitionView, ...]:
    """Parse ``scontrol --oneliner show partition``."""
    partitions = []
    for line in text.splitlines():
        fields = dict(word.partition("=")[::2] for word in line.split())
        if "PartitionName" not in fields:
            continue
        most = parse_duration(fields.get("MaxTime", ""))
        default = parse_duration(fields.get("DefaultTime", ""))
        partitions.append(
            PartitionView(
                name=fields["PartitionName"],
                is_default=fields.get("Default") == "YES",
                state=fields.get("State", ""),
                grace=_seconds(fields.get("GraceTime")) or 0,
                preempt_mode=fields.get("PreemptMode", ""),
                max_time=most,
                default_time=most if default is None else default,
                nodes=_seconds(fields.get("TotalNodes")) or 0,
            )
        )
    return tuple(partitions)


def parse_qos(text: str) -> tuple[QosView, ...]:
    """Parse ``sacctmgr --noheader --parsable2 show qos`` with `QOS_FORMAT`."""
    qos = []
    for line in text.splitlines():
        words = line.split("|")
        if len(words) == 3 and words[0]:
            name, grace, mode = words
            qos.append(QosView(name, parse_duration(grace) or 0, "" if mode.lower() == "cluster" else mode.upper()))
    return tuple(qos)
