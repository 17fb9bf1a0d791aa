"""Who ends a job whose batch script is gone."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from slurm_elastic.agent.abandoned import end_abandoned_job, stands_for_job
from slurm_elastic.rendezvous.membership import Place, Reason
from slurm_elastic.rendezvous.messages import Placed
from slurm_elastic.slurm import Controller, NodeState, SlurmJob


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


def job(rank: int) -> SlurmJob:
    found = SlurmJob.from_environment(
        {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": "n[1-2]",
            "SLURM_NODEID": str(rank),
            "SLURMD_NODENAME": f"n{rank + 1}",
        }
    )
    assert found is not None
    return found


def srun_at(place: socket.socket) -> dict[str, str]:
    return {"SLURM_SRUN_COMM_HOST": "127.0.0.1", "SLURM_SRUN_COMM_PORT": str(place.getsockname()[1])}


def ended(environ: dict[str, str], signalled: int, state: NodeState, *, rank: int = 1) -> bool:
    controller = Asked(state)
    end_abandoned_job(job(rank), environ, controller, signalled, lambda line: None)
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
    place = Place(f"n{rank + 1}/7.0/5", f"n{rank + 1}", rank, 1, rank, "default", rank, 2)
    placed = Placed(1, place, 0, Reason.START, 2, 2, "n1", 1, 0, leader=leader, members=members)
    assert stands_for_job(job(rank), place.agent, placed) is stands


def test_nobody_stands_for_a_job_that_never_trained() -> None:
    assert not stands_for_job(job(1), "n2/7.0/5", None)
