from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.local.forkserver.helpers.workplace import Workplace
from tests.local.subreaper import be_no_subreaper


@pytest.fixture(autouse=True, scope="module")
def _subreaper_only_here() -> Iterator[None]:
    yield
    be_no_subreaper()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """One workplace for all tests of a module that need no fork server of their own: it takes an import of torch.

    These tests come first: cold workers of another workplace end with all orphans of this process, as is right for an
    agent, which has one fork server.
    """
    made = Workplace(tmp_path_factory.mktemp("place"))
    yield made
    made.close()


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[Callable[..., Workplace]]:
    """Makes workplaces, and ends their fork servers."""
    made: list[Workplace] = []

    def make(**options: Any) -> Workplace:
        directory = tmp_path / str(len(made))
        directory.mkdir()
        made.append(Workplace(directory, **options))
        return made[-1]

    yield make
    for place in made:
        place.close()
