"""What agents are told of decisions, where it is more than the decision itself."""

from __future__ import annotations

from typing import cast

from slurm_elastic.rendezvous.leader.agent_connections import AgentConnections
from slurm_elastic.rendezvous.leader.leader import send_decision
from slurm_elastic.rendezvous.membership import events
from slurm_elastic.rendezvous.membership.agents import LeaveReason
from slurm_elastic.rendezvous.transport.messages import Assignment, LeaderMessage
from tests.unit.rendezvous.helpers.scenario import Scenario, candidate, only, sent


class Told:
    """Takes what is said, and to whom; beside the agents a store is connected."""

    def __init__(self) -> None:
        self.said: list[tuple[set[str], LeaderMessage]] = []
        self.shared: object = None

    def others(self, agents: tuple[str, ...]) -> tuple[str, ...]:
        return ("store",)

    def send(self, agents: tuple[str, ...], message: LeaderMessage) -> None:
        self.said.append((set(agents), message))


def told(run: Scenario, decision: events.Decision) -> tuple[set[str], LeaderMessage]:
    connections = Told()
    send_decision(cast(AgentConnections, connections), 1, run.state, decision)
    (said,) = connections.said
    return said


def test_who_will_not_lead_is_told_before_a_leader_may_be_lost() -> None:
    run = Scenario(agent="n0", expected_nodes=("n0", "n1", "n2"))
    run.join("n0", "n1", "n2")
    (hold,) = sent(events.Holding, run.on(events.Leaving("n1", LeaveReason.PREEMPTED)))
    assert told(run, hold) == ({"n0", "n1", "n2"}, events.Holding(0, leaving=("n1",)))
    run.on(events.Leaving("n2", LeaveReason.PREEMPTED))
    stops = [stop for name in ("n0", "n1", "n2") for stop in sent(events.Stopping, run.on(events.Held(name, 0, 5)))]
    (_, stopping) = told(run, stops[-1])
    assert isinstance(stopping, events.Stopping)
    assert stopping.leaving == ("n1", "n2")


def test_a_leader_that_resigns_says_who_is_gone_and_says_it_to_all() -> None:
    run = Scenario(agent="n0", expected_nodes=("n0", "n1", "n2"))
    run.join("n0", "n1", "n2")
    for name in ("n0", "n1"):
        run.on(events.Leaving(name, LeaveReason.PREEMPTED))
    run.join("n2", last_round=0)
    run.on(events.Left("n1", LeaveReason.PREEMPTED))
    (resign,) = only(events.Resign, run.on(events.Left("n0", LeaveReason.PREEMPTED)))
    assert told(run, resign) == ({"n2", "store"}, events.Resigned("n0", gone=("n0", "n1")))


def test_the_end_is_told_to_all_at_once_and_then_to_each_that_comes() -> None:
    run = Scenario(agent="n0", join_timeout=10.0, min_nodes=2)
    run.join("n0")
    (finish,) = only(events.Finish, run.wait(11.0))
    assert told(run, finish) == ({"n0", "store"}, events.Ended(events.Outcome.TIMED_OUT, None, finish.message.detail))
    (again,) = only(events.Finish, run.join("n1"))
    (agents, _) = told(run, again)
    assert agents == {"n1"}


def test_workers_of_one_node_find_their_store_on_the_loopback() -> None:
    run = Scenario(agent="n0", expected_nodes=("n0",))
    connections = Told()
    (publish,) = only(events.Publish, run.on(events.Joined(candidate("n0"), 1)))
    send_decision(cast(AgentConnections, connections), 1, run.state, publish)
    ((_, message),) = connections.said
    assert isinstance(message, Assignment)
    assert message.store_address == "127.0.0.1"
