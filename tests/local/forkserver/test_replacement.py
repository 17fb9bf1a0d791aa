"""The process that takes the place of the fork server once it has imported more."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from slurm_elastic.agent.forkserver._linux import children
from tests.local.forkserver.helpers.workplace import Workplace
from tests.local.forkserver.test_ends import assert_gone
from tests.local.waiting import eventually

Make = Callable[..., Workplace]


def test_it_starts_the_workers_of_all_rounds(workplace: Make, caplog: pytest.LogCaptureFixture) -> None:
    place = workplace(preload=["colorsys"])
    place.script.write_text("import sys\nprint([name in sys.modules for name in ('colorsys', 'torch._dynamo')])\n")
    before = place.fork_server.pid
    for _round in range(2):
        assert place.run_warm().stdout == "[True, False]\n"
    assert_gone(before)
    assert not caplog.messages
    os.kill(place.fork_server.pid, signal.SIGKILL)
    assert place.run_warm().stdout == "[False, False]\n"
    assert caplog.messages == ["workers start cold: the fork server died (SIGKILL)"]


def test_it_ends_with_a_fork_server_that_is_killed(workplace: Make) -> None:
    place = workplace(modules={"slow": "import time\ntime.sleep(1000)\n"}, preload=["slow"])
    place.script.write_text("import sys\nprint('torch' in sys.modules)\n")
    (pid,) = eventually(lambda: children(place.fork_server.pid))
    os.kill(place.fork_server.pid, signal.SIGKILL)
    assert place.run_warm().stdout == "False\n"
    assert_gone(pid)
