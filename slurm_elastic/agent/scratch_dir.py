"""A private directory of one agent on its node, for what dies with the agent: control pages, the watchdog's pipe."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["NodeDirectory"]

_SHARED_MEMORY = Path("/dev/shm")


class NodeDirectory:
    """A directory of one agent, mode 0700.

    It is in /dev/shm, where a page is memory and nothing else: on a disk the kernel writes a shared page back every few
    seconds, and the next write to it may wait for the disk. Without /dev/shm it is in TMPDIR or /tmp.

    An agent that was killed leaves its directory behind. In /dev/shm the next one of the same user removes it: every
    agent locks its own (flock(2)), and the kernel unlocks what belongs to the dead. TMPDIR may be shared with nodes
    whose locks are not seen here, so there it stays.

    Attributes:
        path: of the directory.
    """

    def __init__(self, purpose: str, base: Path | None = None) -> None:
        """Make the directory.

        Args:
            purpose: part of the directory's name.
            base: the directory to make it in; for tests.

        Raises:
            OSError: it can be made nowhere.
        """
        self._prefix = f"slurm-elastic-{purpose}-"
        self._fd = -1
        self.path = Path()
        memory = _SHARED_MEMORY if base is None else base
        try:
            self._remove_abandoned(memory)
            self._make(memory)
        except OSError:
            if base is not None:
                raise
            self._make(Path(tempfile.gettempdir()))

    def close(self) -> None:
        """Remove it with all that is in it. Called again, it does nothing."""
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1

    def _make(self, base: Path) -> None:
        # Locked before it gets a name that others look for.
        hidden = Path(tempfile.mkdtemp(prefix=f".{self._prefix}", dir=base))
        self._fd = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # not every file system can
            fcntl.flock(self._fd, fcntl.LOCK_SH)
        self.path = hidden.rename(base / hidden.name[1:])

    def _remove_abandoned(self, base: Path) -> None:
        for path in base.glob(f"{self._prefix}*"):
            with contextlib.suppress(OSError):
                if path.stat(follow_symlinks=False).st_uid != os.getuid():
                    continue
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(descriptor)
