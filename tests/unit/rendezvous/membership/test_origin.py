"""What the workers of a round start from: chosen from the inventories of those that wait, on record with the round."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from slurm_elastic.rendezvous.leader.fenced_records import last_round
from slurm_elastic.rendezvous.membership.agents import Reason
from slurm_elastic.rendezvous.membership.assignment import build_table
from slurm_elastic.rendezvous.membership.config import Base
from slurm_elastic.rendezvous.membership.events import Joined
from slurm_elastic.rendezvous.records.api import Situation
from slurm_elastic.rendezvous.transport.messages import INVENTORY_LIMIT, MessageError, decode_agent_message, encode
from tests.unit.rendezvous.helpers.scenario import candidate


def joined(name: str, inventory: str, attempt: int = 1, last: int | None = None) -> Joined:
    return Joined(replace(candidate(name), inventory=inventory), attempt, last)


def test_a_leader_that_follows_reads_the_origin_from_the_record() -> None:
    table = replace(build_table(4, Reason.START, [candidate("n0")], 0), heartbeat_limit=3.0, origin="from step 7")
    record = {"scope": "7.0", "leader": "n0", **msgspec.to_builtins(table)}
    found = last_round(Situation(None, 4, record), "7.0")
    assert found is not None
    assert found.base == Base(4, ("n0",), "n0", 3.0, "from step 7")


def test_an_inventory_is_limited() -> None:
    content = msgspec.json.decode(encode(joined("n0", "x" * INVENTORY_LIMIT)))
    assert decode_agent_message(content, "n0") == joined("n0", "x" * INVENTORY_LIMIT)
    content["candidate"]["inventory"] += "x"
    with pytest.raises(MessageError, match="4097 characters"):
        decode_agent_message(content, "n0")
