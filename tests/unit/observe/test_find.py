from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_elastic.errors import UsageError
from slurm_elastic.observe.find import find_run, newest_run
from slurm_elastic.rundir import RunDir, join_own, known_directories, remember_directory
from tests.unit.agent.helpers.jobs import slurm_job
from tests.unit.observe.runs import WrittenRun


def begin(base: Path, step: int, command: str, element: int | None = None) -> RunDir:
    array = {} if element is None else {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": str(element)}
    return join_own(base, slurm_job(SLURM_JOB_ID="12", SLURM_STEP_ID=str(step), **array), command.split())


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_the_newest_run_is_the_one_that_began_or_ended_last(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^no runs in .*elastic-runs; change to the directory in which sbatch"):
        newest_run(tmp_path)
    # By their numbers the other one is newer, and the beginning of an id would be that of two.
    for name, changed in (("12", 200), ("12.1", 100), ("13", 100)):
        os.utime(RunDir.for_run(tmp_path, name).open().path, (changed, changed))
    assert newest_run(tmp_path).run_id == "12"


@pytest.mark.parametrize(
    "name",
    ["elastic-runs/7", "elastic-runs/7/", "./elastic-runs/7", "{base}/elastic-runs/7", "../{there}/elastic-runs/7"],
)
def test_a_path_is_as_good_as_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    RunDir.for_run(tmp_path, "7").open()
    monkeypatch.chdir(tmp_path)
    found = find_run(None, name.format(base=tmp_path, there=tmp_path.name))
    assert (found.run_id, found.path.resolve()) == ("7", tmp_path / "elastic-runs/7")
    with pytest.raises(UsageError, match=r"no run 8 in .*elastic-runs"):
        find_run(None, "elastic-runs/8", queued=lambda _: tmp_path)


def test_a_job_of_several_runs_names_them(tmp_path: Path) -> None:
    begin(tmp_path, 0, "t.py first")
    assert find_run(tmp_path, "12").run_id == "12"
    begin(tmp_path, 1, "t.py second")
    RunDir.for_run(tmp_path, "120").open()
    with pytest.raises(UsageError, match=r"2 runs match '12': 12\.0 \(t\.py first\), 12\.1 \(t\.py second\); give"):
        find_run(tmp_path, "12")
    assert [find_run(tmp_path, name).run_id for name in ("12.0", "12.1", "120")] == ["12", "12.1", "120"]


def test_a_run_is_found_by_one_of_its_jobs(run: WrittenRun) -> None:
    run.started(0, "n1/4711.0/3")
    assert find_run(run.base, "4711").run_id == "7"


def test_elements_of_an_array_that_are_runs(tmp_path: Path) -> None:
    begin(tmp_path, 0, "t.py", element=0)
    assert find_run(tmp_path, "12").run_id == "12_0"
    begin(tmp_path, 0, "t.py", element=1)
    begin(tmp_path, 1, "eval.py", element=1)
    with pytest.raises(UsageError, match=r"12_0 \(t\.py\), 12_1\.0 \(t\.py\), 12_1\.1 \(eval\.py\)"):
        find_run(tmp_path, "12")
    assert [find_run(tmp_path, name).run_id for name in ("12_0", "12_1.0", "12_1.1")] == ["12_0", "12_1", "12_1.1"]


def test_what_stops_nodes_takes_no_beginning_of_an_id(tmp_path: Path) -> None:
    RunDir.for_run(tmp_path, "1234").open()
    assert find_run(tmp_path, "12").run_id == "1234"
    with pytest.raises(UsageError, match="no run 12 in"):
        find_run(tmp_path, "12", exact=True)


def test_runs_are_found_from_any_directory(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.mkdir()
    first, second, here = (tmp_path / name for name in ("first", "second", "here"))
    for directory in (first, second, here):
        directory.mkdir()
    monkeypatch.chdir(here)
    for directory in (first, second, first):
        remember_directory(directory)
    assert sorted(known_directories()) == [first, second]
    assert (home / ".local/state/slurm_elastic/runs").stat().st_mode & 0o777 == 0o700
    begin(first, 0, "t.py")
    assert find_run(None, "12").path == first / "elastic-runs/12"
    with pytest.raises(UsageError, match="no run 1 in"):
        find_run(None, "1")
    begin(second, 0, "t.py")
    both = rf"2 runs match '12': {first}/elastic-runs/12 \(t\.py\), {second}/elastic-runs/12 \(t\.py\)"
    with pytest.raises(UsageError, match=both):
        find_run(None, "12")
    # The current directory comes first.
    begin(here, 0, "t.py")
    assert find_run(None, "12").path == here / "elastic-runs/12"


def test_a_home_that_is_not_there_is_not_made(tmp_path: Path, home: Path) -> None:
    remember_directory(tmp_path)
    assert known_directories() == []
    assert not home.exists()


def test_the_run_of_a_job_that_waits_may_have_no_directory(tmp_path: Path) -> None:
    there = tmp_path / "there"
    found = find_run(None, "12", {"12": there}.get)
    assert (found.run_id, os.path.lexists(found.path)) == ("12", False)
    assert found.path == there / "elastic-runs/12"
    assert find_run(tmp_path, "12", {"12": there}.get).path == tmp_path / "elastic-runs/12"
