"""The nodes of a rehearsal: agents on this machine, each told by its environment that it is alone on a node of a job.

Every node has a loopback address of its own. Agents take a signal for one of Slurm: commands named like Slurm's come
first in their PATH and do not answer, so that the grace and the warning on their command line count.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_elastic.control import RECORDING
from slurm_elastic.rehearsal.scenario import Kind, Plan, node_name

_COMMANDS = ("scontrol", "squeue", "sacct", "sinfo", "sbatch", "scancel")
_SPURIOUS = ("SLURM_", "SLURMD_", "TORCHELASTIC_")
_END = 10.0
"""Seconds in which processes that got SIGKILL are gone."""


@dataclass
class Node:
    """A node with its agent.

    Attributes:
        index: Its index.
        process: The agent.
        deadline: When it is killed, by the monotonic clock; None while it got no notice.
        killed: True if it was killed.
    """

    index: int
    process: subprocess.Popen[bytes]
    deadline: float | None = None
    killed: bool = False

    @property
    def name(self) -> str:
        """Its name."""
        return node_name(self.index)

    @property
    def running(self) -> bool:
        """True while its agent runs."""
        return self.process.poll() is None


class Nodes:
    """The nodes of one run.

    Args:
        directory: Of the run: agents' output, and what workers write down. Workers run in
            its directory ``work``, and the run directory is made beside it.
        run_id: Id of the run.
        plan: The plan of the rehearsal.
        command: The script with its arguments.
        agent_options: Options of the agent that the user has given.
        hang_timeout: Seconds without a step after which a worker hangs, where the plan has a hang.
    """

    def __init__(
        self,
        directory: Path,
        run_id: str,
        plan: Plan,
        command: Sequence[str],
        agent_options: Sequence[str],
        hang_timeout: float,
    ) -> None:
        self._hang_timeout = hang_timeout
        self.directory, self._run_id = directory, run_id
        self._plan, self._command, self._agent_options = plan, command, agent_options
        self._work = directory / "work"
        self.all: list[Node] = []
        self._jobs = 0
        self._bin = directory / "bin"
        self._bin.mkdir(parents=True)
        for name in _COMMANDS:
            path = self._bin / name
            path.write_text("#!/bin/sh\nexit 1\n")
            path.chmod(0o700)

    @property
    def present(self) -> list[Node]:
        """The nodes whose agents run."""
        return [node for node in self.all if node.running]

    def start(self, indices: Sequence[int]) -> None:
        """Start a job on these nodes, with one agent on each."""
        self._jobs += 1
        for index in indices:
            self.all.append(Node(index, self._agent(index, indices)))

    def kill(self, node: Node) -> None:
        """End every process of a node by SIGKILL, at once."""
        node.killed = True
        node.process.kill()
        self._kill(node.name)
        node.process.wait()

    def pause(self, node: Node) -> None:
        """Stop every process of a node."""
        self._signal(signal.SIGSTOP, node.name)

    def leftover(self) -> list[str]:
        """Return the command lines of processes of the run that still live."""
        agents = {node.process.pid for node in self.all if node.running}
        return sorted(command for pid, (_, command) in processes(self.directory).items() if pid not in agents)

    def close(self) -> None:
        """End all processes of the run."""
        for node in self.all:
            if node.running:
                node.killed = True
                node.process.kill()
        self._kill()
        for node in self.all:
            node.process.wait()

    def _kill(self, name: str | None = None) -> None:
        end = time.monotonic() + _END
        while time.monotonic() < end and self._signal(signal.SIGKILL, name):
            time.sleep(0.005)

    def _signal(self, number: signal.Signals, name: str | None) -> bool:
        """Send a signal to all processes of a node, or of the run; return False if there are none."""
        pids = [pid for pid, (node, _) in processes(self.directory).items() if name in (None, node)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return bool(pids)

    def _agent(self, index: int, indices: Sequence[int]) -> subprocess.Popen[bytes]:
        first = self._jobs == 1
        words = [sys.executable, "-m", "slurm_elastic", "agent", *self._options(index), *self._agent_options]
        words += [f"--leader-node={node_name(indices[0])}", "--rdzv-endpoint=127.0.0.1"] if first else []
        with (self.directory / "output.txt").open("ab") as output:
            return subprocess.Popen(
                [*words, *self._command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._work,
                env=self._environment(index, indices),
                start_new_session=True,
            )

    def _options(self, index: int) -> list[str]:
        grace, warning = self._plan.seconds(Kind.PREEMPT, index), self._plan.seconds(Kind.TIMELIMIT)
        # A node that is killed is known by its broken connections; silence is only a machine that is too busy.
        number = Counter(mishap.kind for mishap in self._plan.mishaps)
        return [
            f"--run-id={self._run_id}",
            f"--run-dir={self.directory.parent}",
            f"--nnodes=1:{self._plan.most}",
            f"--local-addr=127.0.0.{index + 1}",
            # A script that fails when it should stop does so again and again; more than a few times says no more.
            f"--max-restarts={number[Kind.FAIL] + number[Kind.HANG] + 2}",
            # No other nodes come for a script that fails with those that are left.
            f"--rdzv-conf=heartbeat_limit={3 if number[Kind.PAUSE] else 20},min_round_time=0,join_timeout=10",
            *([f"--hang-timeout={self._hang_timeout:g}"] if number[Kind.HANG] else []),
            *([] if grace is None else [f"--grace={grace:g}"]),
            *([] if warning is None else [f"--warning={warning:g}"]),
        ]

    def _environment(self, index: int, indices: Sequence[int]) -> Mapping[str, str]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(_SPURIOUS)}
        names = [node_name(number) for number in indices]
        own = node_name(index)
        return {
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            **environ,
            "PATH": f"{self._bin}{os.pathsep}{environ.get('PATH', os.defpath)}",
            "CUDA_VISIBLE_DEVICES": self._devices(environ, index),
            RECORDING: str(self.directory),
            # The batch script would requeue; the rehearsal does.
            "SLURM_ELASTIC_VERDICT": "1",
            "SLURM_JOB_ID": str(self._jobs),
            "SLURM_JOB_NODELIST": ",".join(names),
            "SLURM_JOB_NUM_NODES": str(len(names)),
            "SLURM_STEP_ID": "0",
            # Each agent is the first of its step: that one asks Slurm, which answers nothing, and does not wait for
            # what another agent may have heard.
            "SLURM_STEP_NODELIST": ",".join([own, *(name for name in names if name != own)]),
            "SLURM_NODEID": "0",
            "SLURMD_NODENAME": own,
            "SLURM_SUBMIT_DIR": str(self._work),
        }

    def _devices(self, environ: Mapping[str, str], index: int) -> str:
        """Return this node's part of the GPUs in CUDA_VISIBLE_DEVICES, or of all of the machine."""
        if "CUDA_VISIBLE_DEVICES" in environ:
            devices = [device for device in environ["CUDA_VISIBLE_DEVICES"].split(",") if device]
        else:
            devices = [path.name.removeprefix("nvidia") for path in sorted(Path("/dev").glob("nvidia[0-9]*"))]
        share = len(devices) // self._plan.most
        return ",".join(devices[index * share : (index + 1) * share])


def processes(directory: Path) -> dict[int, tuple[str, str]]:
    """Return node and command line of each process of the run with this directory, by process id."""
    by_pid: dict[int, tuple[str, str]] = {}
    mark = f"\0{RECORDING}={directory}\0".encode()
    for entry in Path("/proc").iterdir():
        # A process that has ended, or belongs to another user, cannot be read.
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                environ = b"\0" + (entry / "environ").read_bytes()
                if mark in environ:
                    node = environ.partition(b"\0SLURMD_NODENAME=")[2].partition(b"\0")[0].decode()
                    command = (entry / "cmdline").read_text(errors="replace").replace("\0", " ").strip()
                    by_pid[int(entry.name)] = node, command
    return by_pid
