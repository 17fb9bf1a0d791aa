"""One actor per incarnation. In place of scontrol there is a shell script that prints what a real one did."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path

import pytest

from slurm_elastic.agent.job.requeue import requeue_job
from slurm_elastic.agent.option_values import OptionValues
from slurm_elastic.rundir import JobRecords, RunDir
from slurm_elastic.slurm import Controller, SlurmJob, expand
from tests.unit.agent.helpers.jobs import slurm_job

OUTPUTS = Path(__file__).parents[1] / "slurm" / "outputs"
DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"

SCONTROL = """\
#!/bin/bash
cd '{directory}'
printf '%s\\n' "$*" >>calls
case "$1 $2" in
  'show job') echo "$(<job.txt)" ;;
  'show config') echo "Configuration data as of $(<now)"; echo 'KillWait                = 30 sec' ;;
  '--oneliner show') echo "PartitionName=low TotalNodes=$(<nodes) State=UP" ;;
  update*) exit $(<update) ;;
  requeue*)
    [ "$(<requeue)" = 0 ] || exit 1
    if [ $2 = incomplete ] && [ -e ended.txt ]; then echo "$(<ended.txt)" >job.txt; exit; fi
    shown=$(<job.txt)
    [[ $shown =~ Restarts=([0-9]+) ]]
    echo "${{shown//Restarts=${{BASH_REMATCH[1]}}/Restarts=$((BASH_REMATCH[1] + 1))}}" >job.txt ;;
esac
"""

EXIT_CODE = "; exit code 75, in srun's words, is that of agents that have left"


class Slurm:
    """What scontrol says here: the job is preempted, unless a test shows another one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.script = directory / "scontrol"
        self.script.write_text(SCONTROL.format(directory=directory))
        self.script.chmod(0o755)
        self.shows("job_preempted_in_grace.txt")
        self.write("requeue", "0")
        self.write("update", "0")
        self.write("nodes", "8")
        self.write("now", "1795179300")

    def does(self, old: str, new: str) -> None:
        """What scontrol does instead; it may count its calls."""
        text = self.script.read_text()
        assert old in text
        self.script.write_text(text.replace(old, new))
        (self.directory / "grep").symlink_to("/usr/bin/grep")

    def write(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text)

    def shows(self, name: str, restarts: int = 0, array: str = "", file: str = "job.txt") -> None:
        text = (OUTPUTS / name).read_text()
        text = re.sub(r"^JobId=\d+", f"JobId=1 {array}", text)
        self.write(file, re.sub(r"Restarts=\d+", f"Restarts={restarts}", text))

    def ends_before_its_requeue(self, name: str) -> None:
        """What scontrol shows from then on."""
        self.shows(name, file="ended.txt")

    def calls(self, of: str = "") -> list[str]:
        calls = self.directory / "calls"
        return [call for call in calls.read_text().splitlines() if call.startswith(of)] if calls.exists() else []


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    return Slurm(directory)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.for_run(tmp_path, "1").open()


def job(restart_count: int = 0, **variables: str) -> SlurmJob:
    count = str(restart_count)
    return slurm_job("f1", SLURM_JOB_ID="1", SLURMD_NODENAME="f1", SLURM_RESTART_COUNT=count, **variables)


