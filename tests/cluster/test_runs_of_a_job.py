"""One srun is one run: several programs in a job, an array of them, and each found again after a requeue."""

from __future__ import annotations

import re

from tests.cluster.jobs import SRUN, Job, Jobs, on

SAYS = """\
import os, sys, time
from pathlib import Path
from slurm_elastic import trainer

word, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
path = Path(f"{word}.step")
step = int(path.read_text()) if path.exists() else 0
names = ("SLURM_ELASTIC_RUN_ID", "WORLD_SIZE", "SLURM_RESTART_COUNT", "SLURM_STEP_ID", "SLURM_ARRAY_TASK_ID")
if os.environ["RANK"] == "0":
    with open("said", "a") as file:
        print(word, *(os.environ.get(name, "-") for name in names), step, file=file)
while step < steps and not Path("enough").exists():
    step += 1
    stop = trainer.should_stop(step)
    if os.environ["RANK"] == "0":
        path.write_text(str(step))
    if stop:
        break
    time.sleep(0.05)
"""
"""A training of so many steps, which goes on where it was, and says of which run it is."""

AGENT = "--ntasks-per-node=1 slurm-elastic agent says.py"


def said(jobs: Jobs) -> list[list[str]]:
    """The words of each start of a training: word, run, world, restarts, step, element, first step."""
    path = jobs.directory / "said"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def submit(jobs: Jobs, text: str, *options: str) -> Job:
    jobs.write("says.py", SAYS)
    jobs.write("job.sh", f"#!/bin/bash\n{text}")
    return jobs.submit(*options, "job.sh")


def test_programs_one_after_the_other_and_beside_each_other(jobs):
    job = submit(
        jobs,
        f"srun -N1 -n1 {AGENT} first || exit\n"
        f"srun -N1 -n1 {AGENT} second || exit\n"
        # A retry with the same arguments is a new run, too.
        f"srun -N1 -n1 {AGENT} second || exit\n"
        f"for word in a b; do srun --overlap -N1 -n1 {AGENT} $word 20 & done; wait\n",
        *on("n1"),
        "--exclusive",
    )

    job.wait_for("COMPLETED", timeout=120)
    words = said(jobs)
    assert [line[:3] for line in words[:3]] == [
        ["first", f"{job.id}", "1"],
        ["second", f"{job.id}.1", "1"],
        ["second", f"{job.id}.2", "1"],
    ]
    assert sorted(line[0] for line in words[3:]) == ["a", "b"]
    assert sorted(line[1] for line in words[3:]) == [f"{job.id}.3", f"{job.id}.4"]
    assert all(line[1] == f"{job.id}.{line[4]}" for line in words[1:])
    done = [path.parent.name for path in jobs.directory.glob("elastic-runs/*/done.json")]
    assert sorted(done) == sorted({line[1] for line in words})


def test_elements_of_an_array_are_runs_of_their_own_unless_the_template_is_that_of_an_array(jobs):
    jobs.write("says.py", SAYS)
    job = jobs.submit("--array=0-1", "-N1", "elastic.sbatch", "says.py", "sweep")
    jobs.wait_until_all_ended()

    assert {state for state, _ in jobs.elements(job)} == {"COMPLETED"}
    assert sorted(line[1:3] + line[5:6] for line in said(jobs)) == [
        [f"{job.id}_{element}", "1", str(element)] for element in range(2)
    ]

    mixed = jobs.submit(
        "--array=0", "-N1", "--output=%x-%A_%a.out", "elastic.sbatch", "--run-id=mixed", "says.py", "sweep"
    )
    jobs.wait_until_all_ended()
    assert {state for state, _ in jobs.elements(mixed)} == {"FAILED"}
    refused = "slurm-elastic: error: --run-id mixed makes one run of all elements of this array, "
    assert mixed.output.count(refused) == 1
    assert not (jobs.directory / "elastic-runs/mixed").exists()


def test_runs_find_themselves_again_after_a_requeue(jobs):
    # After the requeue the steps have other numbers.
    job = submit(
        jobs,
        "#SBATCH --requeue --open-mode=append\n"
        "export SLURM_ELASTIC_VERDICT=1\n"
        f"add() {{ {SRUN} -N1 -n1 -w $1 slurm-elastic agent says.py $2 $3 & }}\n"
        'if [ -z "$SLURM_RESTART_COUNT" ]\n'
        "then add n1 a 100000; sleep 2; add n2 b 100000\n"
        "else add n2 b 100000; sleep 2; add n1 a 100000; fi\n"
        "wait; slurm-elastic job-end $?\n",
        *on("n1", "n2"),
        "--exclusive",
    )
    job.wait_until("no training", lambda: len(said(jobs)) == 2)
    jobs.cluster.wait_until("no steps", lambda: all((jobs.directory / f"{word}.step").exists() for word in "ab"))

    jobs.cluster.command(["scontrol", "requeue", str(job.id)])
    jobs.cluster.wait_until("it does not train again", lambda: len(said(jobs)) == 4, 120)
    job.finish()

    runs = said(jobs)
    found = {(word, restarts): (run, step) for word, run, _, restarts, step, *_ in runs}
    assert found == {
        ("a", "-"): (f"{job.id}", "0"),
        ("b", "-"): (f"{job.id}.1", "1"),
        ("a", "1"): (f"{job.id}", "1"),
        ("b", "1"): (f"{job.id}.1", "0"),
    }
    assert all(int(line[6]) > 0 for line in runs[2:]), "they go on where they were"


def test_agents_of_one_run_with_other_arguments_are_refused(jobs):
    job = submit(
        jobs,
        "srun -N1 -n1 -w n1 slurm-elastic agent --run-id=mine says.py left 100000 &\n"
        "until [ -e left.step ]; do sleep 0.2; done\n"
        "srun -N1 -n1 -w n2 slurm-elastic agent --run-id=mine says.py right 100000; echo code $?\n"
        "touch enough; wait\n"
        # A finished run of another job is not a success.
        "srun -N1 -n1 slurm-elastic agent --run-id=mine says.py left 100000; echo again $?\n",
        *on("n1", "n2"),
        "--exclusive",
    )
    job.wait_for("COMPLETED")
    assert "code 2" in job.lines
    refused = (
        r"slurm-elastic: error: run mine is 'says\.py left 100000', and this agent has 'says\.py right 100000': .*"
    )
    assert re.search(f"^{refused}--run-id$", job.output, re.MULTILINE)
    # This job has been in the run.
    assert "again 0" in job.lines

    late = submit(jobs, "srun -n1 slurm-elastic agent --run-id=mine says.py left 100000; exit $?\n", "-N1")
    late.wait_for("FAILED")
    assert late.exit_code() == 2
    assert "run mine is finished, and this agent has no part in it: nothing is trained; " in late.output


def test_the_commands_of_a_job_with_one_run_after_another_step(jobs):
    job = submit(jobs, f"srun -n1 true\nsrun -n1 {AGENT} word\n", "-N1")
    job.wait_for("COMPLETED")
    assert said(jobs)[0][:2] == ["word", f"{job.id}.1"]
    done = jobs.ask("status", job.id, check=False)
    assert (done.returncode, done.stdout.splitlines()[0].split(":")[0]) == (0, f"run {job.id}.1")
