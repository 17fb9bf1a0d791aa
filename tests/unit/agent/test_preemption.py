"""Diagnosis out why: with a shell script in place of scontrol that prints what a real one did."""

from __future__ import annotations

import os
import re
import select
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from signal import SIGCONT, SIGINT, SIGTERM, SIGUSR2, Signals
from typing import Any, ClassVar

import pytest

from slurm_elastic.agent.job.preemption import LEAVE_REASONS, SignalDiagnosis, asks_slurm
from slurm_elastic.agent.signals import Notices
from slurm_elastic.rendezvous.membership.agents import LeaveReason
from slurm_elastic.rundir import JobRecords, RunDir
from slurm_elastic.slurm import Cause, Controller, Diagnosis, SignalDefaults, SlurmJob
from tests.local.waiting import eventually
from tests.unit.agent.helpers.jobs import slurm_job

OUTPUTS = Path(__file__).parents[1] / "slurm" / "outputs"

SCONTROL = """\
#!/bin/bash
cd '{directory}'
echo "$*" >>calls
case "$1 $2" in
  'show job') {job} ;;
  '--oneliner show')
    case $3 in
      partition) echo "$(<partition)" ;;
      *) echo "NodeName=f1 State=$(<node)" ;;
    esac ;;
  'show config')
    echo "Configuration data as of $(<now)"; echo 'KillWait                = 30 sec'
    echo "PreemptType             = $(<type)" ;;
esac
"""
DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


class Recording(RunDir):
    """Notes each record of why the job has to end."""

    notices: ClassVar[list[dict[str, Any]]] = []

    def publish_record(self, record: Mapping[str, Any], *place: str | int) -> None:
        super().publish_record(record, *place)
        if place[0] == "notices":
            self.notices.append(dict(record))


