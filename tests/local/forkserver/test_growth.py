"""Restart after restart leaves nothing behind."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_elastic.agent.forkserver.client import ForkServer
from slurm_elastic.agent.forkserver.linux import children
from tests.local.forkserver.helpers.workplace import Workplace, result_of

RESTARTS = 500
ORDER = 20
"""KiB of environment in each order. Python takes its memory by the MiB, so what is kept has to be large to be seen."""
COME_AND_GO = 5
"""Descriptors, threads and processes of each kind that may be there at the moment of one look and not of another."""


def size(server: ForkServer) -> dict[str, int]:
    process = Path("/proc", str(server.pid))
    memory = re.search(r"VmData:\s+(\d+) kB", (process / "status").read_text())
    assert memory is not None
    return {
        "memory": int(memory[1]),
        "files": len(list((process / "fd").iterdir())),
        "our files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list((process / "task").iterdir())),
        "processes": len(children(server.pid)),
    }


@pytest.mark.nightly
def test_restarts_do_not_grow(workplace: Callable[..., Workplace]) -> None:
    place = workplace(preload=["colorsys"])
    place.script.write_text("import os\nos._exit(0)\n")

    def restart(times: int) -> None:
        for _time in range(times):
            context = place.context(environment={"LARGE": "x" * ORDER * 1024})
            result = result_of(context)
            context.close()
            assert not result.failures

    restart(50)
    before = size(place.fork_server)
    restart(RESTARTS - 50)
    after = size(place.fork_server)
    grown = {name: after[name] - before[name] for name in after}
    assert grown.pop("memory") < ORDER * (RESTARTS - 50) / 2
    assert max(grown.values()) <= COME_AND_GO, grown
