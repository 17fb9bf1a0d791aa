"""Whom an agent takes for the leader, and when it stands up itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from slurm_elastic.rendezvous.election import lookup, rivals
from slurm_elastic.rendezvous.election.finder import Finder
from slurm_elastic.rendezvous.election.leader_info import Leadership, MemberSettings, Whereabouts
from slurm_elastic.rendezvous.election.policy import IN_THE_WAY, Successor, Vacancy
from slurm_elastic.rendezvous.election.rivals import look_for_rivals
from slurm_elastic.rendezvous.leader_events import Unreachable
from slurm_elastic.rendezvous.membership import Reason
from slurm_elastic.rendezvous.transport.client_connection import ClosedError, Link
from slurm_elastic.rendezvous.transport.connect import Endpoint
from slurm_elastic.rendezvous.transport.session import Session, SessionError, TwinError
from tests.unit.rendezvous.virtual_time import run

OLD, NEW = ("n1", 1), ("n2", 2)
LAST = (Successor("n1/0.0/1", *OLD),)


@pytest.fixture(autouse=True)
def _no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real threads would take real time."""

    async def at_once(call: Callable[[], object]) -> object:
        return call()

    for module in (lookup, rivals):
        monkeypatch.setattr(module, "aside", at_once)


class Network:
    """Nobody listens where the old leader was; somebody else has taken its place by the second look at the records."""

    def __init__(self, *published: Endpoint) -> None:
        self._published = list(published)
        self.stood = 0
        self.link = cast(Link, object())

    def locate(self) -> Whereabouts:
        place = self._published.pop(0) if len(self._published) > 1 else self._published[0]
        return Whereabouts((place,), published=True, successors=LAST)

    async def connect(self, place: Endpoint) -> Link:
        if place == NEW:
            return self.link
        raise ConnectionRefusedError

    async def stand(self, vacancy: Vacancy) -> bool:
        assert vacancy.gone == {"n1/0.0/1"}
        self.stood += 1
        self._published = [NEW]
        return False

    def find(self) -> object:
        settings = MemberSettings("7", b"secret", "n3/0.0/3", self.locate, stand=self.stand)
        return run(Finder(settings, Leadership(), self.connect, lambda why: None).find(None))


def test_whoever_comes_when_all_members_have_ended_stands_up() -> None:
    network = Network(OLD)
    assert network.find() is network.link
    assert network.stood == 1


def test_nobody_stands_up_beside_a_leader_that_came_since_the_last_look() -> None:
    network = Network(OLD, NEW)
    assert network.find() is network.link
    assert network.stood == 0


@pytest.mark.parametrize("twin", [True, False])
def test_a_run_that_nobody_has_led_is_not_led_beside_one_of_another_directory(
    caplog: pytest.LogCaptureFixture, *, twin: bool
) -> None:
    """As where each node has a run directory of its own; later the other leader does not answer, and ends."""
    stood: list[Vacancy] = []

    async def connect(place: Endpoint) -> Link:
        now = asyncio.get_running_loop().time()
        if now > 20.0:
            raise ConnectionRefusedError if now > 25.0 else TimeoutError
        raise TwinError("a leader of this run by another run directory") if twin else SessionError("no leader")

    async def stand(vacancy: Vacancy) -> bool:
        stood.append(vacancy)
        return False

    settings = MemberSettings("7", b"secret", "n3/0.0/3", lambda: Whereabouts((OLD,)), stand=stand, connect_timeout=30)
    found = run(Finder(settings, Leadership(), connect, lambda why: None).find(None))
    assert isinstance(found, Unreachable)
    assert (bool(stood), found.usage) == (not twin, twin)
    lines = [record.getMessage() for record in caplog.records]
    hint = (
        "a run of this id is led from n1:1 by another run directory; give one that all nodes share by --run-dir, or"
        " another --run-id"
    )
    assert lines == ([hint] if twin else [])
    assert (found.why == hint) is twin


class Cut:
    """A network of three agents, n1 the leader, as n2 or n3 sees it; connections ask for as long as a kernel is let.

    Args:
        own: this agent.
        healed_at: when the network is whole again.
    """

    def __init__(self, own: int, healed_at: float = 0.0) -> None:
        self.order = tuple(Successor(f"n{rank}/0.0/{rank}", f"n{rank}", rank) for rank in (1, 2, 3))
        self.known = Leadership(1, self.order[0].agent, "n1", self.order[1:], 0)
        self.own, self.healed_at = self.order[own - 1], healed_at
        self.stood_at: float | None = None
        self.vacancy: Vacancy | None = None
        self.tried: list[float] = []
        self.link = cast(Link, object())

    async def connect(self, place: Endpoint) -> Link:
        now = asyncio.get_running_loop().time()
        if now >= self.healed_at and place == OLD:
            return self.link
        self.tried.append(now)
        # As reach() does.
        await asyncio.sleep(1.0)
        raise TimeoutError

    async def refuse(self, place: Endpoint) -> Link:
        """The leader has ended; the others lead nobody."""
        raise ConnectionRefusedError if place == OLD else ClosedError("something that closes the connection")

    async def stand(self, vacancy: Vacancy) -> bool:
        if self.stood_at is None:
            self.vacancy = vacancy
            self.stood_at = asyncio.get_running_loop().time()
        return False

    async def find(self, lost: Link | None, connect: Callable[[Endpoint], Awaitable[Link]]) -> object:
        settings = MemberSettings(
            "7",
            b"secret",
            self.own.agent,
            lambda: Whereabouts((OLD,), True, self.order),
            stand=self.stand,
            connect_timeout=30.0,
        )
        return await Finder(settings, self.known, connect, lambda why: None).find(lost)

    def lost(self, connect: Callable[[Endpoint], Awaitable[Link]]) -> object:
        async def find() -> object:
            lost = Link(OLD, cast(Session, None), lambda link, message: None)
            return await self.find(lost, connect)

        return run(find())


