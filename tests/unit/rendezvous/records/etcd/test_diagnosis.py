from __future__ import annotations

import pytest

from slurm_elastic.errors import UsageError
from slurm_elastic.rendezvous.records.etcd import errors
from slurm_elastic.rendezvous.records.etcd.config import Endpoint, EtcdConfig

CONFIG = EtcdConfig((Endpoint("a", 1),), user="me", password="secret")


@pytest.mark.parametrize(
    ("code", "details"),
    [
        ("UNAUTHENTICATED", "etcdserver: invalid auth token"),
        ("INVALID_ARGUMENT", "etcdserver: revision of auth store is old"),
        ("UNAVAILABLE", "failed to connect: Connection refused"),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded"),
        ("CANCELLED", "Channel closed!"),
        ("RESOURCE_EXHAUSTED", "etcdserver: too many requests"),
        ("UNAVAILABLE", "etcdserver: leader changed"),
        ("UNAVAILABLE", "etcdserver: no leader"),
        ("DEADLINE_EXCEEDED", "context deadline exceeded"),
        ("UNAVAILABLE", "etcdserver: request timed out, possibly due to connection lost"),
    ],
)
def test_failures_to_try_again(code: str, details: str) -> None:
    assert errors.diagnose_answer(code, details, CONFIG) is None


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        ("NOT_FOUND", "etcdserver: requested lease not found", errors.EtcdLeaseLostError),
        ("FAILED_PRECONDITION", "etcdserver: lease already exists", errors.EtcdLeaseExistsError),
        ("PERMISSION_DENIED", "etcdserver: permission denied", errors.EtcdPermissionError),
        ("UNIMPLEMENTED", "unknown service etcdserverpb.KV", errors.EtcdEndpointError),
        ("INVALID_ARGUMENT", "etcdserver: duplicate key given in txn request", errors.EtcdError),
    ],
)
def test_failures_for_the_caller(code: str, details: str, kind: type[errors.EtcdError]) -> None:
    error = errors.diagnose_answer(code, details, CONFIG)
    assert type(error) is kind
    assert "\n" not in str(error)
    assert "secret" not in str(error)


def test_person_s_mistakes_are_usage_errors() -> None:
    assert isinstance(errors.diagnose_answer("", "etcdserver: permission denied", CONFIG), UsageError)
    assert isinstance(errors.diagnose_answer("", "etcdserver: mvcc: database space exceeded", CONFIG), UsageError)
    assert not isinstance(errors.diagnose_answer("", "etcdserver: requested lease not found", CONFIG), UsageError)


def test_reason_of_a_loss_is_a_few_words() -> None:
    details = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused"
    assert errors.short_reason("UNAVAILABLE", details) == "connection refused"
    assert errors.short_reason("DEADLINE_EXCEEDED", "Deadline Exceeded") == "no answer in time"
    assert errors.short_reason("CANCELLED", "") == "cancelled"
