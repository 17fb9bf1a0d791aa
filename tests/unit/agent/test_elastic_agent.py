"""What an agent does on words that come late or twice."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous.api import RendezvousHandler

from slurm_elastic.agent.elastic_agent import SlurmElasticAgent
from slurm_elastic.agent.health import Reporter, Snapshot
from slurm_elastic.agent.inquiry import Inquiry
from slurm_elastic.agent.signals import Notices
from slurm_elastic.agent.worker_processes import Starter
from slurm_elastic.rendezvous.connect import Seat
from slurm_elastic.rendezvous.leader_events import CutOff, Word
from slurm_elastic.rendezvous.membership import Candidate, Reason
from slurm_elastic.rendezvous.thread import Coordination
from slurm_elastic.rendezvous.transport.messages import Interrupted
from slurm_elastic.slurm import Meaning


class Spoken:
    """In place of the thread that is in touch with the leader: what it has to say, and what it is told."""

    def __init__(self, *words: Word) -> None:
        self.words = [*words]
        self.joins = 0

    def next_word(self, timeout: float | None = None) -> Word | None:
        return self.words.pop(0) if self.words else None

    def join(self, candidate: Candidate) -> None:
        self.joins += 1


class Somewhere:
    """In place of a seat."""

    def candidate(self, port: int) -> Candidate:
        return Candidate("n1", "n1", 0, 1, "trainer", "n1", port)


def agent(said: Spoken, notices: Notices, reporter: Reporter, directory: Path) -> SlurmElasticAgent:
    spec = WorkerSpec("trainer", 1, rdzv_handler=cast(RendezvousHandler, None), entrypoint="train.py")
    return SlurmElasticAgent(
        spec,
        DefaultLogsSpecs(log_dir=str(directory)),
        cast(Seat, Somewhere()),
        cast(Coordination, said),
        notices,
        Inquiry(notices, None, Meaning()),
        cast(Starter, None),
        reporter,
    )


def test_an_agent_that_has_joined_does_not_join_again_when_it_hears_once_more_that_the_last_round_is_over(
    tmp_path: Path,
) -> None:
    # By its link, which was broken for a moment, and then by the leader, which had given it up.
    said = Spoken(CutOff(0, Reason.NODE_LOST, "n0", "broken"), Interrupted(0, Reason.NODE_LOST, "", "this is over"))
    one = agent(said, Notices(), Reporter(Snapshot("7", "n1", "7", "n1", 0.0)), tmp_path)
    one._join()
    while said.words:
        one._act()
    one._act()
    assert said.joins == 1
    one._shutdown()
