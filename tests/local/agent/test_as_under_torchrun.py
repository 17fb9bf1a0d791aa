"""What a script sees that a launcher must not change: standard streams, Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.local.agents import ROOT, Allocation, allocation, eventually
from tests.local.waiting import HANG

Allocate = Callable[..., Allocation]

STREAMS = """
import os
from pathlib import Path

found, pid = [], os.getpid()
while pid != int(os.environ["OUTSIDE"]):
    found += [f"{pid}: {n} {os.readlink(f'/proc/{pid}/fd/{n}')}" for n in (0, 1, 2)]
    pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
Path("found").write_text("\\n".join(found))
"""


@pytest.mark.parametrize("start", ["warm", "cold"])
def test_a_closed_standard_stream_is_no_file_of_ours(tmp_path: Path, start: str) -> None:
    (tmp_path / "t.py").write_text(STREAMS)
    agent = [sys.executable, "-m", "slurm_elastic", "agent", f"--start={start}", "--log-dir=/dev/null", "t.py"]
    with allocation(tmp_path, 1) as node:
        environment = {**node.environment(1), "SLURM_ELASTIC_ETCD_PASSWORD": "hunter2"}
        for name in [name for name in environment if name.startswith(("SLURM_JOB", "SLURM_STEP", "SLURM_NODE"))]:
            del environment[name]
        subprocess.run(
            ["bash", "-c", 'export OUTSIDE=$$; "$@" <&- >&- 2>&-; exit "$?"', "bash", *agent],
            cwd=tmp_path,
            env={**environment, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=HANG,
            check=True,
        )
    found = (tmp_path / "found").read_text()
    for number in "012":
        leads = {line.split()[2] for line in found.splitlines() if line.split()[1] == number}
        assert leads == {"/dev/null"}, found


INTERRUPTED = """
import os, pathlib, signal, sys, time
rank = os.environ["RANK"]
def terminated(number, frame):
    pathlib.Path(f"terminated.{rank}").touch()
    sys.exit(1)
signal.signal(signal.SIGTERM, terminated)
try:
    pathlib.Path(f"ready.{rank}").touch()
    time.sleep(300)
except KeyboardInterrupt:
    with open(f"interrupted.{rank}", "a") as file:
        file.write("once ")
    if rank == "1":
        time.sleep(300)
"""


def test_ctrl_c_is_a_keyboard_interrupt_and_sigterm_comes_after_it(allocate: Allocate) -> None:
    nodes = allocate(1)
    (nodes.directory / "t.py").write_text(INTERRUPTED)
    agent = nodes.start(1, "--nproc-per-node=2", "--shutdown-timeout=4", script=["t.py"])
    eventually(lambda: len(list(nodes.directory.glob("ready.*"))) == 2)
    agent.signal(signal.SIGINT)
    assert agent.wait() == 75
    found = sorted(path.name for path in nodes.directory.glob("*ed.*"))
    assert found == ["interrupted.0", "interrupted.1", "terminated.1"]
    assert (nodes.directory / "interrupted.0").read_text() == "once "
    assert "drained" not in agent.err + json.dumps(nodes.events())
