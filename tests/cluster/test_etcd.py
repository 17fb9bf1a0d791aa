"""Runs whose records are in an etcd outside of the job."""

from __future__ import annotations

import json
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.cluster.jobs import CHECKOUT, Job, Jobs, on
from tests.cluster.testbed import network
from tests.cluster.testbed.settings import CONTROLLER

CREDENTIALS = "SLURM_ELASTIC_ETCD_CREDENTIALS"
_HANG = 60.0
"""Seconds for whatever the members are told."""


class Members:
    """Three etcd members on the controller's machine."""

    def __init__(self, jobs: Jobs) -> None:
        settings = jobs.cluster.settings
        self.directory = jobs.directory / "etcd"
        self.directory.mkdir(mode=0o700)
        self._process = subprocess.Popen(
            [
                *("nsenter", f"--net={network.NAMESPACES / settings.namespace(CONTROLLER)}", "--"),
                *(sys.executable, "-m", "tests.cluster.etcd_members"),
                *(settings.address(CONTROLLER), str(self.directory)),
            ],
            cwd=CHECKOUT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._expect("ready")
        self.credentials = self.directory / "credentials.json"
        self.password = json.loads(self.credentials.read_text())["password"]
        # The members run as root; the files that the job needs are its user's.
        for path in (self.directory, *self.directory.glob("*.pem"), self.credentials):
            shutil.chown(path, "elastic", "elastic")

    def kill(self, *numbers: int) -> None:
        for number in numbers:
            self._order(f"kill {number}")

    def settle(self) -> None:
        """Wait until those that are left have a leader."""
        self._order("settle")

    def start(self) -> None:
        """Those that are down."""
        self._order("start")

    def close(self) -> None:
        try:
            self._process.communicate(timeout=_HANG)
        finally:
            self._process.kill()

    def _order(self, command: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        self._expect("done")

    def _expect(self, word: str) -> None:
        assert self._process.stdout
        answers, _, _ = select.select([self._process.stdout], [], [], _HANG)
        assert answers, f"the members of etcd do not say {word} within {_HANG} s"
        said = self._process.stdout.readline()
        assert said == f"{word}\n", f"the members of etcd have ended with {self._process.wait()}"


@pytest.fixture
def members(jobs: Jobs) -> Iterator[Members]:
    made = Members(jobs)
    yield made
    made.close()


def wait_for_more_steps(job: Job, number: int) -> None:
    """Wait until the newest step of all is so many later."""

    def newest() -> int:
        return max(entry["step"] for entry in job.steps())

    wanted = newest() + number
    job.wait_until("the training does not go on", lambda: newest() >= wanted)


def test_nodes_and_members_of_etcd_are_killed_in_turn(jobs: Jobs, members: Members) -> None:
    job = jobs.submit("--nodes=3", "elastic.sbatch", "train.py", environ={CREDENTIALS: str(members.credentials)})
    job.wait_for_steps(0, ["n1", "n2", "n3"])

    members.kill(0)
    wait_for_more_steps(job, 20)
    members.kill(1, 2)
    wait_for_more_steps(job, 20)
    assert len(job.rounds()) == 1
    assert len([line for line in job.lines if "etcd" in line]) <= 3, "one for each member at most"

    jobs.cluster.kill("n3")
    job.wait_until("the lost node is not noticed", lambda: bool(job.events("node_lost")))
    assert len(job.rounds()) == 1
    members.start()
    job.wait_for_steps(1, ["n1", "n2"])

    # Agents that last spoke with the member that is gone come no later than the others.
    members.kill(1)
    members.settle()
    jobs.cluster.kill("n1")
    job.wait_for_steps(2, ["n2"])
    assert job.rounds()[-1]["epoch"] > job.rounds()[0]["epoch"]
    job.say_enough()
    # The batch script went with the first node.
    job.wait_for("CANCELLED")
    assert json.loads((job.run_dir / "done.json").read_text())["outcome"] == "succeeded"
    assert members.password not in job.output


def test_an_etcd_of_its_own_ends_with_the_run(jobs: Jobs) -> None:
    jobs.place(CHECKOUT / "sbatch_templates/etcd.sbatch")
    etcd = jobs.submit(*on("n4"), "etcd.sbatch", *on("n1"), "elastic.sbatch", "train.py")
    directory = jobs.directory / "elastic-etcd" / str(etcd.id)
    submitted = re.compile(r"Submitted batch job (\d+)")
    etcd.wait_until("the run is not submitted", lambda: submitted.search(etcd.output) is not None)
    found = json.loads((directory / "credentials.json").read_text())
    assert (directory / "credentials.json").stat().st_mode & 0o777 == 0o600
    run = Job(jobs.cluster, jobs.directory, int(submitted.search(etcd.output).group(1)))
    run.wait_for_steps(0, ["n1"])
    assert found["password"] not in etcd.output + run.output
    run.finish()
    etcd.wait_for("COMPLETED")
    assert etcd.exit_code() == 0
    assert not (directory / "credentials.json").exists()
