"""Where processes of the tests on one machine put their temporary files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest


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
