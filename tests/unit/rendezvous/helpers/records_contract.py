"""What :class:`slurm_elastic.rendezvous.records.api.Records` promises, whoever keeps them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from slurm_elastic.rendezvous.records.api import Records, Situation

RACERS = 8


def winners(claim: Callable[[int], bool]) -> list[int]:
    """Who of eight that claim the same thing at the same time was told that it is theirs."""
    start = threading.Barrier(RACERS)
    won: list[int] = []

    def race(number: int) -> None:
        start.wait()
        if claim(number):
            won.append(number)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(RACERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won


class RecordsContract:
    """Subclasses bring three fixtures: `records`, `sibling` (another agent's records of the same incarnation), and
    `successor` (the same run, the incarnation after it)."""

    def test_an_epoch_has_one_leader(self, records: Records, sibling: Records) -> None:
        assert records.newest_epoch() is None
        who = winners(lambda number: (records, sibling)[number % 2].claim_epoch(1, {"by": number}))
        assert len(who) == 1
        assert sibling.claim_epoch(12, {"agent": "n2/7.0/1"})
        assert not records.claim_epoch(12, {})
        assert (records.newest_epoch(), sibling.newest_epoch()) == (12, 12)

    def test_the_newest_epoch_is_the_highest_number(self, records: Records) -> None:
        for number in (9, 100, 10):
            assert records.claim_epoch(number, {})
        assert records.newest_epoch() == 100

    def test_the_last_endpoint_counts(self, records: Records, sibling: Records) -> None:
        assert records.situation().endpoint is None
        records.publish_endpoint({"address": "a", "port": 1})
        sibling.publish_endpoint({"address": "ä", "port": 2, "epoch": 2})
        assert records.situation().endpoint == {"address": "ä", "port": 2, "epoch": 2}

    def test_a_round_is_written_once(self, records: Records, sibling: Records) -> None:
        assert records.last_round() is None
        who = winners(lambda number: (records, sibling)[number % 2].claim_round(0, {"by": number, "places": [{}]}))
        assert len(who) == 1
        assert sibling.situation().round == {"by": who[0], "places": [{}]}
        assert records.claim_round(2, {})
        assert records.claim_round(10, {})
        assert sibling.last_round() == 10

    def test_the_situation_is_all_of_this_at_once(self, records: Records, sibling: Records) -> None:
        assert records.situation() == Situation(None, None, None)
        records.claim_round(4, {"places": [1]})
        records.publish_endpoint({"port": 1})
        for _ in range(2):
            assert sibling.situation() == Situation({"port": 1}, 4, {"places": [1]})
        assert sibling.situation(known_round=4) == Situation({"port": 1}, 4, None)
        assert sibling.situation(known_round=3) == Situation({"port": 1}, 4, {"places": [1]})

    def test_done_is_written_once(self, records: Records, sibling: Records) -> None:
        assert not records.is_done()
        assert len(winners(lambda number: (records, sibling)[number % 2].mark_done({"by": number}))) == 1
        assert records.is_done()
        assert sibling.is_done()
        assert not records.mark_done({})

    def test_a_failure_is_kept(self, records: Records, sibling: Records) -> None:
        assert records.failure() is None
        records.publish_failure({"rank": 3})
        assert sibling.failure() == {"rank": 3}

    def test_the_next_scope_begins_with_rounds_and_done_only(self, records: Records, successor: Records) -> None:
        records.claim_epoch(4, {})
        records.publish_endpoint({"port": 1})
        records.publish_failure({})
        records.claim_round(3, {})
        records.mark_done({})
        assert successor.newest_epoch() is None
        assert successor.situation().endpoint is None
        assert successor.failure() is None
        assert successor.last_round() == 3
        assert successor.is_done()
