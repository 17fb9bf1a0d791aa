"""What the workers of a round start from: chosen from the inventories of those that wait, on record with the round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from slurm_elastic.rendezvous.leader.fenced_records import last_round
from slurm_elastic.rendezvous.membership import Base, Joined, LeaveReason, Left, Ponged, Publish, Reason, build_table
from slurm_elastic.rendezvous.records.api import Situation
from slurm_elastic.rendezvous.transport.messages import (
    INVENTORY_LIMIT,
    MessageError,
    decode_agent_message,
    encode,
)
from tests.unit.rendezvous.helpers.scenario import Scenario, candidate, failed, only


def choose(last_round: int | None, before: str, inventories: Sequence[str], failed: bool) -> str:
    return f"{before}/{last_round}{' failed' * failed}:{'+'.join(sorted(inventories))}"


def joined(name: str, inventory: str, attempt: int = 1, last: int | None = None) -> Joined:
    return Joined(replace(candidate(name), inventory=inventory), attempt, last)


def test_each_round_has_its_origin_and_the_next_one_follows_it() -> None:
    scenario = Scenario(max_nodes=1, choose_origin=choose, last_call_timeout=0.0)
    (first,) = only(Publish, scenario.on(joined("n0", "a")))
    assert first.table.origin == "/None:a"
    # The member leaves, and one of the spares follows. The other one holds memory as well.
    scenario.on(joined("n1", "b"))
    scenario.on(joined("n2", "c"))
    (second,) = only(Publish, scenario.on(Left("n0", LeaveReason.DRAINED)))
    assert second.table.origin == "/None:a/0:b+c"


def test_a_round_after_a_failure_is_told_so() -> None:
    scenario = Scenario(choose_origin=choose, max_restarts=1)
    scenario.on(joined("n0", "a"))
    scenario.on(failed("n0"))
    scenario.on(Ponged("n0", 1))
    scenario.wait(1.0)
    (second,) = only(Publish, scenario.on(joined("n0", "a", 2, 0)))
    assert second.table.origin == "/None:a/0 failed:a"


def test_a_leader_that_follows_reads_the_origin_from_the_record() -> None:
    table = build_table(4, Reason.START, [candidate("n0")], 0, 3.0, "from step 7")
    record = {"scope": "7.0", "leader": "n0", **msgspec.to_builtins(table)}
    found = last_round(Situation(None, 4, record), "7.0")
    assert found is not None
    assert found.base == Base(4, ("n0",), ("n0",), "n0", 3.0, "from step 7")


def test_an_inventory_is_limited() -> None:
    content = msgspec.json.decode(encode(joined("n0", "x" * INVENTORY_LIMIT)))
    assert decode_agent_message(content, "n0") == joined("n0", "x" * INVENTORY_LIMIT)
    content["candidate"]["inventory"] += "x"
    with pytest.raises(MessageError, match="4097 characters"):
        decode_agent_message(content, "n0")
