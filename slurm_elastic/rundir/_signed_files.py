"""The secret of a run, and records in files, signed by it: a code over the place of a record and its content.

A record stays one JSON object for every program that reads it; its last field is the signature. What others put in its
place counts as missing.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from slurm_elastic import typed_json
from slurm_elastic.errors import UsageError
from slurm_elastic.ownership import NEW_FILE, is_writable_by_others, owner_of_new_files
from slurm_elastic.rundir import _atomic_files
from slurm_elastic.rundir._atomic_files import RecordError
from slurm_elastic.text import printable

_CONTEXT = b"slurm_elastic run directory record 1\0"
_FIELD, _END = b'"signature": "', b'"}'
_LENGTH = len(_FIELD) + 2 * hashlib.sha256().digest_size + len(_END)


def signature(secret: bytes, context: bytes, key: str, content: bytes) -> bytes:
    """Return the signature of a record.

    Args:
        context: The kind of store that keeps the record, so that none can be moved to another one.
        key: The record's name there.
    """
    return hmac.digest(secret, context + key.encode() + b"\0" + content, "sha256")


def is_signature(shown: bytes, secret: bytes, context: bytes, key: str, content: bytes) -> bool:
    """Return True if this is the signature of a record; see `signature`."""
    return hmac.compare_digest(shown, signature(secret, context, key, content))


def sign(secret: bytes, key: str, content: bytes) -> bytes:
    """Return a JSON object with its signature as the last field."""
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


logger = logging.getLogger("slurm_elastic")

_REMOVAL = b"slurm_elastic run directory removal 1\0"
_MOST_LOGGED = 16
_logged: set[str] = set()
"""Foreign files and keys that were named in the log; of further ones it says nothing."""
_BYTES = 32
_LINE = re.compile(rb"[0-9a-f]{%d}\n" % (2 * _BYTES))


# The signed records of a run directory; the path of each in it is its key. They raise OSError if the disk fails.
def publish(directory: Path, secret: bytes, path: Path, content: bytes) -> None:
    """Create or replace a record."""
    _atomic_files.publish_file(path, sign(secret, _key(directory, path), content))


def read(directory: Path, path: Path) -> bytes | None:
    """Return a record without its signature; None if there is none that this run has written.

    Raises:
        RecordError: This user has written it, and it is not one JSON object, as after a power loss.
    """
    try:
        content = _atomic_files.read_file(path)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ELOOP, errno.EFBIG) or (
            error.errno == errno.EACCES and not _is_own(path)
        ):
            return log_drop(str(path), os.strerror(error.errno))
        raise
    if content is None:
        return None
    secret, key = _secret_of_reader(directory), _key(directory, path)
    if secret:
        plain = verified(secret, key, content)
        if plain is None:
            # The directory may have been removed and made again.
            _known_secret.cache_clear()
            plain = verified(_secret_of_reader(directory) or b"\0", key, content)
        if plain is not None:
            return plain
    if not _is_json_object(content):
        if secret is not None and not is_writable_by_others(path.parent):
            fix = "end the run, remove the file, and submit again"
            raise RecordError(
                f"{path} is not one complete JSON object: truncated, or written by another program; {fix}"
            )
        return log_drop(str(path), "no JSON object")
    return content if secret is None else log_drop(str(path), "no signature of this run")


def counts(directory: Path, path: Path) -> bool:
    """Return True if this run has written a record, even if it was cut short since."""
    try:
        return read(directory, path) is not None
    except RecordError:
        return True


def claim(directory: Path, secret: bytes, path: Path, content: bytes, mode: int = NEW_FILE) -> bool:
    """Create a record exclusively. Returns False if another process of this run was first."""
    signed = sign(secret, _key(directory, path), content)
    if _atomic_files.claim_file(path, signed, mode):
        return True
    if counts(directory, path):
        return False
    # A process must create this file, whose name follows from the secret, before it removes what is foreign.
    # Otherwise a slow one could remove what a faster one has written meanwhile.
    name = signature(secret, _REMOVAL, _key(directory, path), b"").hex()
    removal = path.with_name(f".{path.name}.{name[:32]}")
    if not _atomic_files.claim_file(removal, b""):
        raise PermissionError(errno.EPERM, "not written by this run; remove it", str(path))
    try:
        if not counts(directory, path):
            with contextlib.suppress(FileNotFoundError):
                path.rename(path.with_name(f".{path.name}.foreign.{secrets.token_hex(4)}"))
        return _atomic_files.claim_file(path, signed, mode)
    finally:
        removal.unlink(missing_ok=True)


def _secret_of_reader(directory: Path) -> bytes | None:
    """Return the secret of the run; None if this user may not read it, and b"" if there is none."""
    try:
        return _known_secret(directory / "secret")
    except FileNotFoundError:
        return b""
    except (UsageError, PermissionError):
        return None


def _key(directory: Path, path: Path) -> str:
    return path.relative_to(directory).as_posix()


def _is_own(path: Path) -> bool:
    return path.lstat().st_uid in (os.geteuid(), path.parent.stat().st_uid)


def _is_json_object(content: bytes) -> bool:
    try:
        return isinstance(typed_json.loads(content), dict)
    except ValueError:
        return False


def log_drop(name: str, why: str) -> bytes | None:
    """Log, once, that a file, or a key in etcd, counts as missing; return None, what is read in its place."""
    if name not in _logged and len(_logged) < _MOST_LOGGED:
        _logged.add(name)
        more = "; more are dropped without a word" if len(_logged) == _MOST_LOGGED else ""
        logger.warning("dropped %s: it was not written by this run (%s)%s", printable(name), why, more)
    return None


def load_or_create_secret(path: Path, draw: Callable[[], bytes] = lambda: secrets.token_bytes(_BYTES)) -> bytes:
    """Return the secret in a file. The first process creates it; all processes get the same.

    Raises:
        UsageError: Other users can read the file, it belongs to another user, or it contains no secret.
        OSError: The file can be neither created nor read.
    """
    if not _atomic_files.exists(path):
        _atomic_files.claim_file(path, draw().hex().encode() + b"\n", mode=0o600)
    return _load(path)


@functools.lru_cache(maxsize=64)
def _known_secret(path: Path) -> bytes:
    """Return a secret that this process may have read already, so that each record costs one file and not two."""
    return _load(path)


def _load(path: Path) -> bytes:
    # Opening another user's file fails without a reason, so the owner is checked before and after opening it.
    _require_private(path, path.lstat())
    descriptor = _atomic_files.patiently(lambda: os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
    try:
        status = os.fstat(descriptor)
        content = os.read(descriptor, 2 * _BYTES + 2)
    finally:
        os.close(descriptor)
    _require_private(path, status)
    if not _LINE.fullmatch(content):
        raise UsageError(f"{path} is not the secret of a run; remove it while no agent of the run is alive")
    return bytes.fromhex(content.decode())


def _require_private(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path} is not a regular file; remove it")
    if status.st_uid != os.geteuid() and status.st_uid != owner_of_new_files(path.parent):
        raise UsageError(f"{path} belongs to another user (uid {status.st_uid}); use a run directory of your own")
    if status.st_mode & 0o077:
        raise UsageError(
            f"{path} is open to others (mode {stat.S_IMODE(status.st_mode):04o}); chmod 600 it, or take a "
            "run directory on a file system that keeps permissions"
        )
