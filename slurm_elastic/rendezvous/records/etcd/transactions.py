"""Keys as etcd holds them, and the parts of a transaction, as etcd's own messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from slurm_elastic.rendezvous.records.etcd._stubs import load_rpc

MAX_OPERATIONS = 128
"""Operations that etcd takes in one transaction (its --max-txn-ops, by default)."""


class KeyValue(Protocol):
    """A key as etcd holds it, etcd's message of this name.

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


@dataclass(frozen=True, slots=True)
class TransactionResult:
    """The result of a transaction.

    Attributes:
        succeeded: Whether all comparisons held.
        responses: For each operation of the branch taken: the keys that a read found, () for the others.
        revision: The revision of the store after it.
        retried: Whether it was sent more than once. Then an earlier attempt, whose answer was lost with its member,
            may be what made the comparison fail.
    """

    succeeded: bool
    responses: Sequence[Sequence[KeyValue]]
    revision: int
    retried: bool


def unchanged(key: bytes | str, mod_revision: int) -> object:
    """Compare: the key was last written at this revision; 0: there is no such key."""
    etcd = load_rpc().etcd
    return etcd.Compare(
        key=to_bytes(key), target=etcd.Compare.MOD, result=etcd.Compare.EQUAL, mod_revision=mod_revision
    )


def put(key: bytes | str, value: bytes, lease: int = 0) -> object:
    """Write a key, under a lease unless that is 0."""
    etcd = load_rpc().etcd
    return etcd.RequestOp(request_put=etcd.PutRequest(key=to_bytes(key), value=value, lease=lease))


def get(key: bytes | str, prefix: bool = False) -> object:
    """Read a key, or all keys that start with it."""
    etcd = load_rpc().etcd
    return etcd.RequestOp(request_range=etcd.RangeRequest(**key_range(key, prefix)))


def delete(key: bytes | str) -> object:
    """Delete a key."""
    etcd = load_rpc().etcd
    return etcd.RequestOp(request_delete_range=etcd.DeleteRangeRequest(key=to_bytes(key)))


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
