"""The files behind the pages: who finds them, who removes them, what is refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from slurm_elastic.control import shared_page
from slurm_elastic.control.agent_side import RoundControl
from slurm_elastic.control.worker_side import attach


def test_only_one_process_takes_a_page(tmp_path: Path) -> None:
    control = RoundControl(tmp_path / "new", 3, 2)
    environment = control.environment(1)
    path = Path(environment["SLURM_ELASTIC_CONTROL"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert attach(environment) is not None
    assert attach(environment) is None
    assert [progress.attached for progress in control.progress()] == [False, True]
    control.close()
    control.close()
    assert not list(tmp_path.glob("new/*"))
    assert len(control.progress()) == 2


def test_no_variable_or_an_empty_one() -> None:
    assert attach({}) is None
    assert attach({"SLURM_ELASTIC_CONTROL": ""}) is None


@pytest.mark.parametrize("content", [b"", b"x" * 4096, b"slurm_el" + b"\xff" * 4088, b"x" * 5000])
def test_what_is_no_page_of_ours_stays(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "page"
    path.write_bytes(content)
    assert attach({"SLURM_ELASTIC_CONTROL": str(path)}) is None
    assert "cannot be told to stop" in caplog.text
    assert path.read_bytes() == content


@pytest.mark.parametrize(("owner", "mode"), [(65534, 0o600), (-1, 0o620), (-1, 0o604)])
def test_a_page_of_another_user_or_open_to_others_is_not_obeyed(
    tmp_path: Path, owner: int, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    path = tmp_path / "page"
    with path.open("w+b") as file:
        shared_page.new_page(file.fileno())
    os.chown(path, owner, -1)
    path.chmod(mode)
    assert attach({"SLURM_ELASTIC_CONTROL": str(path)}) is None
    assert "belongs to another user, or is open to others" in caplog.text
    link = tmp_path / "link"
    link.symlink_to(path)
    assert attach({"SLURM_ELASTIC_CONTROL": str(link)}) is None


def test_a_directory_that_another_user_has_made_takes_no_page(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    (tmp_path / "new").mkdir(mode=0o700)
    os.chown(tmp_path / "new", 65534, -1)
    control = RoundControl(tmp_path / "new", 0, 1)
    assert "belongs to another user" in caplog.text
    assert control.environment(0) == {}
    assert list((tmp_path / "new").iterdir()) == []


def test_without_pages_workers_take_no_part(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    control = RoundControl(tmp_path / "file", 0, 2)
    assert "cannot make a control page" in caplog.text
    assert control.environment(0) == {}
    assert control.hold() is None
    assert control.progress() == ()
    control.release()
    control.fence()


@pytest.mark.parametrize("text", ["", "preempted", "ä" * 40, "x" * 64])
def test_reason(tmp_path: Path, text: str) -> None:
    with (tmp_path / "page").open("w+b") as file:
        fields = shared_page.new_page(file.fileno())
    shared_page.write_text(fields, text)
    assert shared_page.read_text(fields) == text.encode()[:64].decode(errors="ignore")


def test_fields_lie_apart_and_on_the_page() -> None:
    names = ("HOLD", "STOP", "DEADLINE", "FENCED", "REASON")
    agent = [getattr(shared_page, name) for name in names] + list(range(shared_page.REASON, shared_page.REASON + 8))
    names = ("ATTACHED", "REGISTERED", "BOUNDARY", "BOUNDARY_TIME", "STEP", "CHECKPOINT", "STOPPED")
    worker = [getattr(shared_page, name) for name in names]
    assert len(set(agent)) == len(agent) - 1  # the reason's first field is named
    assert len(set(worker)) == len(worker)
    # A cache line has 64 bytes, a field 8.
    assert not {field // 8 for field in agent} & {field // 8 for field in worker}
    assert max(agent + worker) * 8 < shared_page.SIZE
