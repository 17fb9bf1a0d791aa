from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.local.agents import Allocation, allocation


@pytest.fixture
def allocate(tmp_path: Path) -> Iterator[Callable[..., Allocation]]:
    """Make an allocation of so many nodes in a directory of its own."""
    with ExitStack() as stack:

        def make(size: int, **options: Any) -> Allocation:
            return stack.enter_context(allocation(tmp_path, size, **options))

        yield make
