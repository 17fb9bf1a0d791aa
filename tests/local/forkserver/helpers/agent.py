"""An agent as a process of its own, for tests that kill it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4]))

from slurm_elastic.agent.forkserver.client import ForkServer
from slurm_elastic.agent.forkserver.worker_command import Program

directory, start = Path(sys.argv[1]), sys.argv[2]
program = Program.script(str(directory / "train.py"))
fork_server = ForkServer(program, warm=start != "cold", preload=["slow"] if start == "slow" else [])
if start != "slow":
    from tests.local.forkserver.helpers.workplace import Workplace

    place = Workplace.__new__(Workplace)
    place.directory, place.program, place.fork_server, place.entrypoint = (
        directory,
        program,
        fork_server,
        sys.executable,
    )
    place.context(environment={"PIDS": str(directory / "pids")}, workers=2)
time.sleep(1000)
