"""What no agent says. What it says, and what it ignores, is text: tests/unit/testdata/election/follower.txt."""

from __future__ import annotations

import pytest

from slurm_elastic.rendezvous.election.follower import Follower
from slurm_elastic.rendezvous.membership.agents import WorkerFailure

FAILURE = WorkerFailure("n0", "n0", rank=0, exit_code=1)


def test_workers_of_no_round_cannot_fail_or_finish() -> None:
    with pytest.raises(ValueError, match="never had a place"):
        Follower("n0").failed(FAILURE)
    with pytest.raises(ValueError, match="never had a place"):
        Follower("n0").finished()
