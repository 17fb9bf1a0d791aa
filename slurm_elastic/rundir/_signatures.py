"""Signatures of records by the secret of a run: a code over the place of a record and its content.

A record in a file stays one JSON object for every program that reads it; its last field is the signature.
"""

from __future__ import annotations

import hashlib
import hmac

_CONTEXT = b"slurm_elastic run directory record 1\0"
_FIELD, _END = b'"signature": "', b'"}'
_LENGTH = len(_FIELD) + 2 * hashlib.sha256().digest_size + len(_END)


def signature(secret: bytes, context: bytes, key: str, content: bytes) -> bytes:
    """Return the signature of a record.

    Args:
        secret: The run's secret.
        context: The kind of store that keeps the record, so that none can be moved to another one.
        key: The record's name there.
        content: The record.
    """
    return hmac.digest(secret, context + key.encode() + b"\0" + content, "sha256")


def is_signature(shown: bytes, secret: bytes, context: bytes, key: str, content: bytes) -> bool:
    """Return True if this is the signature of a record; see `signature`."""
    return hmac.compare_digest(shown, signature(secret, context, key, content))


def sign(secret: bytes, key: str, content: bytes) -> bytes:
    """Return a JSON object with its signature as the last field.

    Raises:
        ValueError: The content does not look like a JSON object.
    """
    if not (content.startswith(b"{") and content.endswith(b"}")):
        raise ValueError(f"no JSON object: {content[:100]!r}")
    body = content[:-1]
    code = signature(secret, _CONTEXT, key, content).hex().encode()
    return b"".join((body, b", " if body != b"{" else b"", _FIELD, code, _END))


def verified(secret: bytes, key: str, signed: bytes) -> bytes | None:
    """Return the JSON object that `sign` was given; None without a valid signature for this key."""
    body, field = signed[:-_LENGTH], signed[-_LENGTH:]
    if not (field.startswith(_FIELD) and field.endswith(_END)):
        return None
    content = body.removesuffix(b", ") + b"}"
    shown = field[len(_FIELD) : -len(_END)]
    expected = signature(secret, _CONTEXT, key, content).hex().encode()
    return content if hmac.compare_digest(shown, expected) else None
