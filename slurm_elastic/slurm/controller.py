"""Questions to Slurm by its own commands, always with a time-out; no other module asks Slurm.

No method raises when Slurm does not answer: containers have no scontrol, and slurmctld may be down just when a job is
preempted. Then the answer is None or unknown, and the log gets one line for each kind of failure.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from slurm_elastic.slurm import output
from slurm_elastic.slurm.hostlist import compress

_log = logging.getLogger(__name__)

SILENCE = re.compile(r"Unable to contact slurm controller|Socket timed out|Connection refused|Zero Bytes were")
"""Messages of Slurm's commands when slurmctld is down or too busy (slurm_errno.c)."""


OLDEST_RELEASE, NEWEST_RELEASE = (22, 5), (26, 5)
"""The releases of Slurm between which the cluster tests run; answers of older ones may be misread."""


_T = TypeVar("_T")


class Controller:
    """Asks slurmctld. A call blocks for up to ``timeout`` seconds, so threads that wait for signals make none."""

    def __init__(self, timeout: float = 5.0) -> None:
        self._timeout = timeout
        self._logged: set[tuple[str, str]] = set()
        self.is_silent = False
        """True if slurmctld did not answer the last question, so that a repetition may help; False where scontrol is
        missing or not configured, as in a container."""
        # SLURM_CLUSTERS, which sbatch --clusters sets, would send the question to another cluster through slurmdbd.
        # Seconds since 1970 need no time zone: scontrol(1), SLURM_TIME_FORMAT, which accepts strftime's formats.
        self._environ = {key: value for key, value in os.environ.items() if key != "SLURM_CLUSTERS"}
        self._environ.update(SLURM_TIME_FORMAT="%s", LC_ALL="C")

    def node_address(self, name: str) -> str | None:
        """Return the NodeAddr of a node, which may equal its name; None if unknown."""
        view = self._nodes((name,)).get(name)
        return view.address if view else None

    def knows_node(self, name: str) -> bool | None:
        """Return True if Slurm has a node of that name; None if Slurm does not answer."""
        # For an unknown node sinfo prints nothing and exits with 0; --all shows nodes of hidden partitions.
        command = ("sinfo", "--noheader", "--all", "--format=%N", f"--nodes={name}")
        return self._parsed(lambda printed: bool(printed.strip()), *command)

    def node_states(self, names: Iterable[str]) -> dict[str, output.NodeState]:
        """Return the states of nodes, by one question."""
        asked = tuple(names)
        views = self._nodes(asked)
        return {name: views[name].state if name in views else output.NodeState.UNKNOWN for name in asked}

    def job(self, job_id: str) -> output.JobView | None:
        """Return Slurm's view of a job (``12``) or an array element (``12_3``); None if Slurm does not answer.

        The nodes of a heterogeneous job are those of all its components: srun gives their processes one job id.
        """
        views = self.elements(job_id)
        for view in views:
            if job_id in (view.job_id, f"{view.array_job_id}_{view.array_task_id}"):
                if view.het_job_id is None:
                    return view
                components = (other.nodes for other in views if other.het_job_id == view.het_job_id)
                return replace(view, nodes=tuple(dict.fromkeys(itertools.chain(*components))))
        return None

    def elements(self, array_job_id: str) -> tuple[output.JobView, ...]:
        """Return Slurm's view of all elements of an array; empty if Slurm does not answer."""
        answer = self._ask("scontrol", "show", "job", array_job_id)
        return output.parse_jobs(answer.stdout) if answer else ()

    def own_jobs(self, *, by_element: bool = False) -> tuple[output.QueuedJob, ...] | None:
        """Return all jobs of this user that wait or run, by one question; None if Slurm does not answer.

        Args:
            by_element: List each element of an array by itself, also those that wait.
        """
        each = ("--array",) if by_element else ()
        return self._parsed(
            output.parse_queue, "squeue", "--noheader", "--me", *each, f"--format={output.QUEUE_FORMAT}"
        )

    def batch_script(self, job_id: str) -> str | None:
        """Return the batch script of a job or array of this user; None if it has none, or Slurm does not answer."""
        return self._parsed(str, "scontrol", "write", "batch_script", job_id, "-")

    def requested(self, job_id: str) -> dict[str, str] | None:
        """Return what a job has asked for, as options of sbatch; None if Slurm does not answer."""
        return self._parsed(output.parse_requested, "scontrol", "show", "job", job_id)

    def is_queued(self, job_id: str) -> bool | None:
        """Return True if a job, or any element of an array, waits or runs; None if Slurm does not answer.

        A requeued job is in the queue all the time. squeue does not list finished jobs, and minutes later (MinJobAge,
        slurm.conf(5)) it does not know their ids.
        """
        answer = self._ask("squeue", "--noheader", "--format=%T", "--jobs", job_id)
        if answer is None:
            return None
        if answer.returncode == 0:
            return bool(answer.stdout.strip())
        return False if "Invalid job id" in answer.stderr else None

    def config(self) -> output.ClusterConfig | None:
        """Return the configuration of the cluster with the controller's time; None if the controller does not answer.

        slurmctld itself writes the head line of ``scontrol show config``, "Configuration data as of" (proc_req.c,
        _fill_ctld_conf). Other commands compute RunTime and the time left with the clock of the machine that asks.
        Warns once if Slurm is older than the oldest supported release.
        """
        config = self._parsed(output.parse_config, "scontrol", "show", "config")
        release = config.release if config is not None else None
        if release is not None and release < OLDEST_RELEASE and ("", "release") not in self._logged:
            self._logged.add(("", "release"))
            _log.warning(
                "Slurm %d.%02d is older than %d.%02d, the oldest supported release: slurm_elastic may misread why a "
                "job has to end, and not requeue it; update Slurm",
                *release,
                *OLDEST_RELEASE,
            )
        return config

    def partitions(self, *names: str) -> tuple[output.PartitionView, ...] | None:
        """Return a partition, or those that this user may see; None if the controller does not answer."""
        return self._parsed(output.parse_partitions, "scontrol", "--oneliner", "show", "partition", *names)

    def qos(self) -> tuple[output.QosView, ...] | None:
        """Return every QOS; None without slurmdbd, or if it does not answer."""
        return self._parsed(
            output.parse_qos, "sacctmgr", "--noheader", "--parsable2", "show", "qos", f"format={output.QOS_FORMAT}"
        )

    def grace(self, view: output.JobView, preempt_type: str) -> int | None:
        """Return GraceTime in seconds of the QOS or partition of a job; None if Slurm does not answer.

        This is for a job whose EndTime is unknown: a preemption moves EndTime to the end of the grace.
        """
        # slurmctld knows that of a QOS, but scontrol does not print it ("scontrol show assoc_mgr", 22.05 to 26.05).
        by_qos = preempt_type == "preempt/qos"
        name = view.qos if by_qos else view.partition
        if not name:
            return None
        rows = (self.qos() if by_qos else self.partitions(name)) or ()
        return next((row.grace for row in rows if row.name == name), None)

    def requeue(self, job_id: str, *, if_running: bool = False) -> bool:
        """Requeue a job, which ends this start of it. Returns True if Slurm accepted it.

        Slurm refuses it for pending jobs and for jobs submitted with ``--no-requeue``.

        Args:
            if_running: Have Slurm leave the job alone if it has ended or was cancelled. Slurm then accepts the request,
                and does nothing (scontrol(1), ``requeue Incomplete``, seen with 22.05, 24.11 and 26.05). Otherwise it
                requeues a cancelled job, too, as long as its processes end.
        """
        return self._accepts("scontrol", "requeue", *(("incomplete",) if if_running else ()), job_id)

    def exclude(self, job_id: str, nodes: Sequence[str]) -> bool:
        """Set the nodes on which a pending job does not start. Returns True if Slurm accepted it.

        Slurm refuses it for a job that runs (job_mgr.c, _update_job: ESLURM_JOB_NOT_PENDING), and takes it from the
        moment of the requeue on.
        """
        return self._accepts("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={compress(nodes)}")

    def cancel(self, job_id: str, *, if_pending: bool = False) -> bool:
        """Cancel a job or array element, with `if_pending` unless it has started. Returns True if Slurm accepted it."""
        return self._accepts("scancel", *(("--state=PENDING",) if if_pending else ()), job_id)

    def _nodes(self, names: tuple[str, ...]) -> dict[str, output.NodeView]:
        # scontrol exits with 1 if one of several nodes is not known to it, and still prints the others.
        answer = self._ask("scontrol", "--oneliner", "show", "node", compress(names)) if names else None
        return output.parse_nodes(answer.stdout) if answer else {}

    def _parsed(self, parse: Callable[[str], _T | None], *command: str) -> _T | None:
        """Return what a function makes of the output of a command; None if that fails, or there is no answer."""
        return parse(answer.stdout) if (answer := self._ask(*command)) and answer.returncode == 0 else None

    def _accepts(self, *command: str) -> bool:
        return (answer := self._ask(*command)) is not None and answer.returncode == 0

    def _ask(self, *command: str) -> subprocess.CompletedProcess[str] | None:
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
            printed, complaint = process.communicate(timeout=self._timeout)
        except subprocess.TimeoutExpired:
            _kill(process)
            self.is_silent = True
            self._log_once(command, f"gave no answer within {self._timeout:g} s")
            return None
        if process.returncode != 0:
            # Under proctrack/linuxproc a signal for the job also reaches the commands that it has started.
            self.is_silent = process.returncode < 0 or SILENCE.search(complaint) is not None
            # Without a configuration, scontrol ends with four lines; the last one says why.
            *_, why = complaint.strip().splitlines() or [""]
            self._log_once(command, f"failed: {why or f'exit code {process.returncode}'}")
        return subprocess.CompletedProcess(command, process.returncode, printed, complaint)

    def _log_once(self, command: tuple[str, ...], failure: str) -> None:
        kind = (" ".join(command[:-1]), failure)
        if kind not in self._logged:
            self._logged.add(kind)
            _log.warning("%s %s", " ".join(command), failure)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a program and its children; if it is stuck in the kernel, the reaper of its parent collects it later."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()
