"""What is imported after an attempt that failed."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

import pytest

from slurm_elastic.agent.forkserver._import_learner import ImportLearner, Outcome
from slurm_elastic.agent.forkserver._import_plan import ImportPlan, ImportStep
from slurm_elastic.agent.forkserver._import_recorder import ImportRecord


def attempts(learner: ImportLearner, plan: ImportPlan | None, harmful: Container[str]) -> list[ImportPlan]:
    """The plans that are tried until one does no harm, or none is left to try."""
    tried: list[ImportPlan] = []
    while plan is not None:
        tried.append(plan)
        harm = any(step.module in harmful for step in plan.steps)
        if not harm and not learner.is_searching:
            break
        outcome = Outcome(plan, complete=not harm, probe="it does harm" if harm else "")
        plan = learner.next_attempt(plan, outcome, 0)
    return tried


def test_one_harmful_module_of_a_thousand_is_found_and_the_others_are_imported() -> None:
    plan = ImportPlan(tuple(ImportStep(f"module_{number}") for number in range(1000)))
    tried = attempts(ImportLearner(None, [], [], []), plan, {"module_700"})
    assert len(tried[-1].steps) == 999
    assert tried[-1].left_out == {"module_700": "it does harm"}
    assert len(tried) <= 12


def test_attempts_end_where_module_after_module_does_harm() -> None:
    names = [f"module_{number}" for number in range(40)]
    learner = ImportLearner(None, [], [], [])
    tried = attempts(learner, ImportPlan(tuple(map(ImportStep, names))), set(names))
    assert len(tried) < 100
    assert learner.message_fields()["notes"] == [
        "each worker imports everything anew: more than 16 modules cannot be shared;"
        " --learn-imports off ends the attempts"
    ]


@pytest.mark.parametrize(
    ("plan", "changes"),
    [
        (ImportPlan((ImportStep("json"), ImportStep("os"))), False),
        (ImportPlan((ImportStep("json"), ImportStep("not_imported"))), True),
        (ImportPlan((ImportStep("json"),), {"other": "some workers import it"}), True),
    ],
)
def test_a_replacement_is_worth_it_only_if_it_would_differ(plan: ImportPlan, changes: bool) -> None:
    assert ImportLearner(None, [], [], []).would_change(plan) is changes


def test_a_file_of_the_script_that_is_not_known_is_worth_a_replacement(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("import os\nos.environ['A'] = 'B'\n")
    learner, record = ImportLearner(None, [], [], []), ImportRecord()
    record.append(f"O {own}")
    learner.add(1, record)
    learner.make_plan()
    assert learner.would_change(ImportPlan((ImportStep("json"),)))
    learner.keep_plan(ImportPlan((ImportStep("json"),)))
    assert not learner.would_change(ImportPlan((ImportStep("json"),)))
