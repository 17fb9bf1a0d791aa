"""A private directory of one agent on its node, for files that nothing needs after its end, such as control pages."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


class NodeDirectory:
    """A directory of one agent, mode 0700.

    It is in /dev/shm: on a disk the kernel writes a shared page back every few seconds, and the next write to the page
    may wait for the disk. Without /dev/shm it is in TMPDIR or /tmp.

    An agent that was killed leaves its directory behind. In /dev/shm the next agent of the same user removes it: every
    agent locks its own (flock(2)), and the kernel unlocks those of ended processes. TMPDIR may be shared with other
    nodes, whose locks this node does not see, so abandoned directories stay there.

    Attributes:
        path: The path of the directory.
    """

    def __init__(self, purpose: str, memory: Path = SHARED_MEMORY) -> None:
        """Make the directory.

        Args:
            purpose: A part of the directory's name.
            memory: The directory of a file system in memory.

        Raises:
            OSError: The directory can be made neither there nor in TMPDIR or /tmp.
        """
        self._prefix = f"slurm-elastic-{purpose}-"
        self._fd = -1
        self.path = Path()
        try:
            self._remove_abandoned(memory)
            self._make(memory)
        except OSError:
            self._make(Path(tempfile.gettempdir()))

    def close(self) -> None:
        """Remove the directory with its content; a second call does nothing."""
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1

    def _make(self, base: Path) -> None:
        # Locked before it gets a name that other agents look for.
        hidden = Path(tempfile.mkdtemp(prefix=f".{self._prefix}", dir=base))
        self._fd = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # not every file system has locks
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
