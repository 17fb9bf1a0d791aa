"""One element of an array is preempted: the others train on, and it comes back."""

from __future__ import annotations

from tests.cluster.jobs import CHECKOUT

ALL = ["n1", "n2", "n3", "n4"]


def test_a_preempted_element_costs_no_step_and_joins_again(jobs):
    jobs.place(CHECKOUT / "sbatch_templates/array.sbatch")
    job = jobs.submit("--array=0-3", "--time=0", "array.sbatch", "--nnodes=3:4", "train.py", "--asks")
    wait_until = jobs.cluster.wait_until
    wait_until("no training", lambda: len(job.rounds()) > 0 and job.trained_on(len(job.rounds()) - 1) == ALL)
    first = len(job.rounds()) - 1
    victim = next(node for node in reversed(ALL) if node != job.leader())
    others = [node for node in ALL if node != victim]

    high = jobs.take(victim)
    wait_until("the others do not go on", lambda: job.trained_on(first + 1) == others)
    high.cancel()
    wait_until("it does not come back", lambda: job.trained_on(first + 2) == ALL)

    job.say_enough()
    jobs.wait_until_all_ended()
    steps = [{e["step"] for e in job.steps(number)} for number in range(first, first + 3)]
    assert min(steps[1]) == max(steps[0]) + 1
    assert min(steps[2]) == max(steps[1]) + 1
    assert {round_["restarts"] for round_ in job.rounds()} == {0}
    assert {state for state, _ in jobs.elements(job)} == {"COMPLETED"}
