from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.observe.runs import WrittenRun


@pytest.fixture
def run(tmp_path: Path) -> WrittenRun:
    return WrittenRun(tmp_path)
