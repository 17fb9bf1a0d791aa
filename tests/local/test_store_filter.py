"""The kernel keeps strangers from the workers' store, where it lets the user of the run tell it so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.local.agents import HANG, ROOT

STRANGER = "10.1.0.3"
ADMITTED = "the workers' store admits the nodes of its round alone"


@pytest.fixture(autouse=True)
def _root() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root makes network namespaces")


def in_a_namespace(*words: str) -> dict[str, Any]:
    program = [sys.executable, "-m", "tests.local.namespace_of_stores", *words]
    done = subprocess.run(
        ["unshare", "--net", *program], cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=False
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "said": done.stderr}


def test_members_reach_a_store_and_strangers_do_not() -> None:
    found = in_a_namespace("store", "0")
    assert found.pop("said").count(ADMITTED) == 1
    assert found == {
        "addresses": ["10.1.0.1", "10.1.0.2", STRANGER],
        "value": "value",
        "early": False,
        "member": True,
        "stranger": False,
        "other address": False,
    }


def test_a_kernel_that_wants_privileges_leaves_the_store_open_and_working() -> None:
    found = in_a_namespace("store", "64999")
    assert (found["value"], found["member"]) == ("value", True)
    # Some kernels let every user attach a filter.
    admitted = ADMITTED in found["said"]
    assert (found["early"], found["stranger"]) == (not admitted, not admitted)


def test_agents_know_the_addresses_of_their_round(tmp_path: Path) -> None:
    found = in_a_namespace("run", str(tmp_path))
    assert (found["codes"], found["member"], found["stranger"]) == ([0, 0], True, False), found["log"]
    assert found["log"].count(ADMITTED) == 1
