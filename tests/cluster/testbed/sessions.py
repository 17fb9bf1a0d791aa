"""The clusters of one test session, which end with it."""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType

from . import leftovers
from .cluster import Cluster
from .errors import TestbedError
from .lock import Lock
from .settings import STATE, Settings

_MOST_SESSIONS = 20


class Session:
    """A place among the test sessions of this machine, and one cluster for each set of settings.

    A session that was killed cannot take its clusters down: the kernel gives its place free, and the next
    session, whichever place it takes, removes what is left.
    """

    def __init__(self) -> None:
        self.name = ""
        self._lock: Lock | None = None
        self._clusters: dict[Settings, Cluster] = {}

    def __enter__(self) -> Session:
        for number in range(1, _MOST_SESSIONS + 1):
            lock = Lock(f"session{number}")
            if lock.acquire(wait=False):
                self.name, self._lock = f"session{number}", lock
                break
        else:
            raise TestbedError(f"{_MOST_SESSIONS} test sessions run already")
        remove_orphans(self.name)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._lock is not None
        try:
            _remove_clusters(self.name)
        finally:
            self._lock.release()

    def cluster(self, settings: Settings) -> Cluster:
        """The session's cluster with these settings, brought up when first asked for."""
        if settings not in self._clusters:
            parts = [self.name, settings.proctrack, *(["acct"] if settings.accounting else []), settings.topology]
            self._clusters[settings] = Cluster.up(replace(settings, name="-".join(filter(None, parts))))
        return self._clusters[settings]


def remove_orphans(own: str = "") -> None:
    """Take down the clusters of sessions that were killed, and those of one's own place."""
    sessions = {path.name.split("-")[0] for path in STATE.glob("session[0-9]*-*/")}
    for session in sessions:
        if session == own:
            _remove_clusters(session)
            continue
        lock = Lock(session)
        if lock.acquire(wait=False):
            try:
                _remove_clusters(session)
            finally:
                lock.release()


def _remove_clusters(session: str) -> None:
    for directory in STATE.glob(f"{session}-*/"):
        leftovers.remove(Settings(directory.name))
