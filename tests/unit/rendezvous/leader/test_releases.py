from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from slurm_elastic.rendezvous.leader.absent_agents import note_releases, own_releases


def test_the_same_releases_are_no_news() -> None:
    first: dict[str, str] = {}
    assert [note_releases(first, node, "Python 3.11, torch 2.15.0") for node in ("n1", "n2", "n1")] == ["", "", ""]
    assert note_releases(first, "n3", "") == ""


def test_a_difference_is_said_once() -> None:
    first: dict[str, str] = {}
    assert note_releases(first, "n1", "Python 3.11, torch 2.15.0") == ""
    assert note_releases(first, "n2", "Python 3.11, torch 2.14.1") == (
        "n2 has Python 3.11, torch 2.14.1, but n1 has Python 3.11, torch 2.15.0; "
        "install the same releases on all nodes of a run"
    )
    assert note_releases(first, "n3", "Python 3.11, torch 2.14.1") == ""
    assert "n4 has Python 3.12, torch 2.15.0, but n1 has" in note_releases(first, "n4", "Python 3.12, torch 2.15.0")


def test_own_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.15.0+cu130"))  # type: ignore[arg-type]
    assert own_releases() == f"Python {sys.version_info.major}.{sys.version_info.minor}, torch 2.15.0+cu130"
