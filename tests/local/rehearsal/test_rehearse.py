"""Scripts with one planted mistake each, and right ones, through real mishaps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic.cli import main
from slurm_elastic.rehearsal.nodes import Node, processes
from tests.conftest import Cli
from tests.local import frameworks
from tests.local.waiting import eventually

HERE = Path(__file__).parent
TRAINS = HERE / "trains.py"
EXAMPLES = HERE.parents[2] / "docs/examples"
FRAMEWORKS = ("transformers_trainer.py", "lightning_trainer.py", "fabric_loop.py", "accelerate_loop.py")


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(HERE.parents[2]))
    # What a node imports before it joins has tests of its own, and takes seconds.
    monkeypatch.setenv("PET_LEARN_IMPORTS", "off")


def rehearse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scenario: str, *words: str, nodes: int = 2
) -> tuple[int, dict[str, Any]]:
    """Return exit code and JSON of a rehearsal that leaves nothing behind."""
    (tmp_path / "scenario.txt").write_text(scenario)
    code = main(["rehearse", f"--nodes={nodes}", f"--scenario={tmp_path / 'scenario.txt'}", "--json", *words])
    told = capsys.readouterr()
    assert list((tmp_path / "temporary").iterdir()) == []
    assert told.out, told.err
    return code, json.loads(told.out)


def wrong(told: dict[str, Any]) -> dict[str, str]:
    return {each["check"]: each["place"] for each in told["checks"] if each["level"] != "ok"}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        ("no-resume", {"resume.step", "steps.announced"}),
        ("in-place", {"checkpoint.atomic"}),
        ("forgets-place", {"samples.once", "losses.match"}),
        ("slow-save", {"save.grace", "steps.announced"}),
        ("fails-on-stop", {"worker.exit"}),
    ],
)
def test_a_planted_mistake_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mistake: str, expected: set[str]
) -> None:
    # Only the script that saves too slowly needs the end of its notice.
    notice = 4 if mistake == "slow-save" else 60
    code, told = rehearse(tmp_path, capsys, f"at step 25 preempt node 1 with {notice} s", str(TRAINS), mistake)
    # Where one rank ends before the others have saved, they are ended, too.
    assert expected <= set(wrong(told)) <= expected | {"steps.announced"}
    assert code == 1
    (place,) = {place.partition(":")[0] for place in wrong(told).values() if place}
    assert place == "trains.py"


@pytest.mark.nightly
def test_a_checkpoint_that_has_its_name_before_it_is_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = rehearse(tmp_path, capsys, "at step 25 kill node 1", str(TRAINS), "named-early")
    ended = {"run.ends", "worker.exit", "resume.step", "samples.once"}
    assert (set(wrong(told)), code) == (ended | {"checkpoint.atomic"}, 1)
    (found,) = [each["found"] for each in told["checks"] if each["check"] == "checkpoint.atomic"]
    assert found == "the script does not go on from an older checkpoint beside half of step_26"


def test_a_right_script_loses_no_step_that_it_need_not_lose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The node that joins gets the place of the one that leaves, also where that one takes two seconds to end.
    ends: list[tuple[Node, float]] = []
    runs = Node.running.fget

    def still_runs(node: Node) -> bool:
        if node.deadline is not None and not ends:
            ends.append((node, time.monotonic() + 2.0))
        return runs(node) or (bool(ends) and ends[0][0] is node and time.monotonic() < ends[0][1])

    monkeypatch.setattr(Node, "running", property(still_runs))
    scenario = "at step 13 preempt node 1; at step 24 join; at step 36 fail node 1; at step 53 hang node 0"
    scenario += "; at step 64 time limit with 60 s; at step 76 leader"
    code, told = rehearse(tmp_path, capsys, scenario, f"--report={tmp_path / 'page.html'}", str(TRAINS))
    assert (wrong(told), code) == ({}, 0), told
    # The last checkpoints before the failure, the hang and the loss were those of steps 30, 50 and 70.
    assert (told["steps"], told["steps_lost"]) == (90, 6 + 3 + 6)
    assert len(told["losses"]) == 90
    assert "<td><b>ok</b> samples.once" in (tmp_path / "page.html").read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("example", ["digits.py", "fsdp.py"])
def test_the_examples_of_the_documentation_are_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], example: str
) -> None:
    words = (str(EXAMPLES / example), "--epochs=1", "--batch-size=32", "--checkpoint-every=5")
    code, told = rehearse(tmp_path, capsys, "at step 7 preempt node 1", *words)
    assert (wrong(told), code, told["steps_lost"]) == ({}, 0, 0), told


@pytest.mark.nightly
@pytest.mark.parametrize("example", FRAMEWORKS)
def test_the_examples_with_frameworks_are_right(tmp_path: Path, example: str) -> None:
    frameworks.require()
    (tmp_path / "scenario.txt").write_text("at step 7 preempt node 1; at step 12 fail node 0")
    words = ["--nodes=2", f"--scenario={tmp_path / 'scenario.txt'}", "--json", str(EXAMPLES / example), "--epochs=2"]
    words += ["--batch-size=24", "--checkpoint-every=5"]
    # These imports take longer than the lists of them.
    environ = {**os.environ, "PET_LEARN_IMPORTS": "on", "XDG_STATE_HOME": str(tmp_path / "state")}
    command = [frameworks.PYTHON, "-m", "slurm_elastic", "rehearse", *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    told = json.loads(done.stdout)
    assert (wrong(told), done.returncode) == ({}, 0), (told, done.stderr)
    # Every row has something to judge.
    assert "unknown" not in {each["level"] for each in told["checks"]}
    # The last checkpoint before the failure was that of step 10, the last snapshot that of step 11 or 12.
    assert told["steps_lost"] <= 1
    assert len(told["losses"]) == told["steps"]


@pytest.mark.nightly
def test_a_group_that_was_paused_replaces_the_checkpoint_of_its_successor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = rehearse(tmp_path, capsys, "at step 25 pause", str(TRAINS), "publishes-late", nodes=3)
    assert (set(wrong(told)), code, told["steps_lost"]) == ({"checkpoint.superseded"}, 1, 5)


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("import torch\ntorch.zeros(1, device='cuda')", "rehearse it where there are GPUs"),
        pytest.param("print('trained')", "never calls slurm_elastic.trainer.should_stop", marks=pytest.mark.nightly),
        pytest.param(
            "from slurm_elastic import trainer\nfor step in range(1, 8): trainer.should_stop(step)",
            "'at step 25 kill node 1': the training ends with step 7",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_script_that_cannot_be_rehearsed(tmp_path: Path, cli: Cli, script: str, line: str) -> None:
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "scenario.txt").write_text("at step 25 kill node 1")
    scenario = f"--scenario={tmp_path / 'scenario.txt'}"
    error = cli(2, "rehearse --nodes=2", scenario, str(tmp_path / "script.py")).err
    assert line in error
    assert error.count("\n") == 1


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "slurm_elastic", "rehearse", "--nodes=2", str(TRAINS), "endless"]
    environ = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    process = subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL)
    eventually(lambda: list((tmp_path / "temporary").glob("*/undisturbed/*.jsonl")))
    (directory,) = (tmp_path / "temporary").glob("*/undisturbed")
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert list((tmp_path / "temporary").iterdir()) == []
    assert processes(directory) == {}
