"""The nodes of a rehearsal: agents on this machine, each told by its environment that it is alone on a node of a job.

Every node has a loopback address of its own. Agents take a signal for one of Slurm: they have an empty configuration of
it, so that its commands end at once without an answer, and the grace and the warning on their command line count.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_elastic.control.worker_side import RECORDING
from slurm_elastic.rehearsal.scenario import Kind, Plan, node_name
from slurm_elastic.text import printable

_SPURIOUS = ("SLURM_", "SLURMD_", "TORCHELASTIC_")
_END = 10.0
"""Seconds in which processes that got SIGKILL are gone."""
_LEFTOVER = 1.0
"""Seconds in which the processes of workers are gone after the last agent's end."""


@dataclass
class Node:
    """A node with its agent; `deadline`, by the monotonic clock, is None while it got no notice."""

    index: int
    process: subprocess.Popen[bytes]
    deadline: float | None = None

    @property
    def name(self) -> str:
        """Its name."""
        return node_name(self.index)

    @property
    def running(self) -> bool:
        """True while its agent runs."""
        return self.process.poll() is None


class Nodes:
    """The nodes of one run; all agents have the same arguments, with the script and its own at the end."""

    def __init__(self, directory: Path, plan: Plan, arguments: Sequence[str]) -> None:
        self._directory, self._plan, self._arguments = directory, plan, arguments
        self._work = directory / "work"
        self.all: list[Node] = []
        self._jobs = 0

    @property
    def present(self) -> list[Node]:
        """The nodes whose agents run."""
        return [node for node in self.all if node.running]

    def start(self, indices: Sequence[int]) -> None:
        """Start a job on these nodes, with one agent on each."""
        self._jobs += 1
        for index in indices:
            self.all.append(Node(index, self._agent(index, indices)))

    def kill(self, nodes: Collection[Node]) -> None:
        """End every process of these nodes by SIGKILL, at once."""
        for node in nodes:
            node.process.kill()
        end = time.monotonic() + _END
        while self.signal(nodes, signal.SIGKILL) and time.monotonic() < end:
            time.sleep(0.005)
        for node in nodes:
            node.process.wait()

    def signal(self, nodes: Collection[Node], number: signal.Signals) -> bool:
        """Send a signal to all processes of these nodes; return False if there are none."""
        names = {node.name for node in nodes}
        pids = [pid for pid, (name, _) in processes(self._directory).items() if name in names]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return bool(pids)

    def leftover(self) -> tuple[str, ...]:
        """Return the command lines of processes of the run that still live after its end."""
        end = time.monotonic() + _LEFTOVER
        while (left := processes(self._directory)) and time.monotonic() < end:
            time.sleep(0.01)
        return tuple(printable(command, 200) for command in sorted(command for _, command in left.values()))

    def _agent(self, index: int, indices: Sequence[int]) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "slurm_elastic", "agent", *self._options(index)]
        if self._jobs == 1:
            words += [f"--leader-node={node_name(indices[0])}", "--rdzv-endpoint=127.0.0.1"]
        with (self._directory / "output.txt").open("ab") as output:
            return subprocess.Popen(
                [*words, *self._arguments],
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
            f"--nnodes=1:{self._plan.most}",
            f"--local-addr=127.0.0.{index + 1}",
            # A script that fails when it should stop does so again and again; more than a few times says no more.
            f"--max-restarts={number[Kind.FAIL] + number[Kind.HANG] + 2}",
            # No other nodes come for a script that fails with those that are left.
            f"--rdzv-conf=heartbeat_limit={3 if number[Kind.PAUSE] else 20},min_round_time=0,join_timeout=10",
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
            "CUDA_VISIBLE_DEVICES": self._devices(environ, index),
            RECORDING: str(self._directory),
            # The batch script would requeue; the rehearsal does.
            "SLURM_ELASTIC_VERDICT": "1",
            "SLURM_CONF": os.devnull,
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
