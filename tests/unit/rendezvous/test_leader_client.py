"""The client of a leader."""

from __future__ import annotations

from slurm_elastic.rendezvous.leader_client import client_name
from slurm_elastic.rendezvous.membership.agents import job_of


def test_two_requests_of_a_process_are_two_clients() -> None:
    """As of `slurm-elastic top`, which drains a node while it looks: the leader keeps one connection of an identity."""
    first, second = client_name(), client_name()
    assert first != second
    assert job_of(first) == job_of(second) == ""
