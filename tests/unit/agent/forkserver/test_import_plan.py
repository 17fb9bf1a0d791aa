"""What is imported for later workers, decided from what workers have recorded."""

from __future__ import annotations

import pytest

from slurm_elastic.agent.forkserver._import_plan import (
    Bisection,
    ImportPlan,
    ImportStep,
    from_json,
    merge,
    parse_record,
    plan_imports,
    to_json,
)
from slurm_elastic.agent.forkserver._source_effects import effects, fingerprint


def record(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)


def imported(module: str, line: int = 1, function: str = "<module>") -> str:
    return f"I {module}\t/s/train.py\t{line}\t{function}"


def modules(plan: ImportPlan) -> list[str]:
    return [step.module for step in plan.steps]


def planned(*records: str, source: str = "", known: ImportPlan | None = None) -> ImportPlan:
    workers = [parse_record(text) for text in records]
    return plan_imports(workers, {"/s/train.py": effects(source)}, known or ImportPlan())


def test_modules_are_imported_in_the_order_of_the_script() -> None:
    assert modules(planned(record(imported("b"), imported("a"), imported("b")))) == ["b", "a"]


def test_torn_and_foreign_lines_are_passed_over() -> None:
    assert modules(planned(record(imported("a"), "nonsense", "I half\t/s/tr", ""))) == ["a"]


def test_a_changed_state_goes_with_what_is_imported_after_it() -> None:
    state = '{"environment": {"A": "1"}}'
    plan = planned(record(imported("a"), f"S {state}", imported("b"), "S {}", imported("c")))
    assert plan.steps == (ImportStep("a"), ImportStep("b", state), ImportStep("c"))


def test_workers_have_to_agree_on_the_state() -> None:
    first = record(imported("a"), 'S {"environment": {"D": "0"}}', imported("b"))
    second = record(imported("a"), 'S {"environment": {"D": "1"}}', imported("b"))
    plan = planned(first, second)
    assert modules(plan) == ["a"]
    assert plan.left_out == {"b": "the workers of a node import it under different environments"}


def test_what_some_ranks_import_is_left_out() -> None:
    plan = planned(record(imported("a"), imported("tracker"), imported("b")), record(imported("a"), imported("b")))
    assert modules(plan) == ["a", "b"]
    assert plan.left_out == {"tracker": "some workers import it and others do not"}


def test_what_a_worker_has_not_come_to_waits() -> None:
    plan = planned(record(imported("a"), imported("b"), imported("c")), record(imported("a")))
    assert (modules(plan), plan.left_out) == (["a"], {})


def test_what_was_known_comes_first_and_stays_left_out() -> None:
    known = ImportPlan((ImportStep("k"),), {"bad": "why"})
    plan = planned(record(imported("bad"), imported("new")), known=known)
    assert (modules(plan), plan.left_out) == (["k", "new"], {"bad": "why"})


@pytest.mark.parametrize(
    ("source", "left_out"),
    [
        ("import torch\ntorch.nn.Linear = Mine\nimport later\n", True),
        ("import torch\nimport later\ntorch.nn.Linear = Mine\n", False),
        ("from torch.nn import Linear\nLinear.forward = mine\nimport later\n", True),
        ("import torch\nsetattr(torch, 'x', 1)\nimport later\n", True),
        ("import torch\ntorch.backends.cudnn.benchmark = True\nimport later\n", False),
        ("import os\nos.environ['A'] = '1'\nimport later\n", False),
        ("import os, torch\nclass Mine:\n    def f(self):\n        self.x = 1\nimport later\n", False),
        ("import torch\ndef patch_it():\n    torch.x = 1\npatch_it()\n\nimport later\n", True),
        ("import torch\ndef patch_it():\n    torch.x = 1\n\nimport later\n", False),
        ("from unittest import mock\nmock.patch('torch.x', 1).start()\nimport later\n", True),
        ("this is no Python\n", False),
    ],
)
def test_what_is_imported_after_a_patch_is_left_out(source: str, left_out: bool) -> None:
    line = source.count("\n")
    if "\nimport later\n" in source:
        line = source[: source.index("import later")].count("\n") + 1
    plan = planned(record(imported("later", line)), source=source)
    assert (modules(plan) == []) is left_out
    assert all(reason.startswith("it is imported after /s/train.py:") for reason in plan.left_out.values())


def test_what_is_imported_after_a_seed_must_draw_no_random_numbers() -> None:
    source = "import torch\nimport a\ntorch.manual_seed(3)\nimport b\n"
    plan = planned(record(imported("a", 2), imported("b", 4)), source=source)
    assert plan.steps == (ImportStep("a"), ImportStep("b", '{"seeded": true}'))


def test_fingerprint_is_that_of_effects_alone() -> None:
    def of(source: str) -> str:
        return fingerprint(effects(source)[0])

    assert of("import os\nos.environ['A'] = '1'\nx = 1\n") == of("import os\n\nx = 2\nos.environ['A'] = '1'\n")
    assert of("import os\nos.environ['A'] = '1'\n") != of("import os\nos.environ['A'] = '2'\n")
    assert of("import torch\ntorch.set_default_dtype(torch.float64)\n") != of("import torch\n")


def test_a_plan_survives_as_text() -> None:
    plan = ImportPlan((ImportStep("a", '{"path": ["/x"]}'),), {"b": "why"})
    assert from_json(to_json(plan)) == plan
    for text in ("[]", "{}", '{"steps": [1], "left_out": {}}', "nothing"):
        with pytest.raises(ValueError, match=r"."):
            from_json(text)


def test_what_one_node_leaves_out_all_leave_out() -> None:
    mine = ImportPlan((ImportStep("a"), ImportStep("b")), {})
    theirs = ImportPlan((ImportStep("a"), ImportStep("c")), {"b": "why"})
    assert merge(mine, theirs) == ImportPlan((ImportStep("a"), ImportStep("c")), {"b": "why"})


@pytest.mark.parametrize("culprit", range(7))
def test_bisection_finds_the_module_that_does_harm(culprit: int) -> None:
    plan = ImportPlan(tuple(ImportStep(str(number)) for number in range(7)))
    search: Bisection | ImportPlan = Bisection(plan, "why", fails=7)
    attempts = 0
    while isinstance(search, Bisection):
        attempts += 1
        search = search.after(fails=ImportStep(str(culprit)) in search.attempt().steps)
    assert search.left_out == {str(culprit): "why"}
    assert len(search.steps) == 6
    assert attempts <= 3
