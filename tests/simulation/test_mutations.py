"""The simulation finds mistakes: each of them breaks the promise that it should break."""

from __future__ import annotations

import pytest

from tests.simulation import mutation_table
from tests.simulation.mutations import MUTATIONS

MOST = 8000
"""Schedules among which a mistake has to be found. Most are found among the first hundred."""


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_found(name: str) -> None:
    mutation = MUTATIONS[name]
    for number, violation in enumerate(mutation.violations(MOST)):
        if violation is not None:
            assert "crashes" not in violation.promise, violation
            if violation.promise in mutation.promises:
                print(f"{mutation.what}: found by schedule {number}: {violation}")
                return
    pytest.fail(f"{mutation.what}: not found in {MOST} schedules")


def test_the_table_in_the_docs_has_every_mistake() -> None:
    page = mutation_table.PAGE.read_text()
    missing = [each.what for each in MUTATIONS.values() if f"| {each.what} |" not in page]
    assert not missing, f"{missing}: python3 -m tests.simulation --mutations writes the table"
