"""Records as values of keys: signed with the run's secret, and compressed where they are large."""

from __future__ import annotations

import hashlib
import json
import secrets
import zlib
from collections.abc import Mapping
from typing import Any

from slurm_elastic import typed_json
from slurm_elastic.rundir import is_signature, signature

_CONTEXT = b"slurm_elastic etcd record 1\0"
_DIGEST_BYTES = hashlib.sha256().digest_size
_LARGE = 1 << 16
"""Bytes of JSON from which on a value is compressed: etcd takes requests of 1.5 MiB at most (--max-request-bytes)."""


def signed_value(secret: bytes, key: str, record: Mapping[str, Any]) -> bytes:
    """Return a record as the value of a key.

    It has a random number, so that a writer whose answer was lost recognizes its own value.
    """
    content = json.dumps({"record": record, "nonce": secrets.token_hex(8)}).encode()
    if len(content) >= _LARGE:
        # A level that takes as long as the JSON itself; higher ones save little.
        content = zlib.compress(content, 3)
    return signature(secret, _CONTEXT, key, content) + content


def verified(secret: bytes, key: str, value: bytes) -> dict[str, Any] | None:
    """Return the record that is the value of a key; None if it was signed with another secret or for another key."""
    digest, content = value[:_DIGEST_BYTES], value[_DIGEST_BYTES:]
    if not is_signature(digest, secret, _CONTEXT, key, content):
        return None
    # JSON begins with a brace, what was compressed does not (RFC 1950).
    plain = content if content.startswith(b"{") else zlib.decompress(content)
    record: dict[str, Any] = typed_json.loads(plain)["record"]
    return record
