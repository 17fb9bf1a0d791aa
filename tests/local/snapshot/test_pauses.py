"""How long an agent pauses after a copy to another node, and whether it awaits more from one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slurm_elastic.snapshot import replicator
from slurm_elastic.snapshot.disk.agent_side import DiskWriter, HeldSlots
from slurm_elastic.snapshot.lineage import Copy, Group, Holder, SnapshotId
from slurm_elastic.snapshot.memory import Contents, Slot
from slurm_elastic.snapshot.replication import Report
from slurm_elastic.snapshot.transfer import Ready, Settings, TransferError

SNAPSHOT = SnapshotId(0, 3)
MEMBERS = replicator.Members(0, Group(0, 2, 2, 0, 4), Holder("127.0.0.1", 1), None)


class Partner:
    """The other agent, and the clock of both: it makes room before the first copy, and takes bytes for some seconds."""

    def __init__(self, room: float, sending: float) -> None:
        self.now = 1000.0
        self._room, self._sending = room, sending

    def say(self, message: object) -> None:
        self._answers = [(self._room, Ready()), (self._sending / 2, Ready(copied=True))]
        self._room = 0.0

    def next(self, kind: type[Ready]) -> Ready:
        seconds, answer = self._answers.pop(0)
        self.now += seconds
        return answer

    def send_body(self, *_: object) -> None:
        self.now += self._sending / 2


def taking_part(parts: dict[int, list[Slot]]) -> tuple[replicator.Replicator, replicator.Participant]:
    settings = Settings(b"s" * 32, "7.0", "one", "one", "127.0.0.1", 1.0)
    owner = replicator.Replicator(settings, list, DiskWriter(lambda: HeldSlots(())))
    side = owner._participant = replicator.Participant(owner, MEMBERS, [], parts)
    side.partner = Report("two", Holder("127.0.0.1", 2))
    return owner, side


def test_an_agent_that_comes_again_after_its_connection_has_ended_is_awaited() -> None:
    (owner, side), more = taking_part({}), []
    owner.replicas[0], contents = [Slot.make()], Contents(Copy.of_part(SNAPSHOT, 0, 4), 0, 0)
    owner.replicas[0][0].fill(contents, lambda: None)

    def following(kind: Any) -> Any:
        more.append(owner._more_comes(side))
        if len(more) % 2:
            return replicator._Push(0, 0, contents)
        raise TransferError("the connection ends")

    for _ in range(2):
        with pytest.raises(TransferError):
            owner._attend(SimpleNamespace(next=following, say=id, socket=SimpleNamespace(settimeout=id)))  # type: ignore[arg-type]
    assert more == [False, True, False, True]


def test_an_agent_pauses_as_long_as_a_copy_has_used_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    partner = Partner(room=30.0, sending=2.0)
    monkeypatch.setattr(replicator.time, "monotonic", lambda: partner.now)
    parts: dict[int, list[Slot]] = {}
    _, side = taking_part(parts)
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
