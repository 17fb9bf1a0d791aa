"""Rounds of whole segments of one failure domain."""

from __future__ import annotations

import pytest

from slurm_elastic.errors import UsageError
from slurm_elastic.rendezvous.options import RendezvousOptions


def test_valid_numbers_are_multiples_of_the_segment() -> None:
    pairs = RendezvousOptions.from_config({"segment": 2})
    assert (pairs.node_range(1, 8), tuple(pairs.valid_nodes)[:4]) == ((2, 8), (2, 4, 6, 8))
    assert RendezvousOptions.from_config({"segment": 4, "node_unit": 6}).node_range(1, 40) == (12, 36)
    assert RendezvousOptions.from_config({"segment": 4, "valid_nodes": "2,4,6,8"}).valid_nodes == (4, 8)
    with pytest.raises(UsageError, match="--valid-nodes 2,6 has no multiple of --segment 4"):
        RendezvousOptions.from_config({"segment": 4, "valid_nodes": "2,6"})
    with pytest.raises(UsageError, match="--segment 'x' is no number of nodes"):
        RendezvousOptions.from_config({"segment": "x"})
