"""Programs of torch's documentation for an agent of one's own, with its names from `slurm_elastic.torchelastic`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from urllib.error import HTTPError

import pytest

from slurm_elastic import torchelastic
from tests.local.waiting import eventually

ROOT = Path(__file__).parents[2]
PROGRAM = """\
import sys
from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousParameters
from slurm_elastic.torchelastic import LocalElasticAgent, create_handler

def trainer(args) -> str:
    if "fail" in args:
        raise ValueError("as asked")
    return "do train"

def main(**spec):
    spec = WorkerSpec(
        role="trainer",
        local_world_size=1,
        rdzv_handler=create_handler(RendezvousParameters("slurm", "", "none", 1, 1)),
        max_restarts=0,
        monitor_interval=0.05,
        **spec,
    )
    agent = LocalElasticAgent(spec)
    results = agent.run()
    spec.rdzv_handler.shutdown()
    if results.is_failed():
        print("trainer failed:", {rank: failure.exitcode for rank, failure in results.failures.items()})
    else:
        print(f"rank 0 return value: {results.return_values[0]}")
"""
FUNCTION = """
if __name__ == "__main__":
    main(entrypoint=trainer, args=(sys.argv[1],))
"""
BINARY = """
if __name__ == "__main__":
    main(entrypoint="/usr/bin/true", args=("--trainer-args", "foobar"))
"""


def _run(directory: Path, text: str, *arguments: str) -> str:
    (directory / "program.py").write_text(PROGRAM + text)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "TORCHELASTIC"))}
    command = [sys.executable, "program.py", *arguments]
    environ |= {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=directory, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        (FUNCTION, ["foobar"], "rank 0 return value: do train\n"),
        pytest.param(FUNCTION, ["fail"], "trainer failed: {", marks=pytest.mark.nightly),
        pytest.param(BINARY, [], "rank 0 return value: None\n", marks=pytest.mark.nightly),
    ],
    ids=["function", "failing function", "binary"],
)
def test_an_agent_from_a_worker_spec(tmp_path: Path, text: str, arguments: list[str], expected: str) -> None:
    assert _run(tmp_path, text, *arguments).startswith(expected)
    assert list(tmp_path.glob("elastic-runs/local-*/rounds/*.json"))


def test_the_health_server_answers_by_the_time_of_the_last_progress() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    progress = [2**40]
    server = torchelastic.create_healthcheck_server(lambda: progress[0], port, 60)
    server.start()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/any") as answer:
            assert answer.status == 200
        progress[0] = 0
        with pytest.raises(HTTPError) as caught:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/")
        assert caught.value.code == 503
        caught.value.close()
    finally:
        server.stop()
    eventually(lambda: not any(thread.name == "slurm-elastic-health" for thread in threading.enumerate()))


def test_the_names_are_there() -> None:
    assert all(getattr(torchelastic, name) is not None for name in torchelastic.__all__)