@pytest.mark.parametrize("standing", [True, False])
def test_who_finds_a_leader_in_the_moment_it_stands_itself_stands_down(standing: bool) -> None:
    stood_down: list[float] = []

    async def find() -> object:
        link = Link(NEW, cast(Session, None), lambda link, message: None)
        stands = False

        async def connect(place: Endpoint) -> Link:
            nonlocal stands
            await asyncio.sleep(0.01)
            stands = standing
            return link

        async def stand_down() -> None:
            stood_down.append(asyncio.get_running_loop().time())

        settings = MemberSettings(
            *("7", b"secret", "n3/0.0/3", lambda: Whereabouts((NEW,), True, LAST)),
            own=lambda: OLD if stands else None,
            standing=lambda: stands,
            stand_down=stand_down,
        )
        return await Finder(settings, Leadership(), connect, lambda why: None).find(None) is link

    assert run(find())
    assert len(stood_down) == standing


@pytest.mark.parametrize("left", [None, OLD])
def test_who_stands_finds_the_last_leader_that_stands_again_unless_it_went(left: Endpoint | None) -> None:
    async def stand() -> bool:
        loop = asyncio.get_running_loop()
        first, second = Successor("n2/0.0/2", *NEW), Successor("n3/0.0/3", "n3", 3)

        async def connect(place: Endpoint) -> Link:
            if place == OLD:
                return Link(OLD, cast(Session, None), lambda link, message: None)
            raise ConnectionRefusedError

        settings = MemberSettings(
            *("7", b"secret", second.agent, lambda: Whereabouts((NEW,), True, (first, second), 0)),
            standing=lambda: loop.time() < 2.0,
        )
        known = Leadership(1, "n1/0.0/1", "n1", (first, second), 0, place=OLD, left=left)
        return await look_for_rivals(settings, known, connect)

    # It is not among those that follow it.
    assert run(stand()) is (left is None)


@pytest.mark.parametrize("in_the_way", [True, False])
def test_who_keeps_members_from_each_other_stands_for_a_while_only(in_the_way: bool) -> None:
    async def refuse(place: Endpoint) -> Link:
        raise ConnectionRefusedError

    async def stand() -> tuple[bool, float]:
        now = asyncio.get_running_loop().time
        settings = MemberSettings(
            *("7", b"secret", "n3/0.0/3", lambda: Whereabouts((OLD,), True, LAST)),
            standing=lambda: now() < 20.0,
            # For a moment it is not.
            in_the_way=lambda: in_the_way and not 4.0 < now() < 4.1,
        )
        return await look_for_rivals(settings, Leadership(), refuse), now()

    stands_back, moment = run(stand())
    assert stands_back is in_the_way
    assert moment == pytest.approx(4.1 + IN_THE_WAY if in_the_way else 20.0, abs=0.1)


@pytest.mark.parametrize(("own", "seconds"), [(2, 0.05), (3, 1.3)])
def test_the_first_stands_at_once_and_the_second_when_it_had_its_time(own: int, seconds: float) -> None:
    network = Cut(own)
    network.lost(network.refuse)
    assert network.stood_at is not None
    assert seconds - 0.1 < network.stood_at < seconds + 0.1


@pytest.mark.parametrize(("own", "seconds"), [(2, 0.0), (3, 1.25)])
def test_a_leader_that_has_resigned_is_followed_at_once(own: int, seconds: float) -> None:
    network = Cut(own)
    network.known.resigns(network.order[0].agent, (), OLD)
    network.lost(network.refuse)
    assert network.stood_at is not None
    assert seconds <= network.stood_at < seconds + 0.05


@pytest.mark.parametrize(
    ("own", "gone", "leaving", "stands"), [(3, (2,), (), True), (3, (), (2,), True), (2, (), (2,), False)]
)
def test_who_is_gone_is_not_waited_for_and_who_goes_does_not_stand(
    own: int, gone: tuple[int, ...], leaving: tuple[int, ...], stands: bool
) -> None:
    network = Cut(own)
    network.known.leaves(network.order[rank - 1].agent for rank in leaving)
    network.known.resigns(network.order[0].agent, (network.order[rank - 1].agent for rank in gone), OLD)
    network.lost(network.refuse)
    assert network.stood_at is None or network.stood_at < 0.05
    assert (network.stood_at is not None) is stands


@pytest.mark.parametrize("healed_at", [0.01, 0.9, 1.1, 2.9, 3.1, 12.3, 27.0])
def test_whoever_looks_through_a_cut_finds_the_leader_within_a_second_of_its_end(healed_at: float) -> None:
    network = Cut(2, healed_at)

    async def find() -> tuple[object, float]:
        lost = Link(OLD, cast(Session, None), lambda link, message: None)
        return await network.find(lost, network.connect), asyncio.get_running_loop().time()

    found, at = run(find())
    assert found is network.link
    assert at < healed_at + 1.1


def test_a_leader_that_has_ended_is_gone_and_a_silent_one_is_not_waited_for() -> None:
    network = Cut(2, healed_at=100.0)
    leader = network.order[0].agent
    network.lost(network.refuse)
    assert network.vacancy == Vacancy(Reason.NODE_LOST, gone=frozenset({leader}), round=0)

    network = Cut(2, healed_at=100.0)
    network.lost(network.connect)
    assert network.vacancy == Vacancy(Reason.NODE_LOST, silent=frozenset({leader}), round=0)
    # Its silence began when it was heard last.
    assert network.stood_at is not None
    assert 4.25 < network.stood_at < 4.4
