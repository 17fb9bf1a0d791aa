"""A run of root's on a file server that takes root for another user, as NFS does with root_squash (exports(5)).

Here the kernel does the same: with setfsuid(2) files are made, and access to them is checked, as that other user, while
the process stays root's and has none of root's rights over files.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import Std

from slurm_elastic.agent.workers.logs import RoundLogsSpecs
from slurm_elastic.errors import UsageError
from slurm_elastic.ownership import open_own, write_own
from slurm_elastic.rundir import RunDir
from tests.unit.rundir.helpers.processes import OTHER_USER, as_root, race

STRANGER = 64999
RANK = {"RANK": "0", "WORLD_SIZE": "1", "SLURM_ELASTIC_ROUND": "3", "SLURM_ELASTIC_NODE": "n1"}

pytestmark = as_root


@pytest.fixture
def exported() -> Iterator[Path]:
    """A directory of root's on the file server; not below pytest's, which others may not look into."""
    base = Path(tempfile.mkdtemp())
    os.chown(base, OTHER_USER, OTHER_USER)
    yield base
    shutil.rmtree(base)


def squashed(action: Callable[[], Any]) -> Any:
    """Return what a process of root's that the file server takes for nobody gets, or the error that it raises."""

    def act(_: int) -> Any:
        libc = ctypes.CDLL(None)
        libc.setfsgid(OTHER_USER)
        libc.setfsuid(OTHER_USER)
        return action()

    return race(act, racers=1)[0]


def logs_of_a_round(run_dir: RunDir) -> str:
    destinations = RoundLogsSpecs(run_dir, redirects=Std.ALL).reify({0: dict(RANK)})
    os.close(write_own(destinations.stdouts[0]))
    return destinations.stdouts[0]


def test_root_works_in_a_run_directory_that_the_file_server_gives_to_nobody(exported: Path) -> None:
    def work() -> dict[str, Any]:
        run_dir = RunDir.for_run(exported, "7").open()
        secret = run_dir.secret()
        won = run_dir.claim_record({"epoch": 1}, "rounds", 0)
        run_dir.publish_record({"port": 1}, "endpoints", "7.0")
        run_dir.append_event("n1", "{}")
        stdout = logs_of_a_round(run_dir)
        run_dir.mark_done({"outcome": "succeeded"})
        # Another node's agent, or this one after a requeue.
        again = RunDir.for_run(exported, "7").open()
        logs_of_a_round(again)
        os.close(open_own(stdout, os.O_RDONLY))
        return {
            "user": os.geteuid(),
            "owner": Path(stdout).stat().st_uid,
            "same secret": again.secret() == secret,
            "won": won,
            "round": again.newest("rounds"),
            "endpoint": bool(again.read_record("endpoints", "7.0")),
            "done": again.is_done(),
        }

    assert squashed(work) == {
        "user": 0,
        "owner": OTHER_USER,
        "same secret": True,
        "won": True,
        "round": 0,
        "endpoint": True,
        "done": True,
    }


@pytest.mark.parametrize("part", ["rounds", "secret", "logs/round_0003", "logs/round_0003/n1/rank_00/stdout.log"])
def test_what_a_stranger_has_put_there_is_refused_all_the_same(exported: Path, part: str) -> None:
    def work() -> None:
        run_dir = RunDir.for_run(exported, "7").open()
        run_dir.secret()
        logs_of_a_round(run_dir)

    assert squashed(work) is None
    put = exported / "elastic-runs/7" / part
    os.chown(put, STRANGER, STRANGER)
    if put.name == "stdout.log":
        # Then it is not the kernel that refuses it.
        put.chmod(0o666)
    error = squashed(work)
    assert isinstance(error, UsageError | PermissionError)
    assert "belongs to another user (uid 64999)" in str(error)


def test_root_may_not_write_where_nobody_may_not(exported: Path) -> None:
    os.chown(exported, STRANGER, STRANGER)
    exported.chmod(0o755)
    error = squashed(lambda: RunDir.for_run(exported, "7").open())
    assert isinstance(error, UsageError)
    assert "no permission for this user; fix its permissions, or give another run directory by --run-dir" in str(error)
