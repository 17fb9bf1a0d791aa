"""Parsing: outputs/*.txt were printed by scontrol of 22.05.8 (with 26.05 in their name: of 26.05.5), with user and host
names replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_elastic.slurm import output

OUTPUTS = Path(__file__).parent / "outputs"


def job(name: str) -> output.JobView:
    (view,) = output.parse_jobs((OUTPUTS / name).read_text())
    return view


def test_a_running_job_and_a_job_name_that_looks_like_fields() -> None:
    # Its JobName is "x Requeue=0 Restarts=9", its comment and arguments hold JobState=FAILED.
    assert job("job_running.txt") == output.JobView(
        job_id="1",
        array_job_id=None,
        array_task_id=None,
        state="RUNNING",
        reason=None,
        restarts=2,
        requeue=True,
        preempt_time=None,
        end_time=1795179347,
        nodes=("f1", "f2"),
        partition="low",
        start_time=1795175747,
        batch_host="f1",
    )


@pytest.mark.parametrize("release", ["22.05", "26.05"])
def test_scontrol_tells_no_end_of_a_job_without_a_time_limit(release: str) -> None:
    view = job(f"job_preempted_without_limit_{release}.txt")
    assert (view.state, view.unlimited, view.end_time) == ("RUNNING", True, None)
    assert view.preempt_time is not None
    assert (view.partition, view.qos) == ("low", None)
    assert not job("job_preempted_in_grace.txt").unlimited


@pytest.mark.parametrize(
    "word", ["Unknown", "None", "N/A", "NONE", "UNLIMITED", "INFINITE", "Partition_Limit", "", "0:00"]
)
@pytest.mark.parametrize("field", ["EndTime", "PreemptTime"])
def test_a_time_that_is_not_told_is_none_and_never_zero(field: str, word: str) -> None:
    (view,) = output.parse_jobs(
        f"JobId=1 JobName=x\n   JobState=RUNNING Reason=None TimeLimit=Partition_Limit\n   {field}={word}\n"
    )
    assert (view.end_time, view.preempt_time, view.unlimited) == (None, None, False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("00:00:15\n", 15),
        ("01:02:03\n", 3723),
        ("1-00:00:00\n", 86400),
        ("\n", None),
        ("", None),
        ("INVALID\n", None),
        ("1:2", None),
    ],
)
def test_the_grace_of_a_qos(text: str, expected: int | None) -> None:
    # Slurm's secs2time_str (src/common/parse_time.c).
    assert output.parse_duration(text.strip()) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("22.05.8", (22, 5)), ("26.05.0-0rc1", (26, 5)), ("(null)", None), ("next", None)]
)
def test_the_release(text: str, expected: tuple[int, int] | None) -> None:
    assert output.ClusterConfig({"SLURM_VERSION": text}).release == expected


def test_an_array_prints_several_jobs() -> None:
    views = output.parse_jobs((OUTPUTS / "jobs_array.txt").read_text())
    assert [(view.job_id, view.array_job_id, view.array_task_id, view.state) for view in views] == [
        ("13", "13", "5,7%1", "PENDING"),
        ("14", "13", "3", "RUNNING"),
    ]


def test_a_job_that_may_not_be_requeued() -> None:
    (view,) = output.parse_jobs("JobId=5 JobName=j\n   JobState=RUNNING Reason=None\n   Requeue=0 Restarts=0\n")
    assert not view.requeue


def test_the_line_that_submitted_a_job_may_look_like_fields() -> None:
    text = (OUTPUTS / "job_preempted_without_limit_26.05.txt").read_text()
    assert "SubmitLine=sbatch" in text
    lying = text.replace("--parsable", "--parsable ArrayJobId=9 ArrayTaskId=1")
    assert output.parse_jobs(lying) == output.parse_jobs(text)


def test_a_comment_of_several_lines_changes_nothing() -> None:
    text = (OUTPUTS / "job_running.txt").read_text().replace("Reason=Bogus", "\n   JobState=FAILED Restarts=9\n")
    assert output.parse_jobs(text) == (job("job_running.txt"),)


@pytest.mark.parametrize("text", ["", "\n", "slurm_load_jobs error: Unable to contact slurm controller\n", "No jobs\n"])
def test_anything_else_is_no_job(text: str) -> None:
    assert output.parse_jobs(text) == ()


def test_nodes() -> None:
    views = output.parse_nodes((OUTPUTS / "nodes.txt").read_text())
    assert {name: view.state for name, view in views.items()} == {
        "f1": output.NodeState.UP,
        "f2": output.NodeState.DRAINED,
        "f9": output.NodeState.DOWN,
        "f10": output.NodeState.UNKNOWN,
    }
    assert {view.address for view in views.values()} == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("IDLE", output.NodeState.UP),
        ("ALLOCATED", output.NodeState.UP),
        ("MIXED+COMPLETING", output.NodeState.UP),
        ("IDLE+CLOUD+POWERING_UP", output.NodeState.UP),
        ("MIXED+MAINTENANCE+RESERVED", output.NodeState.UP),
        ("ALLOCATED+DRAIN", output.NodeState.DRAINED),
        ("MIXED+DRAIN+REBOOT_REQUESTED", output.NodeState.DRAINED),
        ("ALLOCATED+FAIL", output.NodeState.DOWN),
        ("DOWN", output.NodeState.DOWN),
        ("DOWN*", output.NodeState.DOWN),
        ("DOWN+DRAIN+NOT_RESPONDING", output.NodeState.DOWN),
        ("IDLE+CLOUD+POWERED_DOWN", output.NodeState.DOWN),
        ("ALLOCATED*", output.NodeState.UNKNOWN),
        ("ALLOCATED+NOT_RESPONDING", output.NodeState.UNKNOWN),
        ("MIXED+DRAIN+NOT_RESPONDING", output.NodeState.UNKNOWN),
        ("UNKNOWN", output.NodeState.UNKNOWN),
    ],
)
def test_node_states(text: str, state: output.NodeState) -> None:
    view = output.parse_nodes(
        f"NodeName=n1 Arch=x86_64 NodeAddr=10.0.0.1 State={text} ThreadsPerCore=1 Reason=State=IDLE\n"
    )
    assert view["n1"].state is state
    assert view["n1"].address == "10.0.0.1"


def test_the_queue_is_parsed_with_any_directory() -> None:
    lines = [
        ("12", "12", "RUNNING", "2", "12", "None", "1764000000", "/home/a b|c", "two"),
        ("lines",),
        ("7_[3-7]", "9", "PENDING", "1", "7", "Priority", "N/A", "/w", ""),
    ]
    running, waiting = output.parse_queue("\n".join("\x1f".join(words) for words in lines))
    assert (running.nodes, running.comment, waiting.comment) == (2, "two", "")
    assert (running.name, running.state, running.reason, running.work_dir) == ("12", "RUNNING", None, "/home/a b|c")
    assert running.start_time == 1764000000
    assert (waiting.name, waiting.job_id, waiting.array_job_id, waiting.start_time) == ("7_[3-7]", "9", "7", None)
    assert waiting.reason == "Priority"


def test_what_a_job_has_asked_for() -> None:
    text = (OUTPUTS / "job_running.txt").read_text()
    plain = {"partition": "low", "time": "01:00:00", "cpus-per-task": "1"}
    assert output.parse_requested(text) == plain
    asked = text.replace("   Features=(null)", "   TresPerNode=gres{}gpu:a100:4\n   Features=big&new")
    for sign in (":", "/"):
        assert output.parse_requested(asked.format(sign)) == {**plain, "gres": "gpu:a100:4", "constraint": "big&new"}
    assert output.parse_requested("slurm_load_jobs error: Invalid job id specified") is None
