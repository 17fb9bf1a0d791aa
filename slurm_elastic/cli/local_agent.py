"""``python -m slurm_elastic.cli.local_agent``: an agent that represents one node on this machine.

submitit's controller starts this process (submitit/local/local.py, 1.5.4) and signals it before the time-out.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import MutableMapping
from pathlib import Path

from slurm_elastic.agent.option_values import LOCAL_RESTARTS
from slurm_elastic.agent.signals import record_signals
from slurm_elastic.cli.main import main as command
from slurm_elastic.errors import ExitCode
from slurm_elastic.rundir import RunDir

_REQUEUE = 144
"""LOCAL_REQUEUE_RETURN_CODE of submitit/local/local.py, 1.5.4: its controller starts all agents again."""


def main() -> int:
    """Run the agent, and return an exit code for submitit's controller."""
    uid, most, base, *arguments = sys.argv[1:]
    # The submitting process may run in a Slurm job, which the agents would take for their own.
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SLURMD_"))]:
        del os.environ[name]
    share_devices(os.environ)
    run_id = f"{os.environ['SUBMITIT_LOCAL_JOB_ID']}-{uid[:8]}"
    timeouts = RunDir.for_run(Path(base), run_id).path / "timeouts"
    # All agents of a start read this before any of them adds to it.
    before = len(list(timeouts.glob("*")))
    os.environ[LOCAL_RESTARTS] = str(before)
    exit_code = command(["agent", f"--run-id={run_id}", *arguments])
    # The controller sends SIGUSR2 when the time is over; every other signal asks for an end.
    timed_out = any(received.signal is signal.SIGUSR2 for received in record_signals().all())
    if exit_code != ExitCode.LEFT or not timed_out:
        return exit_code
    if before >= int(most):
        # submitit's words (submitit/core/job_environment.py, 1.5.4).
        print(
            f"slurm-elastic: error: not requeued because: timed-out too many times; raise max_num_timeout={most}",
            file=sys.stderr,
            flush=True,
        )
        return exit_code
    timeouts.mkdir(exist_ok=True)
    (timeouts / str(before + 1)).touch()
    return _REQUEUE


def share_devices(environ: MutableMapping[str, str]) -> None:
    """Give each agent its own part of the GPUs in CUDA_VISIBLE_DEVICES, if there is at least one per agent."""
    devices = [device for device in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    agents, index = int(environ["SUBMITIT_LOCAL_NTASKS"]), int(environ["SUBMITIT_LOCAL_GLOBALID"])
    share = len(devices) // agents
    if share:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[index * share : (index + 1) * share])


if __name__ == "__main__":
    sys.exit(main())
