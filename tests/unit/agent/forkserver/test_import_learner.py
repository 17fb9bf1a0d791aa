"""What is tried after an attempt that has failed, and what is kept of another node's list."""

from __future__ import annotations

from pathlib import Path

from slurm_elastic.agent.forkserver._import_learner import Attempt, ImportLearner
from slurm_elastic.agent.forkserver._import_list import EVERYTHING, ImportList, forget_list, read_list

TOGETHER = Attempt(("a", "b"))


def test_modules_that_do_harm_together_are_tried_one_by_one() -> None:
    learner = ImportLearner(None, [], [], [])
    assert learner.tries_again(TOGETHER, "starts a thread")
    assert learner.next_attempt() == Attempt(("a", "b"), apart=True)


def test_nothing_is_tried_after_that() -> None:
    learner = ImportLearner(None, [], [], [])
    assert not learner.tries_again(Attempt(("a", "b"), apart=True), "starts a thread")
    assert learner.next_attempt() is None
    assert learner.message_fields()["notes"] == [
        "each worker imports the rest itself, as workers cannot share it: starts a thread"
    ]


def test_a_node_does_not_learn_again_what_another_one_has_given_up(tmp_path: Path) -> None:
    learner = ImportLearner(str(tmp_path / "lists"), ["-u", str(tmp_path / "train.py")], [], [])
    assert not learner.begin()
    path = learner.message_fields()["list"]
    learner.imports = ImportList(("plain",))
    learner._keep()
    forget_list(path, "a worker has died")
    learner._keep()
    assert read_list(path) == ImportList(("plain",), {EVERYTHING: "a worker has died"})
