"""Whom an agent takes for the leader, and when it stands up itself."""

from __future__ import annotations

import asyncio
from typing import cast

from slurm_elastic.rendezvous.finder import Finder
from slurm_elastic.rendezvous.link import Endpoint, Link
from slurm_elastic.rendezvous.membership import Reason
from slurm_elastic.rendezvous.succession import Successor
from slurm_elastic.rendezvous.whereabouts import Leadership, MemberSettings, Whereabouts

OLD, NEW = ("n1", 1), ("n2", 2)
LAST = (Successor("n1/0.0/1", *OLD),)


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

    async def stand(self, gone: frozenset[str], reason: Reason) -> bool:
        assert gone == {"n1/0.0/1"}
        self.stood += 1
        self._published = [NEW]
        return False

    def find(self) -> object:
        settings = MemberSettings("7", b"secret", "n3/0.0/3", self.locate, stand=self.stand)
        return asyncio.run(Finder(settings, Leadership(), self.connect, lambda why: None).find(None))


def test_whoever_comes_when_all_members_have_ended_stands_up() -> None:
    network = Network(OLD)
    assert network.find() is network.link
    assert network.stood == 1


def test_nobody_stands_up_beside_a_leader_that_came_since_the_last_look() -> None:
    network = Network(OLD, NEW)
    assert network.find() is network.link
    assert network.stood == 0
