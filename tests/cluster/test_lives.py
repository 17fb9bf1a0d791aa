"""What a person reads in the output of a job in ten lives, compared with texts that were reviewed.

The texts are in tests/goldens/lives, without the lines of the script, and with N for numbers that differ from run to
run. WRITE_GOLDENS=1 writes them anew; then they are to be read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest

from tests.cluster.jobs import CHECKOUT, Job, Jobs, on

pytestmark = pytest.mark.nightly

GOLDENS = CHECKOUT / "tests/goldens/lives"
ALL = ("n1", "n2", "n3")
DIGITS = ("digits.py", "--step-time=0.03", "--checkpoint-every=20")
FOREVER = (*DIGITS, "--epochs=1000")
OF_THE_SCRIPT = re.compile(r"\[n\d/0\] (fresh start|resumed at|epoch |saved step|finished after)")
OF_SLURM = re.compile(r"srun: |slurmstepd")
NUMBERS = {
    r"^\d\d:\d\d:\d\d": "TIME",
    r"AT \d\d\d\d-\d\d-\d\dT\d\d:\d\d:\d\d": "AT TIME",
    r"\b\d+(\.\d+)? s\b": "N s",
    r"\b\d+ steps?\b": "N steps",
    r"\bstep \d+": "step N",
    r"\bgoodput \d+": "goodput N",
    r"\b(run|job|JOB|STEP|report|logs) \d+(\.\d+)?": r"\1 ID",
    r"elastic-runs/\d+": "elastic-runs/ID",
    r"\S+/site-packages/": "",
    r", line \d+": ", line N",
    r"rank \d on n\d (ended|failed)": r"rank R on NODE \1",
    r"n\d/rank_\d\d/(stderr|stacks)": r"NODE/rank_R/\1",
    r"n3 lost \([^)]*\)": "n3 lost (WHY)",
}
"""What differs from run to run."""
FAILS = """
import digits, sys

def publish(*arguments, **options):
    raise ValueError("no space left in the quota of elastic")

digits.save_checkpoint = publish
digits.main()
"""
HANGS = """
import digits, os, time

if os.environ["SLURM_ELASTIC_ROUND"] == "0" and os.environ["RANK"] == "1":
    digits.save_checkpoint = lambda *arguments, **options: time.sleep(3600)
digits.main()
"""


def trains(job: Job, *, rounds: int = 1) -> None:
    job.wait_until("no round", lambda: len(job.tables()) >= rounds, 90)
    said = job.output.count("] epoch ")
    job.wait_until("no epoch", lambda: job.output.count("] epoch ") > said, 90)


def start(jobs: Jobs, *words: str, options: tuple[str, ...] = ()) -> Job:
    return jobs.submit("--time=10", *on(*ALL), *options, "elastic.sbatch", *words)


def finished(jobs: Jobs) -> Job:
    job = start(jobs, *DIGITS, "--epochs=3")
    job.wait_for("COMPLETED", timeout=90)
    return job


def killed(jobs: Jobs) -> Job:
    # Slurm misses the node before the end.
    job = start(jobs, *DIGITS, "--epochs=16")
    trains(job)
    jobs.cluster.kill("n3")
    job.wait_for("COMPLETED", timeout=90)
    return job


def drained(jobs: Jobs) -> Job:
    job = start(jobs, *DIGITS, "--epochs=5")
    trains(job)
    jobs.ask("drain", job.id, "n3", "--wait")
    job.wait_for("COMPLETED", timeout=90)
    return job


def preempted(jobs: Jobs) -> Job:
    job = start(jobs, *DIGITS, "--epochs=8")
    trains(job)
    taker = jobs.take("n3")
    job.wait_until("it is not preempted", lambda: jobs.cluster.job(job.id)["Restarts"] == "1", 60)
    taker.cancel()
    job.wait_for("COMPLETED", timeout=120)
    return job


def requeued(jobs: Jobs) -> Job:
    job = start(jobs, *DIGITS, "--epochs=8")
    trains(job)
    jobs.ask("requeue", job.id)
    job.wait_until("it is not requeued", lambda: jobs.cluster.job(job.id)["Restarts"] == "1", 60)
    job.wait_for("COMPLETED", timeout=120)
    return job


def cancelled(jobs: Jobs) -> Job:
    job = start(jobs, *FOREVER)
    trains(job)
    job.cancel()
    job.wait_for("CANCELLED", timeout=60)
    return job


def failed(jobs: Jobs) -> Job:
    jobs.write("fails.py", FAILS)
    job = start(jobs, "fails.py", *FOREVER[1:])
    job.wait_for("FAILED", timeout=90)
    return job


def hung(jobs: Jobs) -> Job:
    jobs.write("hangs.py", HANGS)
    job = start(jobs, "--max-restarts=1", "--hang-timeout=5", "hangs.py", *DIGITS[1:], "--epochs=4")
    job.wait_for("COMPLETED", timeout=120)
    return job


def limited(jobs: Jobs) -> Job:
    job = start(jobs, *FOREVER, options=("--time=1",))
    job.wait_until("it does not reach its limit", lambda: jobs.cluster.job(job.id)["Restarts"] == "1", 120)
    trains(job, rounds=2)
    jobs.cluster.cancel_all()
    return job


def grown(jobs: Jobs) -> Job:
    job = start(jobs, *DIGITS, "--epochs=12")
    trains(job)
    job.wait_until("how it was started is not kept", (job.run_dir / "command.json").exists)
    jobs.ask("grow", job.id, "--nodes=1")
    job.wait_for("COMPLETED", timeout=120)
    return job


LIVES: dict[str, Callable[[Jobs], Job]] = {
    life.__name__: life
    for life in (finished, killed, drained, preempted, requeued, cancelled, failed, hung, limited, grown)
}


def lines(job: Job) -> list[str]:
    """The lines that are not the script's own; at the end those of srun and slurmd, which come when they come."""
    found = []
    for line in filter(str.strip, job.lines):
        text = line.replace(str(job.directory), "DIRECTORY")
        for pattern, by in NUMBERS.items():
            text = re.sub(pattern, by, text)
        if not OF_THE_SCRIPT.match(line):
            found.append(text)
    slurms = sorted(text for text in found if OF_SLURM.match(text))
    return [*(text for text in found if not OF_SLURM.match(text)), "", *slurms]


@pytest.mark.parametrize("name", LIVES)
def test_a_life_is_told_as_it_was_reviewed(jobs, name):
    del jobs.environ["PET_CONSOLE"]
    jobs.place(CHECKOUT / "docs/examples/digits.py")
    job = LIVES[name](jobs)
    jobs.wait_until_all_ended()
    told = "".join(f"{line}\n" for line in lines(job))
    golden = GOLDENS / f"{name}.txt"
    if "WRITE_GOLDENS" in os.environ:
        GOLDENS.mkdir(exist_ok=True)
        golden.write_text(told)
    assert told == golden.read_text(), job.output
