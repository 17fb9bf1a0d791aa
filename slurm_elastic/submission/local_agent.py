"""``python -m slurm_elastic.submission.local_agent``: one of the agents that stand for nodes on this machine.

submitit's controller starts it (submitit/local/local.py, 1.5.4); it becomes the agent.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

__all__ = ["main", "share_devices"]


def main() -> None:
    """Become the agent."""
    uid, *arguments = sys.argv[1:]
    # Of a job that the submitting process may run in: the agents would take it for their own.
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SLURMD_"))]:
        del os.environ[name]
    share_devices(os.environ)
    run_id = f"{os.environ['SUBMITIT_LOCAL_JOB_ID']}-{uid[:8]}"
    command = [sys.executable, "-m", "slurm_elastic", "agent", f"--run-id={run_id}", *arguments]
    os.execv(command[0], command)


def share_devices(environ: MutableMapping[str, str]) -> None:
    """Leave each agent its own part of the GPUs, as long as there is one for each."""
    devices = [device for device in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    agents, index = int(environ["SUBMITIT_LOCAL_NTASKS"]), int(environ["SUBMITIT_LOCAL_GLOBALID"])
    share = len(devices) // agents
    if share:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[index * share : (index + 1) * share])


if __name__ == "__main__":
    main()
