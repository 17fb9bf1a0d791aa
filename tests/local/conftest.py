"""Temporary files, and agents, of the tests on one machine."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.local.agents import Allocation, allocation


@pytest.fixture(scope="session", autouse=True)
def _temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Take away in the end what torchrun leaves there, and what agents leave that are killed."""
    # Not for this process: what it makes is taken away at its own end, which is later.
    tmp_path_factory.getbasetemp()
    # Short: sockets that are files lie in there too, and their paths have at most 107 characters (unix(7)).
    with (
        tempfile.TemporaryDirectory(prefix="elastic-", ignore_cleanup_errors=True) as directory,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", directory)
        yield


@pytest.fixture
def allocate(tmp_path: Path) -> Iterator[Callable[..., Allocation]]:
    """Make allocations, each with a number of nodes and in a directory of its own."""
    with ExitStack() as stack:

        def make(size: int, **options: Any) -> Allocation:
            return stack.enter_context(allocation(tmp_path, size, **options))

        yield make
