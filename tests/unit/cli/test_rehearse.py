"""Mistakes in the command line of a rehearsal, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Cli


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("", "the following arguments are required: train.py; see slurm-elastic rehearse --help"),
        ("nowhere.py", "nowhere.py is no file; name a Python script"),
        ("--nodes 65 train.py", "--nodes 65: a rehearsal has 1 to 64 nodes on this machine"),
        ("--tolerance many train.py", "--tolerance 'many' is no number above 0; give one"),
        ("--mishaps kil train.py", "no mishap 'kil'; did you mean kill?"),
        ("--mishaps kill --scenario s train.py", "--scenario and --mishaps both say what happens; give one of them"),
        (
            "--nodes 1 --mishaps kill train.py",
            "'at step 1 kill node 0' takes the last node; give --nodes 2 or more, or let one join before",
        ),
        (
            "--scenario nowhere train.py",
            "--scenario nowhere cannot be read: [Errno 2] No such file or directory: 'nowhere'; name a text file",
        ),
        (
            "--report nowhere/page.html train.py",
            "--report nowhere/page.html: no file can be written there; name a file in a directory that exists",
        ),
        ("--keep . train.py", "--keep .: File exists; name a directory that does not exist"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli, arguments: str, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert cli(2, "rehearse", *arguments.split()) == ("", f"slurm-elastic: error: {line}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
