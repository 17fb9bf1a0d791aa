"""Calls to etcd that survive the loss of a member.

etcd3 0.12.0 knows one host, never reconnects its streams and has no new token after the old one; so this module uses
etcd3's messages and stubs over gRPC channels of its own. There is one channel at a time, to one member; when a call
on it fails for a reason that another member might not have, all calls move on to the next member.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slurm_elastic.rendezvous.records.etcd._stubs import load_rpc
from slurm_elastic.rendezvous.records.etcd.config import Endpoint, EtcdConfig
from slurm_elastic.rendezvous.records.etcd.diagnosis import (
    Retry,
    diagnose_answer,
    is_unknown_host,
    probe_endpoints,
    short_reason,
)
from slurm_elastic.rendezvous.records.etcd.errors import (
    EtcdEndpointError,
    EtcdError,
    EtcdInterruptedError,
    EtcdUnavailableError,
    EtcdUnknownHostError,
)
from slurm_elastic.rendezvous.records.etcd.member import INTERRUPT_SECONDS, Member

__all__ = ["INTERRUPT_SECONDS", "Connection", "Limits"]

logger = logging.getLogger(__name__)

_FIRST_SECONDS = 1.0
"""How long each of the first two attempts at each member may take.

Members lose each request between the end of their leader and the moment at which they notice it, 1 to 2 s later
(etcd 3.4 and 3.5: a proposal, or the index of a read, goes to the leader once). They answer only a new request.
"""

_MOST_UNANSWERED = 2
"""Calls in a row without an answer after which a client leaves a member that is there and has a leader."""

_FAIR_SECONDS = 1.0
"""A call with a shorter limit that ends without an answer proves nothing about the member."""

_BACKOFF_SECONDS = (0.05, 1.0)
"""Pause after all members have failed in turn: the first, and the longest after doublings."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The time that a caller is ready to wait.

    Attributes:
        timeout: Seconds after which a call that found no answer fails.
        interrupted: Asked every 0.1 s; when it says True, the wait ends with EtcdInterruptedError.
    """

    timeout: float
    interrupted: Callable[[], bool] | None = None

    def check(self) -> None:
        """Raise EtcdInterruptedError when the hook says so."""
        if self.interrupted is not None and self.interrupted():
            raise EtcdInterruptedError("the wait for etcd was interrupted")


class Connection:
    """All calls of a client; safe to use from several threads, not after a fork.

    Raises:
        UsageError: etcd3 cannot be used in this process.
    """

    def __init__(self, config: EtcdConfig) -> None:
        self.config = config
        self._rpc = load_rpc()
        self._lock = threading.Lock()
        # Clients start at different members, so that 1,000 agents do not all sit on the first of the list.
        self._position = random.randrange(len(config.endpoints))
        self._member: Member | None = None
        self._lost: set[Endpoint] = set()
        self._news: dict[Endpoint, str] = {}
        self._failing: dict[Endpoint, str] = {}
        self._findings: dict[Endpoint, str] = {}
        self._answered = False
        self._outage_since: float | None = None
        self._outage_logged = False
        self._closed = threading.Event()
        self._process = os.getpid()
        self.quiet = False
        """Whether lost members are news for debugging only, as where many processes of one run see the same."""

    def call(self, service: str, method: str, request: Any, limits: Limits) -> tuple[Any, bool]:
        """Call a method of etcd's API, at one member after the other until one answers.

        Returns:
            The answer, and whether an earlier attempt failed in a way that may have been carried out.

        Raises:
            EtcdUnavailableError: No member answered in time.
            EtcdInterruptedError: The caller's hook said so.
            EtcdError: etcd's answer is an error; the subclass says which.
        """
        deadline = time.monotonic() + limits.timeout
        retried = False
        failures = 0
        while True:
            limits.check()
            member = self.member()
            try:
                seconds = _FIRST_SECONDS if failures < 2 * len(self.config.endpoints) else self.config.times.attempt
                self.authenticate(member, min(deadline, time.monotonic() + seconds), limits)
                until = min(deadline, time.monotonic() + seconds)
                response = self._attempt(member, service, method, request, until, limits)
            except ValueError:
                # gRPC's answer to a call on a channel that another thread has just closed, see _leave.
                if self._member is member:
                    raise
            except self._rpc.grpc.RpcError as error:
                hurried = limits.timeout < _FAIR_SECONDS and error.code().name == "DEADLINE_EXCEEDED"
                outcome = Retry.OTHER_MEMBER if hurried else self.judge(member, error, limits)
                if isinstance(outcome, EtcdError):
                    outcome.retried = retried
                    raise outcome from None
                retried = True
                failures += 1
                self._give_up_when_hopeless(failures, deadline, limits)
                self.pause(failures, deadline, limits)
            else:
                self.note_answer(member)
                return response, retried

    def member(self) -> Member:
        """Return the channel that calls go through now."""
        if os.getpid() != self._process:
            raise EtcdError("an etcd client does not survive a fork; make a new one in the child process")
        with self._lock:
            if self._closed.is_set():
                raise EtcdError("the etcd client is closed")
            if self._member is None:
                self._member = Member(self.config.endpoints[self._position], self.config)
            return self._member

    def authenticate(self, member: Member, deadline: float, limits: Limits) -> None:
        """Get a token from a member, if there is a user and no token yet.

        Raises:
            grpc.RpcError: The member did not give one.
        """
        if self.config.user is None or member.token is not None:
            return
        request = self._rpc.etcd.AuthenticateRequest(name=self.config.user, password=self.config.password)
        member.token = self._attempt(member, "Auth", "Authenticate", request, deadline, limits).token

    def judge(self, member: Member, error: Any, limits: Limits) -> Retry | EtcdError:
        """Say what a failed call or stream means, and get ready for the next attempt."""
        code, details = error.code().name, error.details() or ""
        outcome = diagnose_answer(code, details, self.config)
        if outcome is Retry.NEW_TOKEN:
            member.token = None
        elif isinstance(outcome, Retry):
            lost = outcome is Retry.OTHER_MEMBER
            if lost and code == "DEADLINE_EXCEEDED":
                # Either it hangs, or it waits like us for a new leader, or it has lost the request.
                leader = member.has_leader(self.config.times.probe, limits.check)
                lost = leader is None
                member.unanswered += 1
                if leader and member.unanswered < _MOST_UNANSWERED:
                    return outcome
            self._leave(member, short_reason(code, details), lost=lost)
        return outcome

    def note_answer(self, member: Member) -> None:
        """Note that a member is there, so that its next loss is news again."""
        self._answered = True
        member.unanswered = 0
        if not self._failing and member.endpoint not in self._lost:
            return
        with self._lock:
            self._failing.clear()
            self._lost.discard(member.endpoint)
            self._news.pop(member.endpoint, None)
            news, self._news = self._news, {}
            logged, self._outage_logged, self._outage_since = self._outage_logged, False, None
        for endpoint, reason in news.items():
            level = self._level(logging.WARNING)
            logger.log(level, "etcd member %s is lost (%s); going on with the others", endpoint, reason)
        if logged:
            logger.log(self._level(logging.INFO), "etcd answers again, at %s", member.endpoint)

    def pause(self, failures: int, deadline: float, limits: Limits) -> None:
        """Wait a little when all members have failed in turn; at once go on as long as they have not."""
        rounds, position = divmod(failures, len(self.config.endpoints))
        if position:
            return
        first, longest = _BACKOFF_SECONDS
        seconds = min(longest, first * 2 ** min(rounds - 1, 10)) * random.uniform(0.5, 1.0)
        until = min(time.monotonic() + seconds, deadline)
        while (left := until - time.monotonic()) > 0 and not self._closed.wait(min(left, INTERRUPT_SECONDS)):
            limits.check()

    def close(self) -> None:
        """End all calls and close the channel."""
        with self._lock:
            self._closed.set()
            member, self._member = self._member, None
        if member is not None:
            member.channel.close()

    def _attempt(self, member: Member, service: str, method: str, request: Any, deadline: float, limits: Limits) -> Any:
        stub = getattr(member.stubs[service], method)
        timeout = max(0.01, min(self.config.times.attempt, deadline - time.monotonic()))
        if method == "LeaseKeepAlive":
            stream = stub(iter((request,)), timeout=timeout, metadata=member.metadata)
            response = next(stream)
            stream.cancel()
            return response
        if limits.interrupted is None:
            return stub(request, timeout=timeout, metadata=member.metadata)
        call = stub.future(request, timeout=timeout, metadata=member.metadata)
        while True:
            try:
                return call.result(INTERRUPT_SECONDS)
            except self._rpc.grpc.FutureTimeoutError:
                try:
                    limits.check()
                except EtcdInterruptedError:
                    call.cancel()
                    raise

    def _leave(self, member: Member, reason: str, *, lost: bool) -> None:
        """Move on to the next member, unless another thread did so already, and log a lost one once."""
        with self._lock:
            if self._member is not member or self._closed.is_set():
                return
            self._member = None
            self._position = (self._position + 1) % len(self.config.endpoints)
            if lost and member.endpoint not in self._lost:
                # Told as soon as another one answers.
                self._lost.add(member.endpoint)
                self._news[member.endpoint] = reason
            self._failing[member.endpoint] = reason
            outage = len(self._failing) == len(self.config.endpoints)
            now = time.monotonic()
            self._outage_since = (self._outage_since or now) if outage else None
            log = outage and not self._outage_logged and now - (self._outage_since or now) > self.config.times.outage
            if log:
                self._outage_logged = True
                self._news.clear()
        member.channel.close()
        if log:
            logger.log(
                self._level(logging.WARNING),
                "no etcd member answers (%s); trying again until one does",
                self._reasons(),
            )

    def _level(self, level: int) -> int:
        return logging.DEBUG if self.quiet else level

    def _reasons(self) -> str:
        return "; ".join(
            self._findings.get(endpoint) or f"{endpoint}: {reason}" for endpoint, reason in self._failing.items()
        )

    def _give_up_when_hopeless(self, failures: int, deadline: float, limits: Limits) -> None:
        """Raise when the time is up, or when, before any answer, no member is what it should be."""
        endpoints = self.config.endpoints
        if not self._answered and failures % len(endpoints) == 0:
            self._findings = probe_endpoints(self.config, limits.check)
            if len(self._findings) == len(endpoints):
                unknown = all(map(is_unknown_host, self._findings.values()))
                error = EtcdUnknownHostError if unknown else EtcdEndpointError
                raise error(f"cannot use etcd: {self._reasons()}") from None
        if time.monotonic() >= deadline:
            raise EtcdUnavailableError(
                f"no etcd member of {self.config} answered in time ({self._reasons()}); "
                "check that etcd runs and that the endpoints are its client ports"
            ) from None
