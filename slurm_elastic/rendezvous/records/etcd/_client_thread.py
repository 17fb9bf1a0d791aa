"""The threads of an etcd client, which start with their first work."""

from __future__ import annotations

import threading

__all__ = ["ClientThread"]


class ClientThread:
    """A thread that sleeps on a condition as long as it has nothing to do.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._condition = threading.Condition()
        self._closed = False
        self._name = name
        self._thread: threading.Thread | None = None

    def _wake(self) -> None:
        """Start the thread, or have it look for new work; the caller holds the condition."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._condition.notify()

    def stop(self) -> None:
        """Have the thread end; a call of its own ends when the connection is closed."""
        with self._condition:
            self._closed = True
            self._condition.notify()

    def join(self) -> None:
        """Wait for the thread's end."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        raise NotImplementedError
