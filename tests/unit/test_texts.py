"""The machines against the texts in testdata, which say what they decide; see docs/testing.md."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.texts import election, lifecycle, membership
from tests.unit.texts.cases import FOLDER, cases, played

MACHINES = {"membership": membership.Leader, "election": election.start, "lifecycle": lifecycle.Agent}
CASES = [(path, number) for path in sorted(FOLDER.glob("*/*.txt")) for number in range(len(cases(path)))]


@pytest.mark.parametrize(
    ("path", "number"), CASES, ids=lambda part: f"{part.parent.name}/{part.stem}" if isinstance(part, Path) else None
)
def test_what_is_decided_is_what_the_text_says(path: Path, number: int) -> None:
    expected = cases(path)[number]
    found = played(expected, MACHINES[path.parent.name])
    if "WRITE_GOLDENS" in os.environ:
        path.write_text(path.read_text().replace(expected, found))
    else:
        assert found.splitlines() == expected.splitlines(), path
