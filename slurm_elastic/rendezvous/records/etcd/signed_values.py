"""Records as bytes that nobody without the run's secret can make."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from typing import Any

from slurm_elastic.rundir import is_signature, signature

__all__ = ["open_record", "seal_record"]

_CONTEXT = b"slurm_elastic etcd record 1\0"
_DIGEST_BYTES = hashlib.sha256().digest_size


def seal_record(secret: bytes, key: str, record: Mapping[str, Any]) -> bytes:
    """Return a record as what is kept under a key.

    Two seals of one record differ, so that a writer whose answer was lost can tell what it wrote itself.
    """
    content = json.dumps({"record": record, "nonce": secrets.token_hex(8)}).encode()
    return signature(secret, _CONTEXT, key, content) + content


def open_record(secret: bytes, key: str, sealed: bytes) -> dict[str, Any] | None:
    """Return the record that was sealed for a key, None if it was sealed by nobody who knows the secret."""
    digest, content = sealed[:_DIGEST_BYTES], sealed[_DIGEST_BYTES:]
    if not is_signature(digest, secret, _CONTEXT, key, content):
        return None
    record: dict[str, Any] = json.loads(content)["record"]
    return record
