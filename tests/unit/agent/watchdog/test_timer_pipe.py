from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest

from slurm_elastic.agent.watchdog.timers import is_enabled, make_pipe


def test_torch_decides_what_switches_it_off() -> None:
    assert is_enabled({})
    assert is_enabled({"TORCHELASTIC_ENABLE_FILE_TIMER": "1"})
    assert not is_enabled({"TORCHELASTIC_ENABLE_FILE_TIMER": "0"})
    assert not is_enabled({"TORCHELASTIC_ENABLE_FILE_TIMER": ""})


def test_a_pipe_that_another_user_has_put_there_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    real = os.mkfifo

    def replaced(path: Path, mode: int) -> None:
        real(path, mode)
        if path.name == "given":
            os.chown(path, 65534, -1)

    monkeypatch.setattr(os, "mkfifo", replaced)
    pipe = make_pipe({"TORCHELASTIC_TIMER_FILE": str(tmp_path / "given")}, tmp_path)
    assert pipe.path.name == "timer"
    assert "another user has replaced it): the watchdog uses one of its own" in caplog.text
    pipe.close()


def test_a_private_pipe_that_leaves_nothing_behind(tmp_path: Path) -> None:
    pipe = make_pipe({}, tmp_path)
    assert stat.S_ISFIFO(pipe.path.stat().st_mode)
    assert stat.S_IMODE(pipe.path.stat().st_mode) == 0o600
    pipe.close()
    assert list(tmp_path.iterdir()) == []


def test_the_pipe_is_where_the_user_wants_it(tmp_path: Path) -> None:
    wanted = tmp_path / "mine"
    pipe = make_pipe({"TORCHELASTIC_TIMER_FILE": str(wanted)}, tmp_path)
    assert pipe.path == wanted
    pipe.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["file", "pipe", "dangling link", "no directory"])
def test_what_is_there_stays_there(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted = tmp_path / "taken"
    match kind:
        case "file":
            wanted.write_text("precious")
        case "pipe":
            os.mkfifo(wanted)
        case "dangling link":
            wanted.symlink_to(tmp_path / "nowhere")
        case "no directory":
            wanted = tmp_path / "missing" / "timer"
    before = wanted.lstat() if kind != "no directory" else None
    with caplog.at_level(logging.WARNING):
        pipe = make_pipe({"TORCHELASTIC_TIMER_FILE": str(wanted)}, tmp_path)
    assert str(wanted) in caplog.text
    assert pipe.path != wanted
    pipe.close()
    if before is not None:
        assert wanted.lstat().st_ino == before.st_ino
        assert wanted.lstat().st_mtime_ns == before.st_mtime_ns
