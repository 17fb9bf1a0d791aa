"""The doctor asks a real etcd."""

from __future__ import annotations

from collections.abc import Callable

from slurm_elastic.doctor import gather
from slurm_elastic.rendezvous.records.etcd.config import Endpoint, EtcdConfig
from slurm_elastic.rendezvous.records.etcd.server import EtcdServer


def test_an_etcd_is_asked_and_its_time_taken(first_etcd: EtcdServer) -> None:
    endpoint = Endpoint(first_etcd.host, first_etcd.client_port)
    facts = gather.etcd_facts(EtcdConfig((endpoint,)))
    assert facts.error == ""
    assert facts.endpoint == str(endpoint)
    assert 0 < facts.seconds < 10


def test_an_etcd_that_does_not_answer_is_a_finding(dead_endpoint: Callable[[], Endpoint], monkeypatch) -> None:
    monkeypatch.setattr(gather, "_ETCD_SECONDS", 1.0)
    facts = gather.etcd_facts(EtcdConfig((dead_endpoint(),)))
    assert facts.seconds == 0
    assert "etcd" in facts.error
    assert "; " in facts.error
