"""The identity of an agent, as text and taken apart."""

from __future__ import annotations

import pytest

from slurm_elastic.rendezvous.membership.agents import AgentIdentity, job_of, node_of


@pytest.mark.parametrize("agent", ["node2/712.3/4711", "localhost/0.0/1"])
def test_an_identity_is_read_as_it_was_written(agent: str) -> None:
    identity = AgentIdentity.parse(agent)
    assert identity is not None
    assert str(identity) == agent
    assert (identity.node, f"{identity.job}.{identity.restarts}") == (node_of(agent), job_of(agent))


@pytest.mark.parametrize(
    "agent", ["", "leader", "node2/712.3", "node2/712/1", "node2/a.3/1", "/7.0/1", "n/7.0/x", "n/7.x/1"]
)
def test_another_text_is_none(agent: str) -> None:
    assert AgentIdentity.parse(agent) is None


def test_a_visitor_belongs_to_no_job() -> None:
    assert job_of("client on login1, process 7, request 1") == ""
    assert node_of("leader") == "leader"
