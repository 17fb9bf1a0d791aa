from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic.rendezvous.election.campaign import Campaign, ElectionConfig
from slurm_elastic.rendezvous.leader.leader import Leader
from slurm_elastic.rendezvous.worker_store import prepare_stores
from tests.local.agents import HANG
from tests.local.rendezvous.helpers.parties import Run


@pytest.fixture(scope="session", autouse=True)
def _stores() -> None:
    """As an agent does before it starts threads."""
    prepare_stores()


@pytest.fixture(autouse=True)
def _no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader asks Slurm about nodes that are missing; nobody else's cluster knows these."""
    monkeypatch.setenv("PATH", "/nonexistent")


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Make a run in a directory of its own."""
    runs: list[Run] = []

    def start(directory: Path = tmp_path, **settings: object) -> Run:
        runs.append(Run(directory, **settings))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


@pytest.fixture
def _patient_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents look for their leader as long as it takes, however short the time in which a round has to form."""
    monkeypatch.setattr(ElectionConfig, "connect_timeout", HANG)


@pytest.fixture
def leader_settings() -> dict[str, float]:
    """Settings of the membership that leaders get instead of theirs, if the test has the fixture `leaders`, too."""
    return {}


@pytest.fixture
def leaders(monkeypatch: pytest.MonkeyPatch, leader_settings: dict[str, float]) -> list[Leader]:
    """The leaders that are made, to look at what they count."""
    made: list[Leader] = []
    init = Leader.__init__

    def remember(self: Leader, run: str, secret: bytes, campaign: Campaign, *others: Any) -> None:
        made.append(self)
        settings = dataclasses.replace(campaign.settings, **leader_settings)  # type: ignore[arg-type]
        init(self, run, secret, dataclasses.replace(campaign, settings=settings), *others)

    monkeypatch.setattr(Leader, "__init__", remember)
    return made
