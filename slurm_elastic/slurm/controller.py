"""The one place that asks Slurm anything, by its own commands, always with a time-out.

Nothing here raises when Slurm does not answer: containers have no scontrol, and slurmctld may be down exactly when a
job is being preempted. Then the answer is None or unknown, and each kind of failure is logged once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from slurm_elastic.slurm.scontrol_output import (
    ControllerClock,
    JobView,
    NodeState,
    NodeView,
    parse_clock,
    parse_jobs,
    parse_nodes,
    parse_partition_grace,
    parse_qos_grace,
    parse_release,
)

__all__ = ["Controller"]

_log = logging.getLogger(__name__)

_SILENCE = re.compile(r"Unable to contact slurm controller|Socket timed out|Connection refused|Zero Bytes were")
"""What scontrol says when slurmctld is down or too busy (slurm_errno.c)."""


_OLDEST = (22, 5)
"""The oldest release of Slurm whose answers are understood."""


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
        if answer is not None:
            self._look_at_release(answer.output)
        return parse_clock(answer.output) if answer else None

    def grace(self, view: JobView, preempt_type: str) -> int | None:
        """Return GraceTime in seconds of what preempts this job, its QOS or its partition; None if Slurm does not say.

        Only for a job whose EndTime is unknown: a preemption moves that to the end of the grace.
        """
        if preempt_type == "preempt/qos":
            # slurmctld knows it, but scontrol does not print it ("scontrol show assoc_mgr", 22.05 to 26.05).
            command = ("sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=GraceTime", f"name={view.qos}")
            answer = self._ask(*command) if view.qos else None
            return parse_qos_grace(answer.output) if answer else None
        answer = self._ask("scontrol", "show", "partition", view.partition) if view.partition else None
        return parse_partition_grace(answer.output) if answer else None

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
        if answer is not None:
            self._look_at_release(answer.output)
        return parse_nodes(answer.output) if answer else {}

    def _look_at_release(self, output: str) -> None:
        """Say so, once, where Slurm is older than what is understood."""
        release = parse_release(output)
        if release is not None and release < _OLDEST and ("", "release") not in self._logged:
            self._logged.add(("", "release"))
            _log.warning(
                "Slurm %d.%02d is older than %d.%02d, the oldest release that slurm_elastic understands: it may "
                "misread why a job has to go, and not requeue it; update Slurm",
                *release,
                *_OLDEST,
            )

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


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a program with what it started; one stuck in the kernel is left to the reaper of its parent."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()
