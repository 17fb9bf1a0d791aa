from __future__ import annotations

from slurm_elastic.rendezvous.records.etcd.client import shared_lease_id


def test_shared_lease_ids_are_the_same_everywhere_and_fit_int64() -> None:
    # A fixed number: agents of one run may be started by different Python processes and versions.
    assert shared_lease_id("/slurm-elastic/1/") == shared_lease_id(b"/slurm-elastic/1/") == 5183247734372233045
    ids = {shared_lease_id(str(number)) for number in range(1000)}
    assert len(ids) == 1000
    assert all(0 < one < 2**63 for one in ids)
