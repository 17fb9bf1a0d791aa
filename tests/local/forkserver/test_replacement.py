"""The process that takes the place of the fork server once it has imported more."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.local.forkserver.helpers.workplace import HANG, Workplace
from tests.local.forkserver.test_ends import assert_gone

Make = Callable[..., Workplace]


def test_round_changes_do_not_wait_for_its_imports(workplace: Make, tmp_path: Path) -> None:
    (tmp_path / "modules").mkdir()
    here = tmp_path / "here"
    (tmp_path / "modules" / "sympy.py").write_text(
        f"import os, time\nopen({str(here)!r}, 'w', buffering=1).write(str(os.getpid()))\ntime.sleep(1000)\n"
    )
    path = {"PYTHONPATH": str(tmp_path / "modules")}
    place = workplace(environment={**os.environ, **path})
    place.script.write_text("import sys\nprint('torch' in sys.modules)\n")
    assert place.run_warm(environment=path).stdout == "True\n"
    warm, end = place.fork_server.pid, time.monotonic() + HANG
    while not here.exists() or not here.read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
    assert place.run_warm(environment=path).stdout == "True\n"
    assert place.fork_server.pid == warm
    place.close()
    assert_gone(warm, int(here.read_text()))


def test_it_starts_the_workers_of_later_rounds(workplace: Make, caplog: pytest.LogCaptureFixture) -> None:
    place = workplace()
    place.script.write_text("import sys\nprint('torch._dynamo' in sys.modules)\n")
    before, end = place.fork_server.pid, time.monotonic() + HANG
    assert place.run_warm().stdout == "False\n"
    while not place.fork_server.complete:
        assert time.monotonic() < end
        time.sleep(0.1)
        place.fork_server.refresh()
    assert_gone(before)
    for _round in range(2):
        assert place.run_warm().stdout == "True\n"
    assert not caplog.messages
    os.kill(place.fork_server.pid, signal.SIGKILL)
    assert place.run_warm().stdout == "False\n"
    assert caplog.messages == ["workers start cold: the fork server died (SIGKILL)"]


def test_the_first_workers_have_everything_where_that_is_waited_for(
    workplace: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    place = workplace()
    place.script.write_text(
        "import os, sys\nprint('torch._dynamo' in sys.modules, [name for name in os.environ if 'INDUCTOR' in name])\n"
    )
    place.fork_server.import_all(HANG)
    assert place.run_warm().stdout == "True []\n"


def test_it_ends_with_a_fork_server_that_is_killed(workplace: Make) -> None:
    place = workplace()
    place.script.write_text("import sys\nprint('torch' in sys.modules)\n")
    assert place.run_warm().stdout == "True\n"
    end = time.monotonic() + HANG
    while place.fork_server.replacement is None:
        assert time.monotonic() < end
        time.sleep(0.05)
        place.fork_server.read()
    replacement = place.fork_server.replacement.pid
    os.kill(place.fork_server.pid, signal.SIGKILL)
    assert place.run_warm().stdout == "False\n"
    assert_gone(replacement)
