from __future__ import annotations

import pytest

from slurm_elastic.errors import UsageError
from slurm_elastic.rendezvous.records.etcd.config import Endpoint, EtcdConfig
from slurm_elastic.rendezvous.records.etcd.errors import (
    EtcdEndpointError,
    EtcdError,
    EtcdLeaseExistsError,
    EtcdLeaseLostError,
    EtcdPermissionError,
    Retry,
    diagnose_answer,
    short_reason,
)

CONFIG = EtcdConfig((Endpoint("a", 1),), user="me", password="secret")


@pytest.mark.parametrize(
    ("code", "details", "outcome"),
    [
        ("UNAUTHENTICATED", "etcdserver: invalid auth token", Retry.NEW_TOKEN),
        ("INVALID_ARGUMENT", "etcdserver: revision of auth store is old", Retry.NEW_TOKEN),
        ("UNAVAILABLE", "failed to connect: Connection refused", Retry.OTHER_MEMBER),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", Retry.OTHER_MEMBER),
        ("CANCELLED", "Channel closed!", Retry.OTHER_MEMBER),
        ("RESOURCE_EXHAUSTED", "etcdserver: too many requests", Retry.OTHER_MEMBER),
        ("UNAVAILABLE", "etcdserver: leader changed", Retry.NO_LEADER),
        ("UNAVAILABLE", "etcdserver: no leader", Retry.NO_LEADER),
        ("DEADLINE_EXCEEDED", "context deadline exceeded", Retry.NO_LEADER),
        ("UNAVAILABLE", "etcdserver: request timed out, possibly due to connection lost", Retry.NO_LEADER),
    ],
)
def test_failures_to_try_again(code: str, details: str, outcome: Retry) -> None:
    assert diagnose_answer(code, details, CONFIG) is outcome


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        ("NOT_FOUND", "etcdserver: requested lease not found", EtcdLeaseLostError),
        ("FAILED_PRECONDITION", "etcdserver: lease already exists", EtcdLeaseExistsError),
        ("PERMISSION_DENIED", "etcdserver: permission denied", EtcdPermissionError),
        ("UNIMPLEMENTED", "unknown service etcdserverpb.KV", EtcdEndpointError),
        ("INVALID_ARGUMENT", "etcdserver: duplicate key given in txn request", EtcdError),
    ],
)
def test_failures_for_the_caller(code: str, details: str, kind: type[EtcdError]) -> None:
    error = diagnose_answer(code, details, CONFIG)
    assert type(error) is kind
    assert "\n" not in str(error)
    assert "secret" not in str(error)


def test_person_s_mistakes_are_usage_errors() -> None:
    assert isinstance(diagnose_answer("", "etcdserver: permission denied", CONFIG), UsageError)
    assert isinstance(diagnose_answer("", "etcdserver: mvcc: database space exceeded", CONFIG), UsageError)
    assert not isinstance(diagnose_answer("", "etcdserver: requested lease not found", CONFIG), UsageError)


def test_reason_of_a_loss_is_a_few_words() -> None:
    details = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused"
    assert short_reason("UNAVAILABLE", details) == "connection refused"
    assert short_reason("DEADLINE_EXCEEDED", "Deadline Exceeded") == "no answer in time"
    assert short_reason("CANCELLED", "") == "cancelled"
