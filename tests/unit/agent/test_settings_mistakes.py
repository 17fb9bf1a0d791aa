"""Command lines of the agent that are taken, and those that are refused by one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_elastic.errors import UsageError
from tests.goldens import check, golden
from tests.unit.agent.helpers.command_lines import ELEMENT, ONE, STEP, settle

pytestmark = pytest.mark.usefixtures("clean_place")

PLACES = {
    "in a step": STEP,
    "outside Slurm": {},
    "in a batch script": {name: value for name, value in STEP.items() if "STEP" not in name},
}


def refusal(line: str, environ: dict[str, str] = STEP) -> str:
    with pytest.raises(UsageError) as caught:
        settle(line, environ)
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        ("--nnodes 9:9", ELEMENT),
        ("--nnodes 4:8 --run-id shared", STEP),
        ("--nnodes 2 --run-id shared", {}),
        ("--standalone", ONE),
        ("--rdzv-backend slurm", STEP),
        ("--tee 0:3,11:1 --redirects 3", STEP),
    ],
)
def test_accepted(arguments: str, environ: dict[str, str]) -> None:
    settle(f"{arguments} train.py", environ)


def test_what_is_refused_is_refused_by_the_words_on_record() -> None:
    lines = golden("refused_command_lines")
    assert lines.keys() == PLACES.keys()
    found = {where: {line: refusal(line, PLACES[where]) for line in lines[where]} for where in PLACES}
    check("refused_command_lines", found)


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("PET_STANDALONE=yes", ""),
        ("PET_START=yes", ""),
        ("PET_STOP_ON_SAME_FAILURE=yes", ""),
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT=yes", ""),
        ("PET_SNAPSHOT_SLOTS=4", "--snapshot-slots '4' is neither 2 nor 3"),
        ("PET_SNAPSHOT_REPLICAS=2", "--snapshot-replicas '2' is neither 0 nor 1"),
    ],
)
def test_bad_variables(monkeypatch: pytest.MonkeyPatch, setting: str, complaint: str) -> None:
    monkeypatch.setenv(*setting.split("="))
    assert complaint in refusal("train.py")


def test_scripts_that_are_not_there() -> None:
    here = Path.cwd()
    (here / "package").mkdir()
    (here / "runnable").mkdir()
    (here / "runnable" / "__main__.py").write_text("")
    settle("runnable", STEP)
    messages = {
        "tran.py": f"no script {here}/tran.py on n2; did you mean train.py?",
        "missing": f"no script {here}/missing on n2; give its path, on a disk that all nodes share",
        "/nowhere/train.py": "no script /nowhere/train.py on n2; its directory is not there; use one on a disk that "
        "all nodes share",
        "package": f"{here}/package is a directory without __main__.py; name the script in it",
        "--no-python no-such-program": "no program no-such-program on n2; give a path, or a name that is in PATH there",
    }
    assert {line: refusal(line) for line in messages} == messages
