"""Keys, and the parts of a transaction, in our own words instead of etcd's messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slurm_elastic.rendezvous.records.etcd._stubs import Rpc

MAX_OPERATIONS = 128
"""Operations that etcd takes in one transaction (its --max-txn-ops, by default)."""


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key as etcd holds it.

    Attributes:
        key: The whole key, with all prefixes.
        value: What it holds.
        create_revision: The revision of the store at which the key came to be.
        mod_revision: The revision at which it was last written.
        version: How often it was written since it came to be.
        lease: The id of the lease that it lives under; 0 for none.
    """

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int

    @classmethod
    def from_message(cls, message: Any) -> KeyValue:
        """Take over what etcd sent."""
        return cls(
            message.key,
            message.value,
            message.create_revision,
            message.mod_revision,
            message.version,
            message.lease,
        )


@dataclass(frozen=True, slots=True)
class Compare:
    """The key was last written at this revision; 0: there is no such key."""

    key: bytes | str
    mod_revision: int


@dataclass(frozen=True, slots=True)
class Put:
    """Write a key, under a lease unless that is 0."""

    key: bytes | str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Get:
    """Read a key, or all keys that start with it."""

    key: bytes | str
    prefix: bool = False


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a key, or all keys that start with it."""

    key: bytes | str
    prefix: bool = False


Operation = Put | Get | Delete


@dataclass(frozen=True, slots=True)
class TransactionResult:
    """The result of a transaction.

    Attributes:
        succeeded: Whether all comparisons held.
        responses: For each operation of the branch taken: the keys that a Get found, () for the others.
        revision: The revision of the store after it.
        retried: Whether it was sent more than once. Then an earlier attempt, whose answer was lost with its member,
            may be what made the comparison fail.
    """

    succeeded: bool
    responses: tuple[tuple[KeyValue, ...], ...]
    revision: int
    retried: bool


def to_bytes(key: bytes | str) -> bytes:
    """Return a key as etcd knows it: bytes."""
    return key.encode() if isinstance(key, str) else key


def prefix_end(prefix: bytes) -> bytes:
    """Return the end of the range that holds all keys with a prefix: the next key after the last of them.

    The rule is etcd's (etcd 3.4, clientv3/op.go, getPrefix): the last byte that can be raised is raised and what
    follows is cut off; when there is none, a zero byte stands for the end of all keys.
    """
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\0"


def key_range(key: bytes | str, prefix: bool) -> dict[str, bytes]:
    """Return the fields of a message that name a key, or all keys with a prefix."""
    start = to_bytes(key)
    return {"key": start, "range_end": prefix_end(start)} if prefix else {"key": start}


def transaction_request(
    rpc: Rpc, compare: tuple[Compare, ...], success: tuple[Operation, ...], failure: tuple[Operation, ...]
) -> Any:
    """Build etcd's message for a transaction."""
    etcd = rpc.etcd
    return etcd.TxnRequest(
        compare=[
            etcd.Compare(
                key=to_bytes(comparison.key),
                target=etcd.Compare.MOD,
                result=etcd.Compare.EQUAL,
                mod_revision=comparison.mod_revision,
            )
            for comparison in compare
        ],
        success=[_operation(rpc, operation) for operation in success],
        failure=[_operation(rpc, operation) for operation in failure],
    )


def transaction_result(response: Any, *, retried: bool) -> TransactionResult:
    """Take over what etcd answered to a transaction."""
    return TransactionResult(
        succeeded=response.succeeded,
        responses=tuple(
            tuple(KeyValue.from_message(kv) for kv in part.response_range.kvs) for part in response.responses
        ),
        revision=response.header.revision,
        retried=retried,
    )


def _operation(rpc: Rpc, operation: Operation) -> Any:
    etcd = rpc.etcd
    match operation:
        case Put(key, value, lease):
            return etcd.RequestOp(request_put=etcd.PutRequest(key=to_bytes(key), value=value, lease=lease))
        case Get(key, prefix):
            return etcd.RequestOp(request_range=etcd.RangeRequest(**key_range(key, prefix)))
        case Delete(key, prefix):
            return etcd.RequestOp(request_delete_range=etcd.DeleteRangeRequest(**key_range(key, prefix)))
