"""How long an agent pauses after a copy to another node."""

from __future__ import annotations

import socket

import pytest

from slurm_elastic.snapshot import replicator
from slurm_elastic.snapshot.disk.agent_side import DiskWriter, HeldSlots
from slurm_elastic.snapshot.lineage import Copy, Group, Holder, SnapshotId
from slurm_elastic.snapshot.memory import Contents, Slot
from slurm_elastic.snapshot.replication import Report
from slurm_elastic.snapshot.transfer import Ready, Settings

SNAPSHOT = SnapshotId(0, 3)


class Partner:
    """The other agent, and the clock of both: it makes room before the first copy, and takes bytes for some seconds."""

    def __init__(self, room: float, sending: float) -> None:
        self.now = 1000.0
        self._room, self._sending = room, sending
        self._answers: list[tuple[float, Ready]] = []
        self.socket, _ = socket.socketpair()

    def say(self, message: object) -> None:
        self._answers = [(self._room, Ready()), (self._sending / 2, Ready(copied=True))]
        self._room = 0.0

    def next(self, kind: type[Ready]) -> Ready:
        seconds, answer = self._answers.pop(0)
        self.now += seconds
        return answer

    def send_body(self, *_: object) -> None:
        self.now += self._sending / 2


def test_an_agent_pauses_as_long_as_a_copy_has_used_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    partner = Partner(room=30.0, sending=2.0)
    monkeypatch.setattr(replicator.time, "monotonic", lambda: partner.now)
    settings = Settings(b"s" * 32, "7.0", "one", "one", "127.0.0.1", 1.0)
    owner = replicator.Replicator(settings, list, DiskWriter(lambda: HeldSlots(())))
    members = replicator.Members(0, Group(0, 2, 2, 0, 4), Holder("127.0.0.1", 1), None)
    parts: dict[int, list[Slot]] = {}
    side = replicator.Participant(owner, members, [], parts)
    side.partner = Report("two", Holder("127.0.0.1", 2))
    monkeypatch.setattr(side, "_channel", lambda *_: partner)
    for local_rank in range(2):
        slot = Slot.make()
        slot.grow(1 << 13)
        slot.fill(Contents(Copy.of_part(SNAPSHOT, local_rank, 4), 64, 2), lambda: None)
        parts[local_rank] = [slot]
    # The parts of both ranks are sent, for 2 s each; the 30 s are for memory.
    side._copy(SNAPSHOT)
    assert partner.now == 1034.0
    assert side._pauses()
    partner.now += 3.9
    assert side._pauses()
    partner.now += 0.2
    assert not side._pauses()
    side._copy(SNAPSHOT)
    partner.now += 4.1
    assert not side._pauses()
