from __future__ import annotations

from pathlib import Path

import pytest

from slurm_elastic.rehearsal.files import WatchedFiles


@pytest.fixture
def watched(tmp_path: Path) -> WatchedFiles:
    for name in ("last.pt", "log.txt"):
        (tmp_path / name).write_bytes(b"step 10")
    files = WatchedFiles([tmp_path])
    files.look(complete=True)
    return files


def test_a_file_that_is_written_over_is_found(watched: WatchedFiles, tmp_path: Path) -> None:
    (tmp_path / "last.pt").write_bytes(b"step 20 and more")
    watched.look(complete=False)
    watched.close()
    assert watched.overwritten == {tmp_path / "last.pt"}


def test_a_file_that_is_cut_is_found_though_it_is_complete_again_later(watched: WatchedFiles, tmp_path: Path) -> None:
    (tmp_path / "last.pt").write_bytes(b"")
    watched.look(complete=False)
    (tmp_path / "last.pt").write_bytes(b"step 10")
    watched.look(complete=True)
    watched.close()
    assert watched.overwritten == {tmp_path / "last.pt"}


def test_renaming_appending_and_removing_are_no_writing_over(watched: WatchedFiles, tmp_path: Path) -> None:
    for number in range(20, 40):
        (tmp_path / "last.tmp").write_bytes(b"step %d" % number)
        (tmp_path / "last.tmp").replace(tmp_path / "last.pt")
    with (tmp_path / "log.txt").open("ab") as log:
        log.write(b"step 20")
    watched.look(complete=True)
    (tmp_path / "last.pt").unlink()
    watched.look(complete=False)
    watched.close()
    assert watched.overwritten == set()
