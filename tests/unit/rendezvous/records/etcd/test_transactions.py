from __future__ import annotations

import pytest

from slurm_elastic.rendezvous.records.etcd.client import prefix_end, shared_lease_id


@pytest.mark.parametrize(
    ("prefix", "end"),
    [(b"a", b"b"), (b"a/", b"a0"), (b"a\xff", b"b"), (b"\xff\xff", b"\0"), (b"", b"\0")],
)
def test_prefix_ends_before_the_next_key_without_it(prefix: bytes, end: bytes) -> None:
    assert prefix_end(prefix) == end


def test_shared_lease_ids_are_the_same_everywhere_and_fit_int64() -> None:
    # A fixed number: agents of one run may be started by different Python processes and versions.
    assert shared_lease_id("/slurm-elastic/1/") == shared_lease_id(b"/slurm-elastic/1/") == 5183247734372233045
    ids = {shared_lease_id(str(number)) for number in range(1000)}
    assert len(ids) == 1000
    assert all(0 < one < 2**63 for one in ids)
