"""The launchers that are compared: how one agent of each is started."""

from __future__ import annotations

import enum
from pathlib import Path

PYTHON = Path("/opt/slurm-elastic/venv/bin/python")
FRAMEWORKS_PYTHON = PYTHON.parents[2] / "frameworks/bin/python"
"""With training frameworks."""


class Launcher(enum.Enum):
    """Who starts and restarts the workers."""

    DEFAULTS = "torchrun, defaults"
    TUNED = "torchrun, hand-tuned"
    OURS = "slurm-elastic"

    @property
    def program(self) -> str:
        """What distinguishes the agent's command line from that of other processes."""
        return "-m slurm_elastic agent" if self is Launcher.OURS else "-m torch.distributed.run"

    @property
    def environment(self) -> dict[str, str]:
        """Variables for its agents.

        With its shared store, the default of torch 2.13, restarted workers find the addresses of those before them
        under the same keys, fail to connect, and are restarted again, often for ever (pytorch issue 167288).
        """
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if self is Launcher.TUNED else {}

    def agent(
        self,
        run_id: str,
        directory: Path,
        *script: str,
        python: Path = PYTHON,
        nodes: str = "2:4",
        workers: int = 1,
    ) -> list[str]:
        """The command line of one agent.

        Args:
            run_id: of this run alone.
            directory: which all nodes share.
            script: with its arguments.
            python: of the agent and its workers.
            nodes: bounds of a round.
            workers: on each node.
        """
        common = [f"--nnodes={nodes}", f"--nproc-per-node={workers}", "--max-restarts=100", f"--rdzv-id={run_id}"]
        if self is Launcher.OURS:
            return [str(python), *self.program.split(), *common, f"--run-dir={directory}", *script]
        command = [str(python), *self.program.split(), *common, "--rdzv-backend=c10d", "--rdzv-endpoint=n1:29400"]
        if self is Launcher.TUNED:
            command.append("--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2")
        return [*command, *script]
