"""The simulation finds mistakes: each of them breaks the promise that it should break."""

from __future__ import annotations

import pytest

from tests.simulation import mutation_table
from tests.simulation.snapshot_mutations import MUTATIONS

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


def test_the_table_in_the_docs_has_a_row_for_each_mistake_and_no_other() -> None:
    assert mutation_table.in_docs() == {*MUTATIONS}
