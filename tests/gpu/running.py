"""Agents whose workers are tests/gpu/worker.py."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.machine import descendants, devices_of
from tests.gpu.worker import RESTARTS
from tests.local.agents import Agent, Allocation
from tests.local.waiting import eventually

AGENT = ("slurm_elastic", "agent")
TORCHRUN = ("torch.distributed.run",)
WORKER = Path(__file__).with_name("worker.py")


class Training:
    """One agent on this machine, ours or torchrun's, and what its workers wrote down."""

    def __init__(
        self,
        allocation: Allocation,
        mode: str,
        workers: int,
        *options: str,
        device: str = "cuda",
        launcher: Sequence[str] = AGENT,
        **variables: str,
    ) -> None:
        self.allocation, self.workers = allocation, workers
        # CUDA's libraries, and the programs of the driver.
        inherited = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "CUDA_HOME") if name in os.environ}
        self.begun = time.time()
        self.agent: Agent = allocation.command(
            1,
            *[sys.executable, "-m", *launcher, f"--nproc-per-node={workers}", *options],
            *[str(WORKER), mode, f"--device={device}"],
            **{**inherited, **variables},
        )

    def seen(self, round_number: int = 0, kind: str = "seen") -> list[dict[str, Any]]:
        """Wait for the records of a round and return them by rank; of kind ``failed`` rank 0 alone has one."""
        ranks = range(self.workers) if kind == "seen" else range(1)
        files = [self.allocation.directory / kind / f"{round_number}.{rank}.json" for rank in ranks]
        eventually(lambda: all(file.exists() for file in files) or not self.agent.running(), lambda: self.agent.err)
        assert all(file.exists() for file in files), f"the agent has ended:\n{self.agent.err}\n{self.logs()}"
        return [json.loads(file.read_text()) for file in files]

    def others_with_devices(self, workers: list[dict[str, Any]]) -> dict[int, list[str]]:
        """Return the devices that processes of the agent have open, its fork server among them, but not its workers."""
        mine = {record["pid"] for record in workers}
        below = set().union(*(descendants(pid) for pid in mine))
        others = descendants(self.agent.pid) - below
        assert self.agent.pid in others
        return {pid: devices for pid in others if (devices := devices_of(pid))}

    def start(self) -> dict[str, float]:
        """Return the seconds of the start, of its parts, and of the first step."""
        return _parts(self.begun, self.seen())

    def restarts(self) -> dict[str, float]:
        """Return the medians, over the restarts of mode ``restart``, of the seconds from a failure to the next step."""
        found = []
        for number in range(1, RESTARTS + 1):
            (failure,), workers = self.seen(number - 1, "failed"), self.seen(number)
            found.append(_parts(failure["failed"], workers))
        return {part: round(statistics.median(times[part] for times in found), 3) for part in found[0]}

    def finish(self) -> None:
        """End the training; the agent has to end well."""
        self.allocation.touch("finish")
        assert self.agent.wait() == 0, f"{self.agent.err}\n{self.logs()}"

    def forget(self) -> None:
        """Take away what workers wrote down, for another training in the same place."""
        (self.allocation.directory / "finish").unlink()
        for kind in ("seen", "failed"):
            for record in (self.allocation.directory / kind).glob("*"):
                record.unlink()

    def logs(self) -> str:
        """What the workers wrote to stderr."""
        files = sorted(self.allocation.run_dir.glob("logs/**/stderr.log"))
        return "\n".join(f"{file}:\n{file.read_text()}" for file in files)


def _parts(begun: float, workers: list[dict[str, Any]]) -> dict[str, float]:
    """What the workers needed since `begun`, in seconds, by what it was spent for."""
    parts = {
        "whole": max(worker["stepped"] for worker in workers) - begun,
        "until the script has torch": max(worker["imported"] for worker in workers) - begun,
        "CUDA context": statistics.median(worker["context"] - worker["imported"] for worker in workers),
        "process group": statistics.median(worker["grouped"] - worker["context"] for worker in workers),
        "first step": statistics.median(worker["step"] for worker in workers),
    }
    return {part: round(seconds, 3) for part, seconds in parts.items()}
