from __future__ import annotations

import resource

import pytest

from slurm_elastic import descriptors
from slurm_elastic.errors import UsageError


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The limits that were set, beginning with what the process was given."""
    history = [(1024, 20000)]
    monkeypatch.setattr(descriptors, "_given", None)
    monkeypatch.setattr(resource, "getrlimit", lambda which: history[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: history.append(limits))
    return history


def test_the_soft_limit_is_raised_and_what_was_given_is_known(limits: list[tuple[int, int]]) -> None:
    descriptors.raise_limit()
    descriptors.raise_limit()
    assert limits == [(1024, 20000), (20000, 20000)]
    assert descriptors.given_limit() == (1024, 20000)


def test_a_leader_of_as_many_agents_as_it_needs_descriptors_for_has_them(limits: list[tuple[int, int]]) -> None:
    for agents in (1, 1024, 16384):
        assert descriptors.connections_at_most(descriptors.needed(agents)) >= agents
    descriptors.raise_limit()
    descriptors.require(16384)


def test_a_limit_that_is_too_low_is_one_line_with_the_number_needed(limits: list[tuple[int, int]]) -> None:
    limits.append((4096, 4096))
    with pytest.raises(UsageError, match=r"is 4096 here .* 16384 agents needs 16768; raise the hard limit"):
        descriptors.require(16384)
    descriptors.require(3000)
