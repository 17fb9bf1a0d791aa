"""Jobs that Slurm ends: announced, saved, requeued once, gone on with."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.cluster.jobs import SRUN, Job, Jobs, on
from tests.cluster.testbed import Cluster

BOTH = ["n1", "n2"]


def comes_back(job: Job, timeout: float = 60.0) -> list[str]:
    """Wait until the job trains again, and return its nodes."""
    job.wait_until("it does not train again", lambda: len(job.trained_on(1)) > 0, timeout)
    nodes = job.nodes()
    job.wait_for_steps(1, nodes)
    return nodes


def assert_no_step_is_lost(job: Job, round_number: int = 0) -> None:
    """Every rank ended this round at one step, and the next round began with the next one."""
    before, after = (
        [[e["step"] for e in steps if e["rank"] == rank] for rank in {e["rank"] for e in steps}]
        for steps in (job.steps(round_number), job.steps(round_number + 1))
    )
    last, first = {max(steps) for steps in before}, {min(steps) for steps in after}
    assert len(last) == 1
    assert first == {last.pop() + 1}


@pytest.fixture
def preempt_mode(cluster: Cluster, proctrack: str) -> Iterator[str]:
    """What Slurm does with preempted jobs: it requeues them, or, where the process tracking is harsh, cancels them."""
    mode = "REQUEUE" if proctrack == "cgroup" else "CANCEL"
    cluster.command(["scontrol", "update", "PartitionName=low", f"PreemptMode={mode}"], user="root")
    yield mode
    cluster.command(["scontrol", "update", "PartitionName=low", "PreemptMode=REQUEUE"], user="root")


HET = f"""\
#!/bin/bash
#SBATCH --requeue --open-mode=append
{SRUN} --het-group=0,1 --nodes=1 --ntasks=1 slurm-elastic agent train.py --asks --stop-file=told
"""
"""One run on both components of a heterogeneous job."""

NO_LIMIT = {"UNLIMITED", "365-00:00:00"}
"""TimeLimit of a job without one: a year if the backfill scheduler starts it in a partition without MaxTime (22.05)."""


@pytest.fixture
def kept_and_open(cluster: Cluster) -> Iterator[None]:
    """A reservation of n1, `kept`, and a partition without any limit of time, `open`."""
    open_ = ("PartitionName=open", "Nodes=ALL", "PriorityTier=1", "PreemptMode=REQUEUE", "GraceTime=15")
    kept = ("ReservationName=kept", "StartTime=now", "Duration=UNLIMITED", "Users=elastic", "Nodes=n1")
    cluster.command(["scontrol", "create", *open_], user="root")
    cluster.command(["scontrol", "create", *kept], user="root")
    yield
    cluster.cancel_all()
    cluster.command(["scontrol", "delete", "PartitionName=open"], user="root")
    cluster.command(["scontrol", "delete", "ReservationName=kept"], user="root")


def submit_apart(jobs: Jobs, name: str, *argv: str) -> Job:
    """Submit a job in a directory of its own."""
    directory = jobs.directory / name
    jobs.cluster.command(["mkdir", str(directory)])
    for file in ("train.py", "elastic.sbatch"):
        (directory / file).symlink_to(jobs.directory / file)
    return jobs.submit(*argv, cwd=directory)


def test_a_preemption_by_partition_costs_no_kind_of_job_a_step(jobs, kept_and_open):
    jobs.write("het.sh", HET)
    alone = ("elastic.sbatch", "train.py", "--alone", "--asks", "--stop-file=told")
    half = ("--nodes=1", "--exclusive", "--time=0")
    kinds = [
        submit_apart(jobs, "array", "--reservation=kept", "--partition=open", "--array=0", *alone),
        submit_apart(jobs, "het", *half, "--nodelist=n3", ":", *half, "--nodelist=n4", "../het.sh"),
    ]
    for job, nodes in zip(kinds, (1, 2), strict=True):
        job.wait_until("no training", lambda job=job, nodes=nodes: len(job.trained_on(0)) == nodes)
    assert {jobs.cluster.job(job.id)["TimeLimit"] for job in kinds} <= NO_LIMIT

    takers = [jobs.take("n1", None, "--reservation=kept"), jobs.take("n[3-4]", None, "--nodes=2")]

    told = re.compile(r"n\d leaves: preempted, \d+ s left \(grace of 15 s\)")
    for job in kinds:
        job.wait_until("it is not told how long is left", lambda job=job: told.search(job.output) is not None)
    for job in kinds:
        (job.directory / "told").touch()
    for job in kinds:
        job.wait_until("it is not requeued", lambda job=job: "requeued: preempted" in job.output)
    for taker in takers:
        taker.cancel()
    for job in kinds:
        job.wait_until("it does not train again", lambda job=job: job.trained_on(1) == job.trained_on(0))
        assert job.output.count("requeued: preempted") == 1
        assert "DUE TO PREEMPTION" not in job.output
        assert {e["stop"] for e in job.diary() if "stop" in e} == {"preempted"}
        assert_no_step_is_lost(job)
        job.say_enough()
        jobs.cluster.wait_until("it does not end well", lambda job=job: job.state() == "COMPLETED")


@pytest.mark.proctrack("cgroup", nightly="linuxproc")
def test_a_preempted_allocation_saves_and_comes_back_smaller(jobs, proctrack, preempt_mode, release):
    # Of a job without a time limit Slurm does not tell when the grace ends. 26.05 may start it again at once.
    options = ["--nodes=1-2", "--exclude=n3,n4", "--time=0", *(["--requeue=expedite"] if release == "26.05" else [])]
    job = jobs.submit(*options, "elastic.sbatch", "train.py", "--asks")
    after = jobs.submit(f"--dependency=afterok:{job.id}", "--wrap=true")
    job.wait_for_steps(0, BOTH)

    high = jobs.take("n2")

    assert comes_back(job) == ["n1"]
    assert re.search(r"n1 leaves: preempted, \d+ s left \(grace of 15 s\)", job.output)
    assert job.output.count("requeued: preempted") == 1
    # Long before the grace was over, so that the other job could begin.
    assert "DUE TO PREEMPTION" not in job.output
    assert {round_["reason"] for round_ in job.rounds()[1:]} == {"requeued"}
    assert {e["stop"] for e in job.diary() if "stop" in e} == {"preempted"}
    assert_no_step_is_lost(job)
    high.cancel()
    job.say_enough()
    # Slurm 24.11 takes its success for the end of another preemption, because it was preempted once. Where it requeues,
    # the job runs once more, which ends at once.
    end = "PREEMPTED" if (release, preempt_mode) == ("24.11", "CANCEL") else "COMPLETED"
    jobs.cluster.wait_until("it does not end well", lambda: job.state() == end)
    assert job.exit_code() == 0
    assert (job.run_dir / "done.json").exists()
    assert len(job.rounds()) == 2
    if end == "COMPLETED":
        after.wait_for("COMPLETED")
    else:
        # No success to Slurm.
        jobs.cluster.wait_until("it waits", lambda: "Never" in jobs.cluster.job(after.id)["Reason"])
        after.cancel()


def test_a_preempted_job_that_may_not_be_requeued_says_how_to_go_on_and_ends_as_its_agents_do(jobs, release):
    job = jobs.submit("--nodes=1", "--no-requeue", "elastic.sbatch", "train.py", "--alone", "--asks")
    job.wait_until("no training", lambda: job.trained_on(0) != [])
    job.wait_until("the grace is unknown", lambda: [*job.run_dir.glob("graces/*.json")] != [])

    high = jobs.take(*job.nodes())

    end = "FAILED" if release == "22.05" else "PREEMPTED"
    jobs.cluster.wait_until("it does not end", lambda: job.state() == end)
    high.cancel()
    assert "not requeued (preempted): the job does not allow it; submit it with --requeue" in job.output
    assert re.search(r"srun: error: \w+: task 0: Exited with exit code 75$", job.output, re.MULTILINE)
    # Slurm since 24.05 forgets the exit code of a preempted job.
    assert job.exit_code() == (0 if end == "PREEMPTED" else 75)
    (told,) = [entry for entry in job.diary() if "stop" in entry]
    assert told["stop"] == "preempted"
    # Five of 15 s are the agents'.
    assert told["seconds"] <= 10.0
    assert jobs.cluster.job(job.id)["Restarts"] == "0"


def test_a_job_that_is_cancelled_just_before_its_requeue_stays_so(jobs):
    scontrol = '#!/bin/bash\n[ "$1" != requeue ] || scancel "$SLURM_JOB_ID"\nexec /usr/bin/scontrol "$@"\n'
    jobs.write("scontrol", scontrol).chmod(0o755)
    environ = {"PATH": f"{jobs.directory}:{jobs.environ['PATH']}"}
    job = jobs.submit("--nodes=1", "--requeue", "elastic.sbatch", "train.py", "--alone", "--asks", environ=environ)
    job.wait_until("no training", lambda: job.trained_on(0) != [])

    jobs.ask("requeue", job.id)

    job.wait_for("CANCELLED")
    assert "not requeued: it was cancelled or has ended meanwhile; submit it again to go on" in job.output
    assert jobs.cluster.job(job.id)["Restarts"] == "0"


def test_a_job_without_batch_script_that_may_not_be_requeued_ends_with_its_last_agent(jobs):
    job = jobs.submit("--nodes=2", "--no-requeue", "elastic.sbatch", "train.py", "--alone", "--asks")
    job.wait_until("no training", lambda: len(job.trained_on(0)) == 2)
    first, *others = job.nodes()
    jobs.cluster.kill(first)
    # Slurm would find out by itself, later.
    jobs.cluster.command(["scontrol", "update", f"NodeName={first}", "State=DOWN", "Reason=killed"], user="root")
    job.wait_for_steps(1, others)

    jobs.ask("requeue", job.id)

    # With no agent in it it would go on to its time limit.
    job.wait_for("CANCELLED")


def test_a_controller_that_is_down_when_the_agents_go_requeues_later(jobs):
    job = jobs.submit(*on("n1"), "elastic.sbatch", "train.py", "--alone", "--asks", "--stop-file=controller-is-down")
    job.wait_for_steps(0, ["n1"])

    # A controller that is killed forgets what it has not saved, which it does every five seconds.
    high = jobs.take("n1", None, "--hold", "--job-name=saved-taker")
    saved = jobs.cluster.settings.state / "controller/job_state"
    job.wait_until("not saved", lambda: saved.exists() and b"saved-taker" in saved.read_bytes())
    jobs.cluster.command(["scontrol", "release", str(high.id)])
    job.wait_until("nobody is told", lambda: "leaves: preempted" in job.output)
    jobs.cluster.kill("ctl")
    jobs.write("controller-is-down", "")
    jobs.cluster.wait_until("the agent stays", lambda: job.output.count("ends: left after") == 1)
    jobs.cluster.start("ctl")

    high.cancel()
    assert comes_back(job) == ["n1"]
    assert_no_step_is_lost(job)
    job.say_enough()
    jobs.cluster.wait_until("it does not end well", lambda: job.state() == "COMPLETED")


def test_a_signal_for_the_batch_script_alone_and_a_wish_to_requeue_reach_all_agents(jobs):
    job = jobs.submit("--nodes=2", "elastic.sbatch", "train.py", "--asks")
    job.wait_until("no training", lambda: len(job.trained_on(0)) == 2)

    # As `sbatch --signal=B:USR2@120` does.
    jobs.cluster.command(["scancel", "--batch", "--signal=USR2", str(job.id)])
    nodes = comes_back(job)
    assert_no_step_is_lost(job)
    assert "requeued: signalled" in job.output

    jobs.cluster.command(["scontrol", "hold", str(job.id)])
    said = jobs.ask("requeue", job.id).stdout
    assert said == f"asked to leave and come back: {', '.join(nodes)}\n"
    wanted = "requeued: requeue asked for; it is held, and starts after scontrol release"
    job.wait_until("it does not say so", lambda: wanted in job.output)
    job.wait_for("PENDING")
    assert jobs.cluster.job(job.id)["Restarts"] == "2"
    job.cancel()