class Told:
    """An agent on the only node of job 1, and what it finds out."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.notices = Notices()
        self.diagnoses: list[SignalDiagnosis] = []
        Recording.notices.clear()
        self.run_dir = Recording.for_run(directory, "1")
        self.run_dir.open()
        self.write("now", "1795179300")
        self.write("node", "ALLOCATED")
        self.write("type", "preempt/partition_prio")
        self.write("partition", (OUTPUTS / "partitions_22.05.txt").read_text())
        self.scontrol('echo "$(<job.txt)"')

    def write(self, name: str, text: str) -> None:
        # Whole at once: scontrol may be reading it.
        (self.directory / f"{name}.new").write_text(text)
        (self.directory / f"{name}.new").replace(self.directory / name)

    def scontrol(self, job: str) -> None:
        path = self.directory / "scontrol"
        path.write_text(SCONTROL.format(directory=self.directory, job=job))
        path.chmod(0o755)

    def slow_scontrol(self) -> None:
        """Have scontrol wait for the end of the test."""
        os.mkfifo(self.directory / "gate")
        self.scontrol("read -r <gate")

    def end(self) -> None:
        """Leave no thread behind, which would log what it could not ask while another test looks at the log."""
        gate = self.directory / "gate"
        fd = os.open(gate, os.O_RDWR) if gate.exists() else None
        if fd is not None:
            os.write(fd, b"\n" * 100)
        for diagnosis in self.diagnoses:
            diagnosis.close(60.0)
        if fd is not None:
            os.close(fd)

    def shows(self, name: str) -> None:
        text = re.sub(r"^JobId=\d+", "JobId=1", (OUTPUTS / name).read_text())
        self.write("job.txt", re.sub(r"Restarts=\d+", "Restarts=0", text))

    def calls(self) -> list[str]:
        return (self.directory / "calls").read_text().splitlines()

    def asked(self) -> int:
        return len(self.calls()) if (self.directory / "calls").exists() else 0

    def diagnosis(self, *, timeout: float = 30.0, save: float | None = None, node: str = "f1") -> SignalDiagnosis:
        diagnosis = SignalDiagnosis(
            self.notices,
            self.run_dir,
            slurm_job("f[1-2]", SLURM_JOB_ID="1", SLURMD_NODENAME=node),
            f"{node}/1.0/1",
            SignalDefaults(grace=20.0, warning=120.0, save=save),
            *[lambda: None] * 2,
            controller=Controller(timeout),
            answer_timeout=0.3,
        )
        self.diagnoses.append(diagnosis)
        return diagnosis

    def causes(self) -> list[Cause]:
        """Return the causes that were recorded, one after the other."""
        return [Cause[record["cause"]] for record in self.run_dir.notices]

    def signal(self, *numbers: Signals) -> None:
        for number in numbers:
            self.notices.note(number)

    def found(self, *numbers: Signals, diagnosis: SignalDiagnosis | None = None) -> Diagnosis:
        """Return what an agent finds out after these signals."""
        diagnosis = diagnosis or self.diagnosis()
        self.signal(*numbers)
        diagnosis.check()
        return next_finding(diagnosis)


def next_finding(diagnosis: SignalDiagnosis) -> Diagnosis:
    end = time.monotonic() + 60.0
    while (left := end - time.monotonic()) > 0:
        select.select([diagnosis.fd], [], [], left)
        if (found := diagnosis.next_finding()) is not None:
            return found
    raise AssertionError("no news")


def nearly(seconds: float) -> object:
    """So many seconds, without those that went by since."""
    return pytest.approx(seconds - 7.5, abs=7.5)


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    monkeypatch.setenv("PATH", str(tmp_path))
    told = Told(tmp_path)
    yield told
    told.end()


def test_nothing_is_asked_while_nobody_signals(told: Told) -> None:
    diagnosis = told.diagnosis()
    told.signal(SIGCONT)
    assert diagnosis.check() is None
    diagnosis.close()
    assert told.asked() == 0


def test_a_leave_is_known_at_once_and_explained_soon(told: Told) -> None:
    told.shows("job_preempted_in_grace.txt")
    told.write("now", "1795175800")
    diagnosis = told.diagnosis()
    told.signal(SIGCONT, SIGTERM)
    presumed = diagnosis.check()
    assert presumed == Diagnosis(Cause.UNKNOWN, nearly(20.0), "SIGTERM")
    assert diagnosis.check() is None
    assert next_finding(diagnosis) == Diagnosis(Cause.PREEMPTED, 47.0, "grace of 60 s")
    diagnosis.close()
    assert {tuple(record["signals"]) for record in told.run_dir.notices} == {("SIGCONT", "SIGTERM")}
    # At first what is known at once, and at last once more, as the workers may have saved in the meantime.
    assert told.causes() == [Cause.UNKNOWN, Cause.PREEMPTED, Cause.PREEMPTED]


@pytest.mark.parametrize(
    ("preempt_type", "seconds", "detail", "calls"),
    [
        # The clock once more, as any question may take seconds.
        (
            "partition_prio",
            13.0,
            "grace of 15 s",
            ["show job 1", "show config", "--oneliner show partition low", "show config"],
        ),
        # Of a job without a QOS.
        ("qos", 18.0, "grace of 20 s, as --grace says", ["show job 1", "show config", "show config"]),
    ],
    ids=["that of its partition", "that of --grace where Slurm tells none"],
)
def test_the_grace_of_a_job_without_a_time_limit(
    told: Told, preempt_type: str, seconds: float, detail: str, calls: list[str]
) -> None:
    told.shows("job_preempted_without_limit_26.05.txt")
    told.write("now", "1795347147")
    told.write("type", f"preempt/{preempt_type}")
    assert told.found(SIGCONT, SIGTERM) == Diagnosis(Cause.PREEMPTED, seconds, detail)
    told.end()
    assert told.calls() == calls


def test_another_signal_is_another_question(told: Told) -> None:
    told.shows("job_running.txt")
    diagnosis = told.diagnosis()
    told.signal(SIGUSR2)
    # A warning says only that Slurm has to be asked.
    assert diagnosis.check() is None
    assert next_finding(diagnosis) == Diagnosis(Cause.TIME_LIMIT_NEAR, 47.0, "SIGUSR2")
    told.shows("job_time_limit.txt")
    told.signal(SIGTERM)
    assert diagnosis.check() is not None
    assert next_finding(diagnosis).cause is Cause.TIME_LIMIT_REACHED


START, LIMIT = 1795175747, 1795179347
"""Of the job in job_running.txt."""


def asked_at_start(told: Told, left: int, limit: int = 120, save: float | None = None) -> SignalDiagnosis:
    """Start an agent when so many seconds are left of the limit, and wait until it has asked Slurm."""
    told.shows("job_running.txt")
    told.write("job.txt", (told.directory / "job.txt").read_text().replace(str(START), str(LIMIT - limit)))
    told.write("now", str(LIMIT - left))
    diagnosis = told.diagnosis(save=save)
    diagnosis.start()
    eventually(lambda: told.asked() >= 4)
    return diagnosis


def test_the_least_that_the_site_gives_is_presumed(told: Told) -> None:
    diagnosis = asked_at_start(told, left=3000, limit=3600)
    # GraceTime of the partition: KillWait and --grace are longer.
    assert JobRecords(told.run_dir, "1").grace(0) == 15
    told.slow_scontrol()
    told.signal(SIGTERM)
    assert diagnosis.check() == Diagnosis(Cause.UNKNOWN, pytest.approx(15.0, abs=1.0), "SIGTERM")
    other = told.diagnosis(node="f2")
    other.learn_grace()
    told.signal(SIGTERM)
    assert other.check() == Diagnosis(Cause.UNKNOWN, pytest.approx(15.0, abs=1.0), "SIGTERM")


def test_an_agent_that_started_before_slurm_had_answered_learns_the_least_later(told: Told) -> None:
    other = told.diagnosis(node="f2")
    other.learn_grace()
    JobRecords(told.run_dir, "1").publish_grace(0, 15.0)
    told.signal(SIGTERM)
    assert other.check() == Diagnosis(Cause.UNKNOWN, pytest.approx(15.0, abs=1.0), "SIGTERM")


def test_a_job_of_two_minutes_trains_on_after_its_warning(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "slurm_elastic")
    diagnosis = asked_at_start(told, left=120)
    told.write("now", str(LIMIT - 98))
    told.signal(SIGUSR2)
    assert diagnosis.check() is None
    eventually(lambda: "time limit near, 98 s left (SIGUSR2): the job trains on until 15 s are left" in caplog.text)
    assert diagnosis.next_finding() is None
    assert not diagnosis.has_news


def test_a_job_leaves_without_a_signal_when_a_save_has_to_begin(told: Told) -> None:
    diagnosis = asked_at_start(told, left=16)
    told.write("now", str(LIMIT - 15))
    assert next_finding(diagnosis) == Diagnosis(Cause.TIME_LIMIT_NEAR, 15.0, "no signal yet")
    assert diagnosis.asks
    diagnosis.close()
    assert told.causes()[-1] is Cause.TIME_LIMIT_NEAR


def test_a_limit_that_has_been_moved_is_another_limit(told: Told) -> None:
    diagnosis = asked_at_start(told, left=16)
    text = (told.directory / "job.txt").read_text()
    told.write("job.txt", text.replace(str(LIMIT), str(LIMIT + 600)))
    eventually(lambda: told.asked() >= 6)
    diagnosis.close()
    assert diagnosis.next_finding() is None
    assert told.causes() == []


def test_the_end_of_a_cancelled_job_is_no_limit(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    diagnosis = asked_at_start(told, left=600)
    told.shows("job_cancelled.txt")
    assert told.found(SIGTERM, diagnosis=diagnosis).cause is Cause.CANCELLED
    diagnosis.close()
    assert caplog.messages == []


def test_a_limit_shorter_than_a_save_is_told(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    diagnosis = asked_at_start(told, left=61, save=300.0)
    told.write("now", str(LIMIT - 60))
    assert next_finding(diagnosis).seconds == 60.0
    diagnosis.close()
    assert caplog.messages == [
        "--warning wants 300 s, and the job has 120 s: it trains for half of them; set a longer sbatch --time, or a "
        "shorter --warning and --signal"
    ]


def test_what_slurm_said_is_not_replaced_by_a_guess(told: Told) -> None:
    told.shows("job_preempted_in_grace.txt")
    diagnosis = told.diagnosis()
    assert told.found(SIGTERM, diagnosis=diagnosis).cause is Cause.PREEMPTED
    told.scontrol(f'echo "{DOWN}" >&2; exit 1')
    # A signal that says nothing new is no question either.
    told.signal(SIGCONT)
    assert diagnosis.check() is None
    told.signal(SIGTERM)
    diagnosis.check()
    assert not select.select([diagnosis.fd], [], [], 1.0)[0]
    diagnosis.close()
    assert told.causes()[-1] is Cause.PREEMPTED


@pytest.mark.parametrize(("number", "all_leave"), [(SIGUSR2, True), (SIGTERM, False)])
def test_a_warning_that_is_not_slurms_reaches_the_other_agents(told: Told, number: Signals, all_leave: bool) -> None:
    told.shows("job_running.txt")
    text = (told.directory / "job.txt").read_text()
    told.write("job.txt", re.sub(r"TimeLimit=\S+", "TimeLimit=UNLIMITED", text))
    diagnosis = told.diagnosis()
    assert told.found(number, diagnosis=diagnosis).cause is Cause.SIGNALLED
    # They wait for the agent that asks Slurm what a warning means; each leaves by itself after SIGTERM.
    assert diagnosis.tells_job(Cause.SIGNALLED) is all_leave


def test_a_person_on_a_drained_node(told: Told) -> None:
    told.shows("job_running.txt")
    told.write("node", "ALLOCATED+DRAIN")
    assert told.found(SIGTERM).cause is Cause.DRAINED


def test_without_scontrol_the_configured_meaning_counts(told: Told) -> None:
    (told.directory / "scontrol").unlink()
    assert told.found(SIGTERM) == Diagnosis(Cause.UNKNOWN, nearly(20.0), "SIGTERM")


def test_a_controller_that_is_down_is_asked_again(told: Told) -> None:
    told.scontrol(f'[ -e job.txt ] || {{ echo "{DOWN}" >&2; exit 1; }}; echo "$(<job.txt)"')
    diagnosis = told.diagnosis()
    found = told.found(SIGUSR2, diagnosis=diagnosis)
    assert (found.cause, found.seconds) == (Cause.TIME_LIMIT_NEAR, nearly(120.0))
    told.shows("job_preempted_in_grace.txt")
    assert next_finding(diagnosis).cause is Cause.PREEMPTED


def test_a_slow_scontrol_holds_nobody_up(told: Told) -> None:
    told.slow_scontrol()
    diagnosis = told.diagnosis(timeout=30.0)
    told.signal(SIGTERM)
    begun = time.monotonic()
    assert diagnosis.check() is not None
    diagnosis.close(0.5)
    assert time.monotonic() - begun < 20
    assert told.found(SIGTERM, diagnosis=told.diagnosis(timeout=0.5)).cause is Cause.UNKNOWN


def test_others_wait_for_the_one_that_asks(told: Told) -> None:
    diagnosis = told.diagnosis(node="f2")
    told.signal(SIGTERM)
    assert diagnosis.check() == Diagnosis(Cause.UNKNOWN, nearly(20.0), "SIGTERM")
    found = next_finding(diagnosis)
    assert (found.cause, found.seconds) == (Cause.UNKNOWN, nearly(20.0))
    assert told.asked() == 0
    diagnosis.close()
    assert told.causes() == []


def test_but_not_when_they_were_told(told: Told) -> None:
    diagnosis = told.diagnosis(node="f2")
    told.signal(SIGTERM)
    diagnosis.check()
    diagnosis.note_request(LeaveReason.PREEMPTED, 20.0)
    assert not select.select([diagnosis.fd], [], [], 1.0)[0]


def test_an_agent_that_is_warned_alone_asks_itself(told: Told) -> None:
    told.shows("job_running.txt")
    text = (told.directory / "job.txt").read_text()
    told.write("job.txt", re.sub(r"TimeLimit=\S+", "TimeLimit=UNLIMITED", text))
    assert told.found(SIGUSR2, diagnosis=told.diagnosis(node="f2")).cause is Cause.SIGNALLED


def test_but_not_when_the_agent_that_asks_was_warned_as_well(told: Told) -> None:
    JobRecords(told.run_dir, "1").publish_notice(0, {"signals": ["SIGUSR2"]})
    diagnosis = told.diagnosis(node="f2")
    told.signal(SIGUSR2)
    diagnosis.check()
    assert not select.select([diagnosis.fd], [], [], 1.0)[0]
    assert told.asked() == 0


def test_what_a_person_wants_is_written_down(told: Told) -> None:
    diagnosis = told.diagnosis()
    diagnosis.note_request(LeaveReason.REQUEUED, None)
    diagnosis.close()
    assert told.causes()[-1] is Cause.REQUEUE_WANTED
    assert diagnosis.next_finding() is None


def test_outside_of_slurm_nobody_is_asked(told: Told) -> None:
    diagnosis = SignalDiagnosis(
        told.notices, told.run_dir, None, "localhost/0.0/1", SignalDefaults(), lambda: None, lambda: None
    )
    told.signal(SIGINT)
    assert diagnosis.check() == Diagnosis(Cause.SIGNALLED, None, "SIGINT")
    diagnosis.close()
    assert diagnosis.next_finding() is None


# Which agent asks.


def member(node: str) -> SlurmJob:
    return slurm_job("n[1-4]", SLURMD_NODENAME=node)


def formed(run_dir: RunDir, number: int, *agents: str) -> None:
    run_dir.claim_record({"places": [{"agent": agent} for agent in agents]}, "rounds", number)


def test_the_agent_of_the_first_node_asks_before_there_is_a_round(run_dir: RunDir) -> None:
    assert asks_slurm(run_dir, member("n1"), "n1/7.0/10")
    assert not asks_slurm(run_dir, member("n2"), "n2/7.0/20")


def test_without_the_first_node_the_first_in_the_newest_round_asks(run_dir: RunDir) -> None:
    formed(run_dir, 0, "n1/7.0/10", "n2/7.0/20", "n3/7.0/30")
    assert not asks_slurm(run_dir, member("n2"), "n2/7.0/20")
    formed(run_dir, 1, "n2/7.0/20", "n3/7.0/30")
    assert asks_slurm(run_dir, member("n2"), "n2/7.0/20")
    assert not asks_slurm(run_dir, member("n3"), "n3/7.0/30")


def test_agents_of_other_jobs_and_incarnations_do_not_count(run_dir: RunDir) -> None:
    formed(run_dir, 0, "n1/6.0/10", "n2/7.1/20", "n3/7.0/30")
    assert asks_slurm(run_dir, member("n3"), "n3/7.0/30")
    assert not asks_slurm(run_dir, member("n2"), "n2/7.0/21")


# What causes are to the other agents.


def test_what_happens_to_a_job_happens_to_all_its_agents_and_every_cause_is_a_reason(told: Told) -> None:
    assert LEAVE_REASONS.keys() == {*Cause}
    told.shows("job_running.txt")
    diagnosis = told.diagnosis()
    told.found(SIGTERM, diagnosis=diagnosis)
    of_one_agent = {Cause.SIGNALLED, Cause.DRAINED, Cause.UNKNOWN}
    assert {cause for cause in Cause if not diagnosis.tells_job(cause)} == of_one_agent
