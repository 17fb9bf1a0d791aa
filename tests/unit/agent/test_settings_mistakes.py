"""Command lines of the agent that are taken, and those that are refused by one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_elastic.errors import UsageError
from tests.unit.agent.helpers.command_lines import ELEMENT, ONE, STEP, settle

pytestmark = pytest.mark.usefixtures("clean_place")


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


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        ("--nnodes 4:2", STEP, "--nnodes 4:2: the minimum is above the maximum; write it as in 2:4"),
        ("--nnodes 0", STEP, "--nnodes 0: a run needs at least one node; write it as in 1:1"),
        ("--nnodes two", STEP, "--nnodes 'two' is neither a number nor MIN:MAX; write it as in 4 or 2:4"),
        ("--nnodes 1:2:3", STEP, "--nnodes '1:2:3' is neither a number nor MIN:MAX; write it as in 4 or 2:4"),
        (
            "--nnodes 4",
            STEP,
            "--nnodes: at least 4 nodes are asked for, and the job has 3; lower the minimum or submit with --nodes=4",
        ),
        ("--nnodes 2", {}, "--nnodes: at least 2 nodes are asked for, and there is one here; lower the minimum"),
        (
            "--node-unit 4",
            STEP,
            "no round of 1 to 3 nodes is valid: --node-unit, --valid-nodes and --segment leave multiples of 4; give "
            "the job and --nnodes other bounds, as in 4",
        ),
        (
            "--nnodes 1:8 --valid-nodes 4,8",
            STEP,
            "--nnodes: at least 4 nodes are asked for, and the job has 3; lower the minimum or submit with --nodes=4",
        ),
        (
            "--valid-nodes 2;4",
            STEP,
            "--valid-nodes '2;4' is no list of numbers of nodes; write it as in --valid-nodes 2,4,8",
        ),
        (
            "--nproc-per-node many",
            STEP,
            "--nproc-per-node 'many': Unsupported nproc_per_node value: many; give a number, auto, cpu or gpu",
        ),
        ("--nproc-per-node 0", STEP, "--nproc-per-node '0' makes 0 workers on this node; give a number from 1 on"),
        ("--max-restarts -1", STEP, "--max-restarts -1 is negative; give 0 or more"),
        (
            "--max-restarts x",
            STEP,
            "argument --max-restarts/--max_restarts: invalid int value: 'x'; see slurm-elastic agent --help",
        ),
        ("--monitor-interval 0", STEP, "--monitor-interval 0 is not above 0; give seconds, as in 0.1"),
        ("--shutdown-timeout -1", STEP, "--shutdown-timeout '-1' is not a number of seconds; give 0 or more"),
        (
            "--rdzv-backend c10d",
            STEP,
            "--rdzv-backend c10d: slurm-elastic agent has one rendezvous, slurm; leave it out, or use torchrun for the "
            "others",
        ),
        (
            "--rdzv-endpoint head:0",
            STEP,
            "--rdzv-endpoint 'head:0' is not HOST:PORT with a port from 1 to 65535; or leave it out",
        ),
        (
            "--rdzv-conf timeout",
            STEP,
            "The rendezvous configuration option 'timeout' must have a value specified.",
        ),
        ("--standalone", STEP, "--standalone would train once on every node; leave it out, the nodes find each other"),
        (
            "--master-port 29500",
            STEP,
            "--master-port 29500: the workers' store has a port of its own in each round, which they find in "
            "MASTER_PORT; leave the option out, with init_method=env://",
        ),
        (
            "--event-log-handler mine",
            STEP,
            "--event-log-handler 'mine' is not registered; there are console, dynamic_rendezvous, null",
        ),
        (
            "--tee 4",
            STEP,
            "--tee '4' is neither 0, 1 (stdout), 2 (stderr), 3 (both) nor a list by local rank such as 0:3,1:1",
        ),
        ("--local-ranks-filter a", STEP, "--local-ranks-filter 'a' is not a list of local ranks such as 0,1"),
        (
            "--run-id a/b",
            STEP,
            "run id 'a/b' is no safe file name; use at most 128 letters, digits, '.', '_' and '-', and begin with a "
            "letter or digit",
        ),
        (
            "",
            {name: value for name, value in STEP.items() if "STEP" not in name},
            "this is one process of a job with 3 nodes; start one agent on each: srun --ntasks-per-node=1 "
            "slurm-elastic agent ...",
        ),
        ("--no-python -m", STEP, "Don't use both the '--no-python' flag and the '--module' flag at the same time."),
    ],
)
def test_bad_input(arguments: str, environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        settle(f"{arguments} train.py", environ)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "variable", ["PET_STANDALONE", "PET_START", "PET_STOP_ON_SAME_FAILURE", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
)
def test_bad_variables(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "yes")
    with pytest.raises(UsageError):
        settle("train.py", STEP)


def test_snapshots_by_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_SNAPSHOT_SLOTS", "4")
    monkeypatch.setenv("PET_SNAPSHOT_REPLICAS", "1")
    with pytest.raises(UsageError) as caught:
        settle("train.py", STEP)
    assert str(caught.value) == "--snapshot-slots '4' is neither 2 nor 3"
    monkeypatch.setenv("PET_SNAPSHOT_SLOTS", "2")
    monkeypatch.setenv("PET_SNAPSHOT_REPLICAS", "2")
    with pytest.raises(UsageError) as caught:
        settle("train.py", STEP)
    assert str(caught.value) == "--snapshot-replicas '2' is neither 0 nor 1"


def test_scripts_that_are_not_there(tmp_path: Path) -> None:
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
    said = {}
    for arguments in messages:
        with pytest.raises(UsageError) as caught:
            settle(arguments, STEP)
        said[arguments] = str(caught.value)
    assert said == messages
