from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_elastic.errors import UsageError
from slurm_elastic.observe.views import LiveAgent, LiveLeave, LiveRun
from slurm_elastic.rendezvous.leader_client import LeaderEndpoint
from slurm_elastic.rendezvous.transport.messages import LeaveAnswer, LeaveRequest, StatusAnswer
from slurm_elastic.rundir import RunDir
from slurm_elastic.slurm import QueuedJob
from slurm_elastic.submission import resize as resizing
from slurm_elastic.submission.batch_script import TEMPLATES
from slurm_elastic.submission.job import ElasticInfoWatcher, ElasticJob
from slurm_elastic.submission.resize import ResizePlan, further_job, plan_resize
from slurm_elastic.submission.sbatch import Started
from tests.conftest import Cli

FIRST = ["n1/7.0/11", "n2/7.0/12"]
SECOND = ["n3/9.1/13", "n10/9.1/14"]
QUEUED = r"%s\037%s\037PENDING\0372\037%s\037Priority\037N/A\037/home\037%s\n"
PENDING = QueuedJob("11", "11", "PENDING", 3)
ELEMENTS = [QueuedJob(f"12_{index}", "12", "PENDING", 1) for index in range(2)]


@pytest.mark.parametrize(
    ("change", "coming", "expected"),
    [
        (+2, [], ResizePlan(submit=2)),
        (-1, [], ResizePlan(leave=(("9.1", ("n10",)),))),
        (-2, [], ResizePlan(leave=(("9.1", ("n10", "n3")),))),
        (-3, [], ResizePlan(leave=(("9.1", ("n10", "n3")), ("7.0", ("n2",))))),
        (0, [PENDING], ResizePlan()),
        (+1, [PENDING], ResizePlan(submit=1)),
        # What waits goes first, each job as a whole.
        (-3, [PENDING], ResizePlan(cancel=("11",))),
        (-4, [PENDING], ResizePlan(cancel=("11",), leave=(("9.1", ("n10",)),))),
        (-1, [PENDING], ResizePlan(submit=2, cancel=("11",))),
        (-1, [PENDING, *ELEMENTS], ResizePlan(cancel=("12_1",))),
        (-2, [PENDING, *ELEMENTS], ResizePlan(cancel=("12_1", "12_0"))),
    ],
)
def test_which_nodes_come_and_go(change: int, coming: list[QueuedJob], expected: ResizePlan) -> None:
    agents = [*SECOND, *FIRST]
    size = len(agents) + sum(job.nodes for job in coming) + change
    assert plan_resize(change, 0, agents, coming, 1, 16) == expected
    assert plan_resize(None, size, agents, coming, 1, 16) == expected


def test_a_size_beyond_the_bounds_is_refused_but_steps_towards_them_are_not() -> None:
    with pytest.raises(UsageError, match=r"has 4 nodes, and 3 asked for, and at most 7 train, .* as in --nnodes=2:8$"):
        plan_resize(+1, 0, [*FIRST, *SECOND], [PENDING], 2, 7)
    with pytest.raises(UsageError, match=r"has 4 nodes, and needs 2, .* drain RUN --all$"):
        plan_resize(None, 1, [*FIRST, *SECOND], [], 2, 7)
    assert plan_resize(-1, 0, [*FIRST, *SECOND], [], 1, 2).leave
    assert plan_resize(None, 4, FIRST[:1], [], 8, 16).submit == 3


def started(template: str = "allocation", **options: str) -> Started:
    arguments = ("--max-restarts=3", "train.py", "--name", "a b")
    return Started(TEMPLATES.read(template), options, arguments, "/home/me", {"PET_RDZV_CONF": "heartbeat_limit=5"})


def test_a_further_job_has_the_options_and_the_arguments_of_the_first(run_dir: RunDir) -> None:
    first = started(partition="high", time="1:00:00", gres="gpu:4")
    text = further_job(run_dir, first, 2, "1:8", {"partition": "low", "gpus-per-node": "2"}).text()
    head, _, rest = text.partition("\nset -- ")
    assert [line.removeprefix("#SBATCH --") for line in head.splitlines() if line.startswith("#SBATCH")] == [
        *("job-name=elastic-grow", "exclusive", "no-kill", "requeue", "signal=USR2@120", "output=%x-%j.out"),
        *("open-mode=append", "partition=low", "time=1:00:00", "gpus-per-node=2"),
        *(f"comment='slurm-elastic grows {run_dir.path}'", "nodes=2"),
    ]
    lines = rest.splitlines()
    assert lines[:6] == [
        "--max-restarts=3 train.py --name 'a b'",
        "export PET_RDZV_CONF=heartbeat_limit=5",
        "export PET_RDZV_ID=7",
        f"export PET_RUN_DIR={run_dir.path.parent.parent}",
        "export PET_NNODES=1:8",
        "export SLURM_ELASTIC_GROWS=7",
    ]
    assert text.endswith(TEMPLATES.read("allocation")[-200:])


