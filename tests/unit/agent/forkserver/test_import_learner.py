"""What is tried after an attempt that has failed."""

from __future__ import annotations

from slurm_elastic.agent.forkserver._import_learner import Attempt, ImportLearner, Outcome

TOGETHER = Attempt(("a", "b"))


def test_modules_that_do_harm_together_are_tried_one_by_one() -> None:
    learner = ImportLearner(None, [], [], [])
    assert learner.attempt_after(TOGETHER, Outcome("starts a thread")) == Attempt(("a", "b"), apart=True)
    # A replacement that was killed has no outcome.
    assert learner.attempt_after(TOGETHER, Outcome.unpacked(b"")) == Attempt(("a", "b"), apart=True)


def test_processes_are_forked_after_each_module_where_those_forked_after_all_do_not_compute() -> None:
    learner, outcome = ImportLearner(None, [], [], []), Outcome.unpacked(Outcome("it hangs", probe=True).packed())
    probing = Attempt(("a", "b"), apart=True, probe=True)
    assert learner.attempt_after(TOGETHER, outcome) == probing
    assert learner.attempt_after(Attempt(("a", "b"), apart=True), outcome) == probing
    assert learner.attempt_after(probing, outcome) is None
    assert learner.message_fields()["notes"] == [
        "each worker imports the rest itself, as workers cannot share it: it hangs"
    ]