class Script:
    """The end of a batch script."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self.said: list[str] = []

    def ends(
        self,
        of: SlurmJob | None = None,
        status: int = 75,
        wait: float = 0.0,
        max_requeues: int = 3,
        failed: bool = False,
    ) -> bool:
        return requeue_job(
            self.run_dir,
            of or job(),
            status,
            controller=Controller(),
            values=OptionValues(max_requeues=max_requeues),
            failed=failed,
            say=self.said.append,
            wait=wait,
        )

    def notice(self, *signals: str, cause: str = "", restart_count: int = 0, progress: int | None = None) -> None:
        record = {"signals": signals, "cause": cause, "progress": progress}
        JobRecords(self.run_dir, "1").publish_notice(restart_count, record)


@pytest.fixture
def script(run_dir: RunDir) -> Script:
    return Script(run_dir)


@pytest.mark.parametrize("status", [75, 137, 143])
def test_preempted_in_grace(slurm: Slurm, script: Script, status: int) -> None:
    # 137: an agent that was killed before it had gone.
    assert script.ends(status=status)
    assert slurm.calls("requeue") == ["requeue incomplete 1"]
    assert script.said == [f"job 1: requeued: preempted{EXIT_CODE if status == 75 else ''}"]


@pytest.mark.parametrize("status", [0, 1, 2, 76, 75])
def test_never_after_success_failure_or_mistake(slurm: Slurm, script: Script, status: int) -> None:
    assert not script.ends(status=status, failed=status == 75)
    assert slurm.calls() == []
    assert script.said == []


def test_only_once(slurm: Slurm, script: Script) -> None:
    assert script.ends()
    assert script.ends()
    assert slurm.calls("requeue") == ["requeue incomplete 1"]


def test_an_element_of_an_array_is_requeued_alone(slurm: Slurm, script: Script) -> None:
    # The job id of the last element to start is the array's, which means all of them.
    slurm.shows("job_preempted_in_grace.txt", array="ArrayJobId=1 ArrayTaskId=3")
    assert script.ends(job(SLURM_ARRAY_JOB_ID="1", SLURM_ARRAY_TASK_ID="3"))
    assert slurm.calls("requeue") == ["requeue incomplete 1_3"]


def test_slurm_has_done_it(slurm: Slurm, script: Script) -> None:
    slurm.shows("job_requeued_while_completing.txt", restarts=1)
    assert script.ends()
    assert slurm.calls("requeue") == []


def test_time_limits_are_counted(slurm: Slurm, script: Script) -> None:
    slurm.write("now", "1795179300")
    for count in range(3):
        slurm.shows("job_running.txt", restarts=count)
        script.notice("SIGCONT", "SIGUSR2", restart_count=count, progress=count)
        assert script.ends(job(count), max_requeues=2) == (count < 2)
    assert len(slurm.calls("requeue")) == 2
    assert script.said[-1].endswith("2 requeues after time limits, and --max-requeues is 2")


@pytest.mark.parametrize("state", ["RUNNING", "SIGNALING", "RESIZING"])
def test_a_state_that_hides_running_changes_nothing(slurm: Slurm, script: Script, state: str) -> None:
    slurm.shows("job_running.txt")
    shown = slurm.directory / "job.txt"
    shown.write_text(shown.read_text().replace("JobState=RUNNING", f"JobState={state}"))
    # Long before its time limit.
    slurm.write("now", "1795175800")
    script.notice("SIGUSR2")
    assert script.ends()
    assert script.said == [f"job 1: requeued: signalled{EXIT_CODE}"]


def test_starts_without_a_new_checkpoint_have_an_end(slurm: Slurm, script: Script) -> None:
    for count in range(6):
        slurm.shows("job_preempted_in_grace.txt", restarts=count)
        script.notice("SIGTERM", restart_count=count, progress=7)
        assert script.ends(job(count)) == (count < 5)
    assert "5 starts in a row made no progress" in script.said[-1]


def test_without_progress_reports_a_new_round_is_progress(slurm: Slurm, script: Script) -> None:
    for count in range(8):
        script.run_dir.claim_record({}, "rounds", count)
        slurm.shows("job_preempted_in_grace.txt", restarts=count)
        assert script.ends(job(count))
    slurm.shows("job_preempted_in_grace.txt", restarts=8)
    assert script.ends(job(8))


@pytest.mark.parametrize(
    ("cause", "requeued"), [("REQUEUE_WANTED", True), ("DRAINED", False), ("", False), ("NONSENSE", False)]
)
def test_a_wish_of_a_person(slurm: Slurm, script: Script, cause: str, requeued: bool) -> None:
    slurm.shows("job_running.txt")
    script.notice(cause=cause)
    assert script.ends() == requeued


def test_a_controller_that_has_forgotten_the_preemption(slurm: Slurm, script: Script) -> None:
    slurm.shows("job_running.txt")
    script.notice("SIGCONT", "SIGTERM", cause="PREEMPTED")
    assert script.ends()
    assert script.said == [f"job 1: requeued: preempted{EXIT_CODE}"]


def test_a_cancelled_job_stays_so_whatever_was_wanted(slurm: Slurm, script: Script) -> None:
    slurm.shows("job_cancelled.txt")
    script.notice("SIGUSR2", "SIGTERM", cause="REQUEUE_WANTED")
    assert not script.ends()
    assert slurm.calls("requeue") == []
    assert script.said == ["job 1: not requeued: the job was cancelled"]


@pytest.mark.parametrize("shown", ["job_cancelled.txt", "job_cancelled_in_grace.txt"])
def test_a_job_that_is_cancelled_just_before_its_requeue_stays_so(slurm: Slurm, script: Script, shown: str) -> None:
    slurm.ends_before_its_requeue(shown)
    assert not script.ends()
    assert slurm.calls("requeue") == ["requeue incomplete 1"]
    assert script.said == [
        f"job 1: requeued: preempted{EXIT_CODE}",
        "job 1: not requeued: it was cancelled or has ended meanwhile; submit it again to go on",
    ]


@pytest.mark.parametrize("shown", ["job_time_limit.txt", "job_preempted_to_its_end.txt"])
def test_a_job_that_slurm_ends_just_before_its_requeue_comes_back(slurm: Slurm, script: Script, shown: str) -> None:
    slurm.ends_before_its_requeue(shown)
    assert script.ends()
    assert slurm.calls("requeue") == ["requeue incomplete 1", "requeue 1"]
    assert script.said == [f"job 1: requeued: preempted{EXIT_CODE}"]


def test_without_scontrol_it_ends_at_once(slurm: Slurm, script: Script) -> None:
    slurm.script.unlink()
    script.notice("SIGUSR2")
    assert not script.ends(wait=600)
    assert script.said == ["job 1: not requeued: Slurm does not answer; submit it again to go on"]


def test_a_controller_that_is_down_is_waited_for(slurm: Slurm, script: Script) -> None:
    # Its third answer is one.
    down = f"[ $(grep -c 'show job' calls) -ge 3 ] || {{ echo '{DOWN}' >&2; exit 1; }}"
    slurm.does("'show job')", f"'show job') {down};")
    assert script.ends(wait=60)
    assert slurm.calls("requeue") == ["requeue incomplete 1"]


def test_a_requeue_that_fails_is_said(slurm: Slurm, script: Script) -> None:
    slurm.write("requeue", "1")
    assert not script.ends()
    assert script.said == [
        f"job 1: requeued: preempted{EXIT_CODE}",
        "job 1: not requeued: scontrol requeue failed; submit it again to go on",
    ]


def test_a_requeue_without_an_answer_is_tried_again(slurm: Slurm, script: Script) -> None:
    # As when a signal for the whole job ends scontrol, too.
    slurm.does('[ "$(<requeue)" = 0 ] || exit 1', "[ $(grep -c requeue calls) -ge 3 ] || kill -KILL $$")
    assert script.ends(wait=60)
    assert slurm.calls("requeue") == ["requeue incomplete 1"] * 3


def struck(run_dir: RunDir, *nodes: str, hours: float = 0.0) -> None:
    """These nodes have failed their checks; the run has eight nodes."""
    when = (datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(hours=hours)).isoformat()
    for node in nodes:
        event = {"time": when, "event": "node_check_failed", "node": node, "nodes": [node]}
        run_dir.append_event(node, json.dumps(event))
    all_nodes = [f"f{number}" for number in range(1, 9)]
    event = {"time": when, "event": "round_formed", "node": "f1", "nodes": all_nodes}
    run_dir.append_event("f1", json.dumps(event))
    run_dir.append_event("f1", "cut short")


def excludes(slurm: Slurm, nodes: str) -> None:
    shown = slurm.directory / "job.txt"
    shown.write_text(shown.read_text().replace("ExcNodeList=(null)", f"ExcNodeList={nodes}"))


def test_bad_nodes_are_excluded_after_the_requeue_with_those_of_the_user(slurm: Slurm, script: Script) -> None:
    struck(script.run_dir, "f3")
    excludes(slurm, "f7")
    assert script.ends()
    assert slurm.calls()[-3:] == ["requeue incomplete 1", "show job 1", "update JobId=1 ExcNodeList=f[3,7]"]
    assert script.said[-1] == ("job 1: it excludes f7, f3 from now on: their strikes are in the events of the run")
    # Those of the next start: the first has expired, and the user's stays.
    (script.run_dir.path / "events/f3.jsonl").unlink()
    struck(script.run_dir, "f4")
    slurm.shows("job_preempted_in_grace.txt", restarts=1)
    excludes(slurm, "f[3,7]")
    assert script.ends(job(1))
    assert slurm.calls("update")[-1] == "update JobId=1 ExcNodeList=f[4,7]"


@pytest.mark.parametrize(("hours", "partition"), [(25, 8), (0, 1)], ids=["expired", "no node to spare"])
def test_no_node_is_excluded(slurm: Slurm, script: Script, hours: float, partition: int) -> None:
    struck(script.run_dir, "f3", hours=hours)
    slurm.write("nodes", str(partition))
    assert script.ends()
    assert slurm.calls("update") == []


def test_three_bad_nodes_of_a_switch_are_the_switch(slurm: Slurm, script: Script) -> None:
    struck(script.run_dir, "f3", "f4", "f5")
    when = datetime.datetime.now(datetime.timezone.utc).isoformat()
    for node in ("f3", "f4", "f5", "f6"):
        whose = {"node": node, "agent": f"{node}/1.0/100", "domain": "1/s0/s2"}
        script.run_dir.append_progress(node, "1", json.dumps({"time": when, "event": "agent_started", **whose}))
    assert script.ends()
    assert slurm.calls("update") == ["update JobId=1 ExcNodeList=f[3-6]"]
    told = "job 1: 3 nodes of failure domain s0/s2 are bad: look at what they share, such as a switch"
    assert script.said.count(told) == 1


def test_at_most_so_many_nodes_are_excluded(slurm: Slurm, script: Script) -> None:
    struck(script.run_dir, "f3", "f4", "f5")
    assert script.ends()
    (update,) = slurm.calls("update")
    assert len(expand(update.partition("ExcNodeList=")[2])) == 2


def test_slurm_may_refuse(slurm: Slurm, script: Script) -> None:
    struck(script.run_dir, "f3")
    slurm.write("update", "1")
    assert script.ends()
    assert script.said[-1] == "job 1: Slurm did not accept that it excludes f3 from now on; bad nodes: f3"
