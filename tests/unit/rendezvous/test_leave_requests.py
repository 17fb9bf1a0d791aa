from __future__ import annotations

from slurm_elastic.rendezvous.membership.agents import LeaveReason, job_of
from slurm_elastic.rendezvous.transport.messages import LeaveAnswer, LeaveRequest, addressed_agents

AGENTS = {"n10/7.0/1": "n10", "n2/7.0/2": "n2", "n3/8.1/3": "n3"}


def request(*nodes: str, agent: str = "a person", job: str = "") -> LeaveRequest:
    return LeaveRequest(agent, nodes, job, LeaveReason.DRAINED, None, "")


def test_everybody() -> None:
    assert addressed_agents(request(), AGENTS) == (tuple(AGENTS), LeaveAnswer(("n2", "n3", "n10"), ()))
    assert addressed_agents(request(), {}) == ((), LeaveAnswer((), ()))


def test_some_nodes() -> None:
    assert addressed_agents(request("n3", "n4"), AGENTS) == (("n3/8.1/3",), LeaveAnswer(("n3",), ("n4",)))


def test_the_other_agents_of_a_job() -> None:
    meant, _ = addressed_agents(request(agent="n2/7.0/2", job=job_of("n2/7.0/2")), AGENTS)
    assert meant == ("n10/7.0/1",)
