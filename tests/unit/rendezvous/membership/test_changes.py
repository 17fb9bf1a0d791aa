"""Frozen data with some fields changed, cheaply."""

from __future__ import annotations

import dataclasses

import pytest

from slurm_elastic.rendezvous.membership.config import Settings
from slurm_elastic.rendezvous.membership.persistent import replace
from slurm_elastic.rendezvous.membership.state import initial_state


def test_changes_what_the_standard_library_would() -> None:
    state = initial_state(Settings(1, 4), 7.0)
    changed = replace(state, round=3, broken=frozenset({"a"}))
    assert changed == dataclasses.replace(state, round=3, broken=frozenset({"a"}))
    assert (state.round, state.broken) == (0, frozenset())
    with pytest.raises(dataclasses.FrozenInstanceError):
        changed.round = 4  # type: ignore[misc]


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="State has no field rounds"):
        replace(initial_state(Settings(1, 4), 7.0), rounds=3)  # type: ignore[call-arg]
