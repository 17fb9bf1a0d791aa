"""What a member makes of a silent leader, of a second link to it, and of its own pauses."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

import pytest

from slurm_elastic.rendezvous.election import follower_link, lookup
from slurm_elastic.rendezvous.election.follower_link import Member
from slurm_elastic.rendezvous.election.leader_info import MemberSettings, Whereabouts
from slurm_elastic.rendezvous.leader_events import CutOff, Word
from slurm_elastic.rendezvous.membership import Candidate, Connected, Place, Reason
from slurm_elastic.rendezvous.transport.client_connection import Link
from slurm_elastic.rendezvous.transport.messages import AgentMessage, Beat, LeaderMessage, Placed
from slurm_elastic.rendezvous.transport.session import Session
from tests.unit.rendezvous.virtual_time import run, stop_process

PLACE = Place("n1", "n1", rank=0, local_world_size=1, base_rank=0, role="", role_base_rank=0, role_world_size=1)
PLACED = Placed(1, PLACE, 0, Reason.START, 1, 1, "n1", 1, 0)


class Wire(Link):
    """A link without a socket."""

    def __init__(self, heard: Callable[[Link, LeaderMessage], None]) -> None:
        super().__init__(("n0", 1), cast(Session, None), heard)
        self.said: list[AgentMessage] = []

    def send(self, message: AgentMessage) -> None:
        self.said.append(message)

    def end(self) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    abort = end

    async def finish(self, timeout: float) -> None:
        self.end()

    def say(self, message: LeaderMessage) -> None:
        """The leader says this."""
        self.heard_at = asyncio.get_running_loop().time()
        if self._alarm is not None:
            self._alarm.set(self.heard_at)
        self._heard(self, message)


async def unanswered(*_: object) -> Link:
    """As where a leader stands still, or none is left."""
    raise TimeoutError


class Party:
    """A member of round 0, and the leader's ends of all links that it has made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def at_once(call: Callable[[], object]) -> object:
            return call()

        monkeypatch.setattr(lookup, "aside", at_once)
        monkeypatch.setattr(follower_link, "open_link", self.open)
        self.links: list[Wire] = []
        self.words: list[Word] = []
        where = Whereabouts((("n0", 1),), published=True)
        self.member = Member(MemberSettings("7", b"secret", "n1", lambda: where), self.words.append)

    async def open(
        self, endpoint: object, session: object, heard: Callable[[Link, LeaderMessage], None], epoch: int
    ) -> Link:
        """As a leader does, which keeps the newest link of an agent: the older one is seen to end first."""
        for older in self.links:
            older.end()
        self.links.append(Wire(heard))
        return self.links[-1]

    async def starts(self) -> asyncio.Task[None]:
        running = asyncio.create_task(self.member.run())
        await asyncio.sleep(0.1)
        self.member.join(Candidate("n1", "n1", 0, 1, "trainer", "n1", 1))
        self.links[0].say(PLACED)
        return running

    async def ends(self, running: asyncio.Task[None]) -> None:
        await self.member.close(0.0)
        await running

    def cut_off(self) -> bool:
        return any(isinstance(word, CutOff) for word in self.words)


def test_the_second_link_to_a_silent_leader_is_kept_though_the_leader_has_ended_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        party = Party(monkeypatch)
        running = await party.starts()
        await asyncio.sleep(1.6)
        assert len(party.links) == 2
        assert party.links[1].said == [Connected("n1", 0)]
        party.links[1].say(Beat())
        assert party.links[1].said[1:] == [Beat()]
        await asyncio.sleep(1.0)
        assert len(party.links) == 2
        assert not party.cut_off()
        await party.ends(running)

    run(story())


def test_workers_are_stopped_once_when_no_link_says_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        party = Party(monkeypatch)
        running = await party.starts()

        async def silent(*_: object) -> Link:
            raise TimeoutError

        monkeypatch.setattr(follower_link, "open_link", silent)
        await asyncio.sleep(2.3)
        assert not party.cut_off()
        await asyncio.sleep(1.5)
        assert [word.round for word in party.words if isinstance(word, CutOff)] == [0]
        await party.ends(running)

    run(story())


@pytest.mark.parametrize("seconds", [1.0, 1.6, 2.6, 4.0, 3600.0])
def test_a_member_that_stood_still_hears_what_was_said_before_it_judges(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        party = Party(monkeypatch)
        running = await party.starts()
        here, there = socket.socketpair()
        with here, there:

            def read() -> None:
                for _ in here.recv(100):
                    party.links[0].say(Beat())

            asyncio.get_running_loop().add_reader(here, read)
            await asyncio.sleep(0.9)
            there.send(b"...")
            stop_process(seconds)
            await asyncio.sleep(0.1)
            await asyncio.sleep(0.1)
            asyncio.get_running_loop().remove_reader(here)
        assert party.links[0].said.count(Beat()) == 3
        assert len(party.links) == 1
        assert not party.cut_off()
        await party.ends(running)

    run(story())


@pytest.mark.parametrize(("silent", "cut_off"), [(0.9, False), (1.2, True)])
def test_a_member_that_stood_still_gives_a_leader_time_that_may_have_done_so_too(
    silent: float, cut_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        party = Party(monkeypatch)
        running = await party.starts()

        monkeypatch.setattr(follower_link, "open_link", unanswered)
        stop_process(3600.0)
        await asyncio.sleep(0.1)
        await asyncio.sleep(silent)
        assert party.cut_off() is cut_off
        party.links[0].say(Beat())
        await asyncio.sleep(1.0)
        assert party.cut_off() is cut_off
        await party.ends(running)

    run(story())


def test_a_member_that_is_always_late_does_not_wait_for_ever_for_a_silent_leader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        party = Party(monkeypatch)
        running = await party.starts()

        monkeypatch.setattr(follower_link, "open_link", unanswered)
        for _ in range(10):
            stop_process(1.0)
            await asyncio.sleep(0.1)
        assert party.cut_off()
        await party.ends(running)

    run(story())
