"""What an agent that ends does for its job, and who ends a job whose batch script is gone."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from slurm_elastic.agent.job.job_end import is_without_script, represents_job
from slurm_elastic.agent.job.job_end_effects import JobAtEnd
from slurm_elastic.agent.lifecycle.states import Done
from slurm_elastic.errors import ExitCode
from slurm_elastic.rendezvous.transport.messages import Successor
from slurm_elastic.slurm import Controller, JobView, NodeState, SlurmJob
from tests.unit.agent.helpers.jobs import at_end, slurm_job
from tests.unit.agent.helpers.rounds import placed


@pytest.mark.parametrize(
    ("state", "nodes", "batch_host", "without"),
    [
        ("RUNNING", ("n2",), "n1", True),
        ("RUNNING", ("n1", "n2"), "n1", False),
        ("RUNNING", ("n1",), "", False),
        ("COMPLETING", ("n2",), "n1", False),
    ],
)
def test_a_job_without_its_batch_script(state: str, nodes: tuple[str, ...], batch_host: str, without: bool) -> None:
    view = JobView("1", None, None, state, None, 0, True, None, None, nodes, batch_host=batch_host)
    assert is_without_script(view) is without


class Asked(Controller):
    """Knows one node's state, and notes what it is told to do."""

    def __init__(self, state: NodeState) -> None:
        super().__init__()
        self.state, self.cancelled = state, list[str]()

    def node_states(self, names: object) -> dict[str, NodeState]:
        return {"n1": self.state}

    def cancel(self, job_id: str) -> bool:
        self.cancelled.append(job_id)
        return True


@pytest.fixture
def signalled() -> Iterator[int]:
    """A descriptor that says that a signal came, so that nobody waits."""
    reading, writing = os.pipe()
    os.write(writing, b"!")
    yield reading
    os.close(reading)
    os.close(writing)


def job(rank: int, nodes: int = 2) -> SlurmJob:
    return slurm_job(f"n[1-{nodes}]", SLURM_NODEID=str(rank), SLURMD_NODENAME=f"n{rank + 1}")


def srun_at(place: socket.socket) -> dict[str, str]:
    return {"SLURM_SRUN_COMM_HOST": "127.0.0.1", "SLURM_SRUN_COMM_PORT": str(place.getsockname()[1])}


def ended(environ: dict[str, str], signalled: int, state: NodeState, *, rank: int = 1) -> bool:
    controller = Asked(state)
    at_end(job(rank), controller, environ=environ, signal_fd=signalled).end_abandoned_job()
    return controller.cancelled == ["7"]


def test_a_job_with_its_srun_ends_by_itself(signalled: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert not ended(srun_at(listener), signalled, NodeState.DOWN)


def test_a_job_without_its_srun_is_ended(signalled: int) -> None:
    # Nobody listens on a port that is bound, and nobody else can.
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        environ = srun_at(bound)
        assert ended(environ, signalled, NodeState.UP)
        # The agent of the first node is srun's neighbour.
        assert not ended(environ, signalled, NodeState.UP, rank=0)


@pytest.mark.parametrize(("state", "expected"), [(NodeState.DOWN, True), (NodeState.UNKNOWN, False)])
def test_without_an_answer_slurm_decides(signalled: int, state: NodeState, *, expected: bool) -> None:
    assert ended({"SLURM_SRUN_COMM_HOST": "127.0.0.1"}, signalled, state) is expected


def test_an_agent_that_knows_no_srun_does_nothing(signalled: int) -> None:
    assert not ended({}, signalled, NodeState.DOWN)


@pytest.mark.parametrize(
    ("rank", "leader", "members", "stands"),
    [
        # Led from the job itself: its leader goes last.
        (1, "n1/7.0/1", "n[1-2]", False),
        (1, "n2/7.0/1", "n2", False),
        # Led by a store, or from another job of the run: the first of the job that was there to the end.
        (0, "s1/9.0/1", "n[1-2]", True),
        (1, "s1/9.0/1", "n[1-2]", False),
        (1, "s1/9.0/1", "n[2-3]", True),
        # This job was started again since.
        (1, "n1/7.1/1", "n2", True),
    ],
)
def test_who_sees_to_the_end_of_the_job(rank: int, leader: str, members: str, stands: bool) -> None:
    assignment = placed(f"n{rank + 1}", rank=rank, leader=leader, members=members)
    assert represents_job(job(rank), assignment.place.agent, assignment) is stands


def test_nobody_stands_for_a_job_that_never_trained() -> None:
    assert not represents_job(job(1), "n2/7.0/5", None)


OTHERS = ("n1/7.0/1", "n3/7.0/3")
LEFT, FAILED, FINISHED = ExitCode.LEFT, ExitCode.FAILED, ExitCode.FINISHED
PARTS = ("diagnoses", "leads", "shares_run", "represents_job")


def gives_up(
    signalled: int,
    listener: socket.socket,
    *,
    srun: dict[str, str],
    states: dict[str, NodeState],
    members: tuple[str, ...] | None = OTHERS,
    told: tuple[str, ...] = OTHERS,
) -> bool:
    """Whether the agent of n2, of a job of three nodes, ends the job. The others listen, or did, in one place."""
    controller = Asked(NodeState.UNKNOWN)
    controller.node_states = lambda names: {name: states.get(name, NodeState.UNKNOWN) for name in names}  # type: ignore[method-assign,assignment]
    address, port = listener.getsockname()

    def at(agents: tuple[str, ...]) -> list[Successor]:
        return [Successor(agent, address, port) for agent in agents]

    found = None if members is None else at(members)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JobAtEnd, "_members", lambda _: found)
        agent = at_end(job(1, 3), controller, environ=srun, signal_fd=signalled, told=at(told))
        agent.carry_out(Done(FAILED, gave_up=True), **dict.fromkeys(PARTS, False))
    return controller.cancelled == ["7"]


