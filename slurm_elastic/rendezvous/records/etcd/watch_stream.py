"""Watches: one stream for all of a client's, which is opened anew at another member when its own fails."""

from __future__ import annotations

import enum
import queue
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slurm_elastic.rendezvous.records.etcd._client_thread import ClientThread
from slurm_elastic.rendezvous.records.etcd._stubs import load_rpc
from slurm_elastic.rendezvous.records.etcd.diagnosis import Retry, diagnose_answer
from slurm_elastic.rendezvous.records.etcd.errors import EtcdCompactedError, EtcdError
from slurm_elastic.rendezvous.records.etcd.failover_channel import INTERRUPT_SECONDS, Connection, Limits

__all__ = ["Event", "EventKind", "Subscription", "WatchStream", "take_events"]

_AUTHENTICATION_SECONDS = 3.0


class EventKind(enum.Enum):
    """The kind of a change to a key."""

    PUT = "put"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Event:
    """One change of one key.

    Attributes:
        kind: Whether it was written or deleted (or its lease expired).
        key: The whole key.
        value: What it holds now; empty after a deletion.
        mod_revision: The revision of the change.
    """

    kind: EventKind
    key: bytes
    value: bytes
    mod_revision: int


class Subscription:
    """Interest in a range of keys, from a revision on.

    Attributes:
        sink: Gets tuples of events in the order of their revisions, each event exactly once; or an EtcdError, after
            which nothing more comes. EtcdCompactedError says that changes were missed for good.
    """

    def __init__(self, fields: dict[str, bytes], next_revision: int, sink: queue.SimpleQueue[Any]) -> None:
        self.fields = fields
        self.next_revision = next_revision
        self.sink = sink


class WatchStream(ClientThread):
    """The thread that reads a client's stream of watch answers and hands each to its subscription.

    Attributes:
        subscriptions: Those that are not removed yet.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__("etcd-watch")
        self._connection = connection
        self._rpc = load_rpc()
        self.subscriptions: list[Subscription] = []
        self._stream: _Stream | None = None

    def add(self, subscription: Subscription) -> None:
        """Begin to watch."""
        with self._condition:
            self.subscriptions.append(subscription)
            if self._stream is not None:
                self._stream.create(subscription)
            self._wake()

    def remove(self, subscription: Subscription) -> None:
        """Stop to watch; removing twice does no harm."""
        with self._condition:
            if subscription in self.subscriptions:
                self.subscriptions.remove(subscription)
                if self._stream is not None:
                    self._stream.cancel(subscription)

    def _run(self) -> None:
        failures = 0
        while True:
            with self._condition:
                while not self.subscriptions and not self._closed:
                    self._condition.wait()
                if self._closed:
                    return
            try:
                failures = 0 if self._read() else failures + 1
            except EtcdError as error:
                self._fail_all(error)
                continue
            if failures:
                self._connection.pause(failures, float("inf"), Limits(float("inf")))

    def _read(self) -> bool:
        """Read one stream to its end; return whether it brought anything."""
        member = self._connection.member()
        stream: _Stream | None = None
        answered = False
        try:
            deadline = time.monotonic() + _AUTHENTICATION_SECONDS
            self._connection.authenticate(member, deadline, Limits(_AUTHENTICATION_SECONDS))
            stream = _Stream(self._rpc, member)
            with self._condition:
                if self._closed:
                    return True
                self._stream = stream
                for subscription in self.subscriptions:
                    stream.create(subscription)
            for response in stream.call:
                if not answered:
                    answered = True
                    self._connection.note_answer(member)
                if not self._handle(stream, response):
                    member.token = None
                    return False
        except ValueError:
            # As in Connection.call: another thread has just left the member.
            return False
        except self._rpc.grpc.RpcError as error:
            outcome = self._connection.judge(member, error, Limits(_AUTHENTICATION_SECONDS))
            if isinstance(outcome, EtcdError) and not self._closed:
                raise outcome from None
        finally:
            with self._condition:
                self._stream = None
            if stream is not None:
                stream.end()
        return answered

    def _handle(self, stream: _Stream, response: Any) -> bool:
        """Hand on one answer; return False when the stream has to be opened anew with a new token."""
        with self._condition:
            subscription = stream.owner(response)
            if subscription is None or subscription not in self.subscriptions:
                return True
            if response.canceled:
                if response.compact_revision:
                    error: Retry | EtcdError = EtcdCompactedError("the etcd revision has been compacted away")
                else:
                    error = diagnose_answer("", response.cancel_reason, self._connection.config)
                if error is Retry.NEW_TOKEN:
                    return False
                self.subscriptions.remove(subscription)
                subscription.sink.put(error)
            elif response.events:
                subscription.next_revision = response.events[-1].kv.mod_revision + 1
                subscription.sink.put(tuple(self._event(event) for event in response.events))
            elif not response.created:
                # A progress notice: nothing happened up to here. It keeps an idle watch ahead of compaction.
                subscription.next_revision = max(subscription.next_revision, response.header.revision + 1)
            return True

    def _event(self, event: Any) -> Event:
        kind = EventKind.DELETE if event.type == self._rpc.kv.Event.DELETE else EventKind.PUT
        return Event(kind, event.kv.key, event.kv.value, event.kv.mod_revision)

    def _fail_all(self, error: EtcdError) -> None:
        with self._condition:
            for subscription in self.subscriptions:
                subscription.sink.put(error)
            self.subscriptions.clear()


class _Stream:
    """One open stream. etcd answers requests to create a watch in the order in which they were sent."""

    def __init__(self, rpc: Any, member: Any) -> None:
        self._etcd = rpc.etcd
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pending: deque[Subscription] = deque()
        self._owners: dict[int, Subscription] = {}
        self.call = member.stubs["Watch"].Watch(self._sent(), metadata=member.metadata)

    def create(self, subscription: Subscription) -> None:
        request = self._etcd.WatchCreateRequest(
            start_revision=subscription.next_revision, progress_notify=True, **subscription.fields
        )
        self._pending.append(subscription)
        self._requests.put(self._etcd.WatchRequest(create_request=request))

    def cancel(self, subscription: Subscription) -> None:
        for watch_id, owner in self._owners.items():
            if owner is subscription:
                self._cancel(watch_id)

    def owner(self, response: Any) -> Subscription | None:
        """Return whose answer this is."""
        if response.created:
            subscription = self._pending.popleft()
            if not response.canceled:
                self._owners[response.watch_id] = subscription
            return subscription
        if response.canceled:
            return self._owners.pop(response.watch_id, None)
        return self._owners.get(response.watch_id)

    def end(self) -> None:
        self._requests.put(None)
        self.call.cancel()

    def _cancel(self, watch_id: int) -> None:
        request = self._etcd.WatchCancelRequest(watch_id=watch_id)
        self._requests.put(self._etcd.WatchRequest(cancel_request=request))

    def _sent(self) -> Iterator[Any]:
        while (request := self._requests.get()) is not None:
            yield request


def take_events(sink: queue.SimpleQueue[Any], deadline: float, limits: Limits) -> tuple[Event, ...]:
    """Return what a subscription brought, () if nothing came until the deadline; raise what it raised."""
    while True:
        limits.check()
        left = deadline - time.monotonic()
        try:
            item = sink.get(timeout=max(0.0, left if limits.interrupted is None else min(left, INTERRUPT_SECONDS)))
        except queue.Empty:
            if time.monotonic() >= deadline:
                return ()
            continue
        if isinstance(item, EtcdError):
            raise item
        return tuple(item)
