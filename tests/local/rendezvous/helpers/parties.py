"""Agents without workers: several of one run in this process, each in touch with the leader by a real socket."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from slurm_elastic.rendezvous.connect import RendezvousConfig, connect
from slurm_elastic.rendezvous.election.campaign import default_leader_limit
from slurm_elastic.rendezvous.election.events import LeaderEvent
from slurm_elastic.rendezvous.membership.agents import Reason
from slurm_elastic.rendezvous.membership.events import Decision, Interrupted
from slurm_elastic.rendezvous.options import RendezvousOptions
from slurm_elastic.rendezvous.records.api import RunDirRecords
from slurm_elastic.rendezvous.thread import Coordination
from slurm_elastic.rendezvous.transport.messages import Assignment
from slurm_elastic.rundir import RunDir
from slurm_elastic.slurm import port_sequence
from tests.local.agents import HANG, eventually

_Word = TypeVar("_Word", bound=LeaderEvent)


def options(**changes: Any) -> RendezvousOptions:
    """Times in which nothing happens by itself in a test but what it asks for, however slow the machine is.

    Whoever ends in these tests does so audibly; nobody is to be lost because a thread was not served for seconds.
    """
    times = {"last_call_timeout": HANG, "heartbeat_limit": HANG, **changes}
    return RendezvousOptions(**{"leader_limit": default_leader_limit(times["heartbeat_limit"]), **times})


class Party:
    """One agent and its link to the leader."""

    def __init__(self, config: RendezvousConfig) -> None:
        self.config = config
        self.decisions: list[Decision] = []
        self.link: Coordination = connect(config, self.decisions.append)

    def join(self) -> None:
        self.link.join(self.config.agent_info(30000 + self.config.position))

    def hear(self, kind: type[_Word]) -> _Word:
        """The next word, which has to be of this kind."""
        word = self.link.next_event(timeout=HANG)
        if not isinstance(word, kind):
            pytest.fail(f"{self.config.node} heard {word}, not {kind.__name__}")
        return word

    def hear_after(self, kind: type[_Word]) -> _Word:
        """The next word but that the round is over, after which this one joins again.

        A new leader that has not heard the join yet says it once more.
        """
        while isinstance(word := self.link.next_event(timeout=HANG), Interrupted):
            self.join()
        if not isinstance(word, kind):
            pytest.fail(f"{self.config.node} heard {word}, not {kind.__name__}")
        return word

    def silent(self) -> bool:
        return self.link.next_event(timeout=0) is None

    def die(self) -> None:
        """End as a killed process does: nobody is told, and nobody listens any more."""
        self.link.stop(timeout=0)


class Run:
    """A run in a directory, and all parties of it that were made.

    Args:
        directory: of the run directory.
        settings: of every agent.
    """

    def __init__(self, directory: Path, run_id: str = "run", **settings: object) -> None:
        self.run_dir = RunDir.for_run(directory, run_id).open()
        self.settings = settings
        self.parties: list[Party] = []
        self.config = RendezvousConfig(
            run_id=run_id,
            run_dir=self.run_dir,
            records=RunDirRecords(self.run_dir, f"{run_id}.0"),
            restart_count=0,
            incarnation=f"{run_id}.0",
            agent="",
            node="",
            position=0,
            address="127.0.0.1",
            local_world_size=1,
            role="default",
            expected_nodes=(),
            min_nodes=1,
            max_nodes=8,
            max_restarts=0,
            may_lead=False,
            leader_host="127.0.0.1",
            # Others than those of the same tests that another process runs.
            ports=port_sequence(f"{run_id} {os.getpid()}", 0, 32768),
            options=options(),
        )

    def party(self, position: int, **changes: object) -> Party:
        """The agent of a node, counted from 0; that of the first one may lead."""
        node = f"node{position + 1}"
        config = dataclasses.replace(
            self.config, node=node, agent=f"{node}/7.0/{len(self.parties)}", position=position, may_lead=position == 0
        )
        config = dataclasses.replace(config, **{**self.settings, **changes})
        config = dataclasses.replace(config, incarnation=f"{config.run_id}.{config.restart_count}")
        party = Party(dataclasses.replace(config, records=RunDirRecords(self.run_dir, config.incarnation)))
        self.parties.append(party)
        return party

    def all_of(self, nodes: int) -> list[Party]:
        """A run whose allocation has so many nodes, with all of them in touch."""
        self.settings["expected_nodes"] = tuple(f"node{number + 1}" for number in range(nodes))
        return [self.party(position) for position in range(nodes)]

    def formed(self, nodes: int) -> list[Party]:
        """The same, in their first round."""
        parties = self.all_of(nodes)
        form(parties)
        return parties

    def close(self) -> None:
        # The leader waits until the others have gone.
        for party in sorted(self.parties, key=lambda party: party.link.leads):
            party.link.stop(timeout=1)


def endpoint(run: Run) -> dict[str, Any]:
    """The address that the leader has published."""
    published = run.run_dir.read_record("endpoints", run.config.incarnation)
    assert published is not None
    return published


def form(parties: Sequence[Party]) -> list[Assignment]:
    """All join, and all get a place."""
    for party in parties:
        party.join()
    return placed(parties)


def placed(parties: Sequence[Party]) -> list[Assignment]:
    """All get a place."""
    return [party.hear(Assignment) for party in parties]


def leader_of(parties: Sequence[Party]) -> Party:
    """The one that leads. Another may have stood up, too, which it leaves as soon as it has heard of this one."""
    found: list[Party] = eventually(
        lambda: len(leading := [party for party in parties if party.link.leads]) == 1 and leading
    )
    return found[0]


def interrupted(parties: Sequence[Party], reason: Reason) -> None:
    """All are told that the round is over, and why."""
    for party in parties:
        assert party.hear(Interrupted).reason is reason