UP, DOWN = NodeState.UP, NodeState.DOWN


@pytest.mark.parametrize(
    ("states", "members", "told", "ends"),
    [
        ({"n1": DOWN}, OTHERS, (), True),
        ({"n1": UP, "n3": UP}, OTHERS, (), True),
        # Agents of other jobs of the run, and of another start of this one, are no matter of this job.
        ({}, ("n8/8.0/1", "n3/7.1/3"), (), True),
        # Where nothing can be read each node of the job counts, and one of which nothing is known may train.
        ({"n1": DOWN}, None, OTHERS, True),
        ({"n1": DOWN, "n3": DOWN}, None, (), True),
        ({"n1": DOWN, "n3": UP}, None, ("n1/7.0/1",), False),
    ],
)
def test_the_last_that_gives_up_ends_a_job_without_batch_script(
    signalled: int,
    states: dict[str, NodeState],
    members: tuple[str, ...] | None,
    told: tuple[str, ...],
    *,
    ends: bool,
) -> None:
    # Nobody listens on a port that is bound.
    with socket.socket() as ended_:
        ended_.bind(("127.0.0.1", 0))
        assert gives_up(signalled, ended_, srun=srun_at(ended_), states=states, members=members, told=told) is ends


def test_who_gives_up_while_another_one_lives_leaves_the_job_alone(signalled: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as alive, socket.socket() as ended_:
        ended_.bind(("127.0.0.1", 0))
        assert not gives_up(signalled, alive, srun=srun_at(ended_), states={"n1": DOWN, "n3": UP})
        # Slurm knows better than a port that somebody else may have by now.
        assert gives_up(signalled, alive, srun=srun_at(ended_), states={"n1": DOWN, "n3": DOWN})


def test_who_gives_up_leaves_a_job_with_its_srun_alone(signalled: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as srun, socket.socket() as ended_:
        ended_.bind(("127.0.0.1", 0))
        assert not gives_up(signalled, ended_, srun=srun_at(srun), states={"n1": DOWN, "n3": DOWN})


@pytest.mark.parametrize(
    ("outcome", "parts", "actions"),
    [
        # The agent that asked Slurm why the job goes sees to its requeue.
        (Done(LEFT), {"diagnoses", "leads"}, ["_requeue"]),
        (Done(LEFT, gave_up=True), {"diagnoses"}, ["_requeue"]),
        (Done(LEFT), {"leads", "represents_job"}, []),
        (Done(LEFT, gave_up=True), set(), ["end_abandoned_job"]),
        (Done(FAILED, gave_up=True), {"leads"}, ["end_abandoned_job"]),
        # When the run is over, one agent of each job ends it.
        (
            Done(FINISHED),
            {"leads", "shares_run"},
            ["cancel_held_elements", "_end_empty_jobs", "end_abandoned_job"],
        ),
        (Done(FAILED), {"leads", "shares_run"}, ["_end_empty_jobs", "end_abandoned_job"]),
        (Done(FINISHED), {"represents_job", "shares_run"}, ["cancel_held_elements", "end_abandoned_job"]),
        # An element that is a run of its own leaves the others alone.
        (Done(FINISHED), {"leads"}, ["end_abandoned_job"]),
        (Done(FAILED), {"leads"}, ["end_abandoned_job"]),
        (Done(FINISHED), set(), []),
    ],
)
def test_what_an_agent_does_for_its_job(
    monkeypatch: pytest.MonkeyPatch, outcome: Done, parts: set[str], actions: list[str]
) -> None:
    done = list[str]()
    monkeypatch.setattr(JobAtEnd, "_others", lambda _, **how: how)
    for name in ("_requeue", "cancel_held_elements", "_end_empty_jobs", "end_abandoned_job"):
        monkeypatch.setattr(JobAtEnd, name, lambda *_, name=name: done.append(name) or True)
    at_end(job(1), Controller()).carry_out(outcome, **{name: name in parts for name in PARTS})
    assert done == actions
