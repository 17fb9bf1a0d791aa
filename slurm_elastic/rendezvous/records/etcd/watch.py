"""The content of a key or a prefix, and every change to it."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

from slurm_elastic.rendezvous.records.etcd.errors import EtcdCompactedError, EtcdError
from slurm_elastic.rendezvous.records.etcd.failover_channel import Limits
from slurm_elastic.rendezvous.records.etcd.transactions import KeyValue
from slurm_elastic.rendezvous.records.etcd.watch_stream import Event, EventKind, Subscription, WatchStream, take_events

__all__ = ["Watch"]

Read = Callable[[int, Limits], tuple[tuple[KeyValue, ...], int]]
"""Reads the keys as they were at a revision (0: now) and tells which revision that was."""


class Watch:
    """The content of a key or a prefix, and every change to it, through lost members and compaction.

    Changes that were compacted away before they could be read are made up for from what is there now: of several
    changes of one key only the last is seen then, and deletions are told as long as the key was known.

    Attributes:
        initial: The keys at the beginning.
        revision: The revision up to which all is told.
    """

    def __init__(
        self,
        stream: WatchStream,
        fields: dict[str, bytes],
        read: Read,
        after_revision: int | None,
        limits: Limits,
    ) -> None:
        self._stream = stream
        self._fields = fields
        self._read = read
        self._sink: queue.SimpleQueue[Any] = queue.SimpleQueue()
        try:
            self.initial, self.revision = read(after_revision or 0, limits)
        except EtcdCompactedError:
            self.initial, self.revision = read(0, limits)
        self._known = {found.key for found in self.initial}
        self._subscription = self._subscribe()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def next(self, timeout: float, interrupted: Callable[[], bool] | None = None) -> tuple[Event, ...]:
        """Return the next changes, in order; () if there were none within ``timeout`` seconds.

        Raises:
            EtcdInterruptedError: The hook said so.
            EtcdPermissionError: The keys may not be read.
        """
        limits = Limits(timeout, interrupted)
        try:
            events = take_events(self._sink, time.monotonic() + timeout, limits)
        except EtcdCompactedError as compacted:
            try:
                events = self._catch_up(limits)
            except EtcdError:
                self._sink.put(compacted)
                raise
        for event in events:
            self.revision = max(self.revision, event.mod_revision)
            (self._known.add if event.kind is EventKind.PUT else self._known.discard)(event.key)
        return events

    def close(self) -> None:
        """Stop to watch."""
        self._stream.remove(self._subscription)

    def _subscribe(self) -> Subscription:
        subscription = Subscription(self._fields, self.revision + 1, self._sink)
        self._stream.add(subscription)
        return subscription

    def _catch_up(self, limits: Limits) -> tuple[Event, ...]:
        present, revision = self._read(0, limits)
        gone = sorted(self._known - {found.key for found in present})
        events = [Event(EventKind.DELETE, key, b"", revision) for key in gone]
        events += [
            Event(EventKind.PUT, found.key, found.value, found.mod_revision)
            for found in sorted(present, key=lambda found: found.mod_revision)
            if found.mod_revision > self.revision
        ]
        self.revision = revision
        self._subscription = self._subscribe()
        return tuple(events)
