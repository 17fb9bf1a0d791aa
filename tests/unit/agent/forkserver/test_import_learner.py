"""What is tried after an attempt that has failed."""

from __future__ import annotations

from slurm_elastic.agent.forkserver._import_learner import Attempt, ImportLearner

TOGETHER = Attempt(("a", "b"))


def test_modules_that_do_harm_together_are_tried_one_by_one() -> None:
    learner = ImportLearner(None, [], [], [])
    assert learner.attempt_after(TOGETHER, "starts a thread") == Attempt(("a", "b"), apart=True)


def test_nothing_is_tried_after_that() -> None:
    learner = ImportLearner(None, [], [], [])
    assert learner.attempt_after(Attempt(("a", "b"), apart=True), "starts a thread") is None
    assert learner.message_fields()["notes"] == [
        "each worker imports the rest itself, as workers cannot share it: starts a thread"
    ]
