"""Claims of an agent on its node until its end: the node itself, and a private directory.

The kernel frees both however the agent ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from slurm_elastic.errors import UsageError
from slurm_elastic.slurm import SlurmJob


@contextlib.contextmanager
def claim(secret: bytes, node: str, job: SlurmJob | None) -> Iterator[None]:
    """Claim this node for this agent, during a with block.

    The claim is an abstract socket address, unix(7): the kernel frees it however the agent ends, and it needs neither
    locks of a network file system nor a file that could be left behind. The address is in the network namespace, which
    nodes may share, so it contains the node's name. Other users cannot guess it without the secret.

    Outside Slurm a second agent cannot be distinguished from another run, so there is no claim.

    Raises:
        UsageError: Another agent has claimed the node.
    """
    if job is None:
        yield
        return
    words = "\0".join((node, job.job_id, str(job.restart_count), job.step_id or "batch"))
    address = f"\0slurm_elastic.{hmac.digest(secret, words.encode(), 'sha256').hex()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as claimed:
        try:
            claimed.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise UsageError(
                f"an agent of job {job.job_id} is running on {node} already; start one per node: "
                "srun --ntasks-per-node=1"
            ) from None
        yield


SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "slurm-elastic-agent-"


@contextlib.contextmanager
def node_directory(memory: Path = SHARED_MEMORY) -> Iterator[Path]:
    """Make a directory of this agent, mode 0700, for sockets, pipes and control pages; remove it after the with block.

    It is in /dev/shm: on a disk the kernel writes a shared page back every few seconds, and the next write to the page
    may wait for the disk. Without /dev/shm it is in TMPDIR or /tmp.

    An agent that was killed leaves its directory behind. In /dev/shm the next agent of the same user removes it: every
    agent locks its own (flock(2)), and the kernel unlocks those of ended processes. TMPDIR may be shared with other
    nodes, whose locks this node does not see, so abandoned directories stay there.

    Raises:
        UsageError: The directory can be made in neither.
    """
    try:
        _remove_abandoned(memory)
        directory, descriptor = _make_locked(memory)
    except OSError:
        try:
            directory, descriptor = _make_locked(Path(tempfile.gettempdir()))
        except OSError as error:
            raise UsageError(
                f"no directory can be made in {memory} or TMPDIR: {error.strerror}; make room there, or set TMPDIR"
            ) from None
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(descriptor)


def _make_locked(base: Path) -> tuple[Path, int]:
    # Locked before it gets a name that other agents look for.
    hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=base))
    descriptor = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # not every file system has locks
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return hidden.rename(base / hidden.name[1:]), descriptor


def _remove_abandoned(base: Path) -> None:
    for path in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.stat(follow_symlinks=False).st_uid != os.getuid():
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