def test_a_run_on_an_array_grows_by_elements(run_dir: RunDir) -> None:
    options = dict(further_job(run_dir, started("array"), 3, "1:8", {}).options)
    assert (options["array"], options["nodes"]) == ("0-2", "1")


@pytest.fixture
def cluster(
    tmp_path: Path, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, program: Callable[[str, str], None]
) -> list[str]:
    """A run of four nodes with a job that waits; what is asked of its leader."""
    asked: list[str] = []
    program("sbatch", f"cat >{tmp_path}/script; echo 31")
    program("scancel", f"echo scancel $* >>{tmp_path}/calls")
    program("squeue", f"printf '{QUEUED}' 11 11 11 'slurm-elastic grows {run_dir.path}' 12 12 12 mine")
    agents = {agent: LiveAgent("training") for agent in (*FIRST, *SECOND)}
    agents["n5/9.1/15"] = LiveAgent("leaving", leave=LiveLeave("drained"))
    live = LiveRun(StatusAnswer("n1/7.0/11", 1, "running", 1.0, 4, 4, min_nodes=1, max_nodes=8), agents)
    leader = LeaderEndpoint("127.0.0.1", 1, "7.0", b"")

    def leave(_: LeaderEndpoint, request: LeaveRequest) -> LeaveAnswer:
        asked.append(f"{request.job}: {','.join(request.nodes)}")
        return LeaveAnswer(request.nodes, ())

    monkeypatch.setattr(resizing, "_ask", lambda _: (leader, live))
    monkeypatch.setattr(resizing, "ask_to_leave", leave)
    monkeypatch.setattr(resizing, "read_start", lambda _: started())
    monkeypatch.chdir(tmp_path)
    return asked


def test_grow_shrink_and_resize(tmp_path: Path, cluster: list[str], cli: Cli) -> None:
    assert cli(0, "grow --partition=low 7 --nodes 2").out == "submitted job 31 for 2 more nodes; they join run 7\n"
    assert "\n#SBATCH --partition=low\n" in (tmp_path / "script").read_text()
    assert cli(0, "grow 7 --nodes 1").out == "submitted job 31 for 1 more node; it joins run 7\n"
    assert cli(0, "resize 7 6").out == "run 7 has this size\n"
    assert cli(0, "shrink 7 --nodes=3").out == "cancelled before their start: 11\nasked to leave: n10 (job 9)\n"
    assert (tmp_path / "calls").read_text() == "scancel 11\n"
    assert cluster == ["9.1: n10"]


def test_a_job_from_python_is_resized_and_outlives_its_first_job(
    tmp_path: Path, cluster: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ElasticInfoWatcher, "is_done", lambda *_, **__: True)
    job = ElasticJob(folder=tmp_path, job_id="7")
    assert job.resize(8, partition="low") == "31"
    assert "\n#SBATCH --partition=low\n" in (tmp_path / "script").read_text()
    assert job.resize(6) is None
    assert not job.done()
    (tmp_path / "bin/squeue").write_text("#!/bin/sh\n")
    assert job.done()


MISTAKES = {
    "grow 7 --nodes 3": "at most 8 train, by the --nnodes of its start",
    "grow 7 --nodes 2:4": "--nodes '2:4' is no number of nodes",
    "grow 7": "required: --nodes",
    "grow 7 8 --nodes 1": "unrecognized arguments: 8",
    "grow 7 --nodes 1 --nodelist=n3": "--nodelist is not possible: slurm-elastic sets it",
    "grow 7 --nodes 1 --ntasks=3": "--ntasks is not possible: one agent per node",
    "resize 7 0": "N '0' is no number of nodes",
    "shrink 7 --nodes 6": "needs 1, by the --nnodes of its start",
    "grow 8 --nodes 1": "no run 8",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistake_is_one_line(words: str, tmp_path: Path, cluster: list[str], cli: Cli) -> None:
    printed = cli(2, words)
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert MISTAKES[words] in printed.err
    assert not (tmp_path / "script").exists()
    assert cluster == []


def test_a_refusal_of_sbatch_is_one_line_and_nothing_is_cancelled_then(
    tmp_path: Path, program: Callable[[str, str], None], cluster: list[str], cli: Cli
) -> None:
    program("sbatch", "echo 'sbatch: error: invalid partition specified: no' >&2; exit 1")
    assert cli(2, "shrink 7 --nodes=1").err == (
        "slurm-elastic: error: sbatch refused the job: invalid partition specified: no\n"
    )
    assert not (tmp_path / "calls").exists()
    assert cluster == []


def test_a_run_that_has_ended_or_whose_start_is_not_on_record(
    tmp_path: Path,
    run_dir: RunDir,
    cluster: list[str],
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resizing, "read_start", lambda _: None)
    assert "how run 7 was started is not on record" in cli(2, "grow 7 --nodes=1").err
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert "run 7 does not train: no leader has published an endpoint" in cli(2, "grow 7 --nodes=1").err
    run_dir.mark_done({})
    assert cli(2, "resize 7 3").err == "slurm-elastic: error: run 7 is finished\n"
