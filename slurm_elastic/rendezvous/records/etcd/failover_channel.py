"""Calls to etcd that survive the loss of a member: all go to one member; when it is lost or silent, to the next.

Each member has a channel of gRPC of its own. A channel over several addresses moves on by itself, but checks the
certificates of all members for one and the same name (grpcio 1.85: "Hostname Verification Check failed"). etcd3's
client (0.12.0) knows one host, keeps its first token for ever, and opens watch streams without a pause while a member
is away; its messages are used.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import random
import ssl
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slurm_elastic.environment import changed_environment
from slurm_elastic.errors import UsageError
from slurm_elastic.rendezvous.records.api import RecordsInterruptedError
from slurm_elastic.rendezvous.records.etcd import errors
from slurm_elastic.rendezvous.records.etcd.config import Endpoint, EtcdConfig

logger = logging.getLogger(__name__)

_IMPLEMENTATION = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"
_SETTINGS = {
    # gRPC's core writes to stderr by itself, for example at each failed TLS handshake. We report each failure, once.
    "GRPC_VERBOSITY": "NONE",
    # Otherwise gRPC (1.85) starts its threads anew in every forked child. The process that serves the workers' store
    # closes the descriptors that those threads wait on, and gRPC aborts it. No child of an agent calls etcd.
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}


@functools.cache
def load_rpc() -> SimpleNamespace:
    """Import etcd3, and with it grpc and protobuf, which no other function does; return the modules `grpc` and `etcd`.

    The generated code in etcd3 0.12.0 predates protobuf 4 and is refused by its C implementation ("Descriptors cannot
    be created directly"); protobuf's pure Python implementation takes it. Which of the two a process gets is decided by
    PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION at protobuf's first import and never again. So the variable is set for that
    one import and taken out again, and no worker that uses protobuf itself inherits the slow one.

    Raises:
        UsageError: protobuf is in this process already, in an implementation that etcd3 cannot use, or etcd3 is
            not installed.
    """
    module = sys.modules.get("google.protobuf.internal.api_implementation")
    if module is not None and (loaded := str(module.Type())) != "python":
        raise UsageError(
            f"protobuf is already imported in its {loaded!r} implementation, with which etcd3 does not work; "
            f"set {_IMPLEMENTATION}=python in the environment of this program, or connect to etcd before anything "
            "else imports protobuf"
        )
    defaults = {name: os.environ.get(name, value) for name, value in _SETTINGS.items()}
    try:
        with changed_environment({_IMPLEMENTATION: "python", **defaults}), warnings.catch_warnings():
            # The age of the generated code again; one warning for each field of each message.
            warnings.simplefilter("ignore", DeprecationWarning)
            return SimpleNamespace(grpc=importlib.import_module("grpc"), etcd=importlib.import_module("etcd3.etcdrpc"))
    except ImportError as error:
        raise UsageError(f"cannot import etcd3, the client of etcd ({error}); pip install etcd3") from error


_FIRST_SECONDS = 1.0
"""How long each of the first two attempts at each member may take.

Members lose each request between the end of their leader and the moment at which they notice it, 1 to 2 s later
(etcd 3.4 and 3.5: a proposal, or the index of a read, goes to the leader once). They answer only a new request.
"""

ATTEMPT_SECONDS = 3.0
"""How long each further attempt may take."""

OUTAGE_SECONDS = 3.0
"""Without an answer of any member, before the log says so; longer than the election of a new leader of etcd takes."""

_INTERRUPT_SECONDS = 0.1
"""How often a wait looks at its interrupt hook; well inside the 0.2 s that a signal may take."""

_BACKOFF_SECONDS = (0.05, 1.0)
"""Pause after all members have failed in turn: the first, and the longest after doublings."""

_CHANNEL_OPTIONS = (
    # Sites set http_proxy for the world outside; etcd is inside, and gRPC would send it through the proxy.
    ("grpc.enable_http_proxy", 0),
    # Without this, channels of one process share a subchannel, and with it its back-off after a failure.
    ("grpc.use_local_subchannel_pool", 1),
    # gRPC waits up to two minutes before it connects again.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", -1),
    # A member whose node lost power sends nothing; pings tell. etcd forbids more than one in 5 s
    # (its --grpc-keepalive-min-time).
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
)


@dataclass(frozen=True, slots=True)
class Limits:
    """The time that a caller is ready to wait.

    Attributes:
        timeout: Seconds after which a call that found no answer fails.
        interrupted: Called every 0.1 s; when it returns True, the wait ends with RecordsInterruptedError.
    """

    timeout: float
    interrupted: Callable[[], bool] | None = None

    def check(self) -> None:
        """Raise RecordsInterruptedError when the hook returns True."""
        if self.interrupted is not None and self.interrupted():
            raise RecordsInterruptedError("the wait for etcd was interrupted")


class Connection:
    """All calls of a client; safe to use from several threads, not after a fork.

    Attributes:
        quiet: Whether lost members are logged for debugging only, as where many processes of one run see the same.
        token: Proof of the password, which all members know (etcd 3.4: Authenticate is a proposal); None before the
            first call, and when etcd has forgotten it.

    Raises:
        UsageError: etcd3 cannot be used in this process.
    """

    def __init__(self, config: EtcdConfig) -> None:
        self.config = config
        self.quiet = False
        self.token: str | None = None
        self._rpc = load_rpc()
        self._log_lock = threading.Lock()
        self._channels = [_open_channel(endpoint, config) for endpoint in config.endpoints]
        # Clients start at different members, so that 1,000 agents do not all use the first of the list.
        self._turn = random.randrange(len(self._channels))
        """The number of the member that calls go to, plus a multiple of the number of members; it only grows."""
        self._lost: set[Endpoint] = set()
        """The members that the log calls lost."""
        self._answered = self._is_outage = False
        self._closed = threading.Event()
        self._process = os.getpid()

    @property
    def endpoint(self) -> Endpoint:
        """The member that calls go to now."""
        return self.config.endpoints[self._turn % len(self._channels)]

    def call(self, path: str, request: Any, limits: Limits) -> Any:
        """Call a method of etcd's API, such as KV/Txn, at one member after the other until one answers.

        An earlier attempt, whose answer was lost, may have been carried out.

        Raises:
            EtcdUnavailableError: No member answered in time.
            RecordsInterruptedError: The caller's hook returned True.
            EtcdError: etcd's answer is an error; the subclass says which.
        """
        began = time.monotonic()
        deadline = began + limits.timeout
        members = len(self._channels)
        failing: dict[Endpoint, str] = {}
        wrong: dict[Endpoint, str] = {}
        lost: dict[Endpoint, str] = {}
        failures = 0
        while True:
            limits.check()
            turn = self._turn
            endpoint = self.config.endpoints[turn % members]
            try:
                if self.config.user is not None and self.token is None:
                    user = self._rpc.etcd.AuthenticateRequest(name=self.config.user, password=self.config.password)
                    # etcd hashes the password, which takes longer than any other call.
                    answer = self._attempt(turn, "Auth/Authenticate", user, ATTEMPT_SECONDS, deadline, limits)
                    self.token = answer.token
                seconds = _FIRST_SECONDS if failures < 2 * members else ATTEMPT_SECONDS
                response = self._attempt(turn, path, request, seconds, deadline, limits)
            except self._rpc.grpc.RpcError as error:
                code, details = error.code().name, error.details() or ""
                if refusal := errors.diagnose_answer(code, details, self.config):
                    raise refusal from None
                if errors.is_old_token(details):
                    self.token = None
                reason = errors.short_reason(code, details)
                failing[endpoint] = f"{endpoint}: {reason}"
                # A member that is silent, or answers by itself, may wait for a new leader, as this client does.
                if code == "UNAVAILABLE" and not details.startswith("etcdserver:"):
                    lost[endpoint] = reason
                failures += 1
                # Another thread may have moved on already.
                self._turn = max(self._turn, turn + 1)
                if not self._answered and (finding := self._probe(endpoint, limits)):
                    failing[endpoint] = wrong[endpoint] = finding
                    if len(wrong) == members:
                        raise errors.endpoint_error(wrong.values()) from None
                self._log_outage(failing, lost, time.monotonic() - began)
                if time.monotonic() >= deadline:
                    raise errors.EtcdUnavailableError(
                        f"no etcd member of {self.config} answered in time ({'; '.join(failing.values())}); "
                        "check that etcd runs and that the endpoints are its client ports"
                    ) from None
                self.pause(failures, deadline, limits)
            else:
                self._note_answer(endpoint, lost)
                return response

    def watch(self, request: Any, deadline: float) -> None:
        """Wait for the first event of a watch, or the end of its stream: the caller has to read again anyway.

        The read finds another member, gets a new token, or says what is wrong.
        """
        method = self._method(self._turn, "stream_stream", "Watch/Watch", self._rpc.etcd.WatchRequest)
        with contextlib.suppress(self._rpc.grpc.RpcError, ValueError):
            call = method(iter([request]), timeout=max(0.01, deadline - time.monotonic()), metadata=self._metadata())
            try:
                if any(answer.events or answer.canceled for answer in call):
                    return
            finally:
                call.cancel()
        self.pause(len(self._channels), deadline, Limits(0.0))

    def pause(self, failures: int, deadline: float, limits: Limits) -> None:
        """Wait a little when all members have failed in turn; go on at once as long as they have not."""
        rounds, position = divmod(failures, len(self._channels))
        first, longest = _BACKOFF_SECONDS
        seconds = 0.0 if position else min(longest, first * 2 ** min(rounds - 1, 10)) * random.uniform(0.5, 1.0)
        until = min(time.monotonic() + seconds, deadline)
        while (left := until - time.monotonic()) > 0 and not self._closed.wait(min(left, _INTERRUPT_SECONDS)):
            limits.check()

    def is_closed(self) -> bool:
        """Return whether the client was closed."""
        return self._closed.is_set()

    def close(self) -> None:
        """End all calls and close the channels."""
        self._closed.set()
        for channel in self._channels:
            channel.close()

    def _method(self, turn: int, kind: str, path: str, request: Any) -> Any:
        """Return a method of etcd's API at a member; `request` is the type of its message."""
        if os.getpid() != self._process:
            raise errors.EtcdError("an etcd client does not survive a fork; make a new one in the child process")
        answer = getattr(self._rpc.etcd, request.__name__.removesuffix("Request") + "Response")
        method = getattr(self._channels[turn % len(self._channels)], kind)
        return method(f"/etcdserverpb.{path}", request.SerializeToString, answer.FromString)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        """The token, and the wish for no answers from a member without a leader."""
        return (*((("token", self.token),) if self.token else ()), ("hasleader", "true"))

    def _attempt(self, turn: int, path: str, request: Any, seconds: float, deadline: float, limits: Limits) -> Any:
        timeout = max(0.01, min(seconds, deadline - time.monotonic()))
        # LeaseKeepAlive, too: a stream of one request and one answer is the same on the wire.
        method = self._method(turn, "unary_unary", path, type(request))
        try:
            call = method.future(request, timeout=timeout, metadata=self._metadata())
        except ValueError:
            # gRPC's answer on a channel that is closed.
            raise errors.EtcdError("the etcd client is closed") from None
        try:
            while True:
                with contextlib.suppress(self._rpc.grpc.FutureTimeoutError):
                    return call.result(_INTERRUPT_SECONDS)
                limits.check()
        finally:
            call.cancel()

    def _probe(self, endpoint: Endpoint, limits: Limits) -> str | None:
        """Return what is wrong at an endpoint; a name server that hangs holds up only the thread that asks it."""
        findings: list[str | None] = []
        thread = threading.Thread(
            target=lambda: findings.append(errors.probe_endpoint(endpoint, self.config)),
            name="slurm-elastic-etcd-probe",
            daemon=True,
        )
        thread.start()
        while thread.is_alive():
            thread.join(_INTERRUPT_SECONDS)
            limits.check()
        return findings[0] if findings else None

    def _log_outage(self, failing: Mapping[Endpoint, str], lost: Mapping[Endpoint, str], seconds: float) -> None:
        """Log an outage once."""
        with self._log_lock:
            if not self._is_outage and len(failing) == len(self._channels) and seconds > OUTAGE_SECONDS:
                self._is_outage = True
                self._lost.update(lost)
                reasons = "; ".join(failing.values())
                self._log(logging.WARNING, f"no etcd member answers ({reasons}); trying again until one does")

    def _note_answer(self, endpoint: Endpoint, lost: Mapping[Endpoint, str]) -> None:
        """Log the members that were lost before this one answered, each once until it answers again."""
        self._answered = True
        with self._log_lock:
            if self._is_outage:
                self._is_outage = False
                self._log(logging.INFO, f"etcd answers again, at {endpoint}")
            for member in lost.keys() - self._lost - {endpoint}:
                self._log(logging.WARNING, f"etcd member {member} is lost ({lost[member]}); going on with the others")
            self._lost = (self._lost | lost.keys()) - {endpoint}

    def _log(self, level: int, message: str) -> None:
        logger.log(logging.DEBUG if self.quiet else level, "%s", message)


def _open_channel(endpoint: Endpoint, config: EtcdConfig) -> Any:
    """Return a channel to one member; gRPC connects at its first call."""
    grpc = load_rpc().grpc
    if not config.tls:
        return grpc.insecure_channel(str(endpoint), _CHANNEL_OPTIONS)
    authorities = config.ca_cert or ssl.get_default_verify_paths().cafile
    files = (authorities, config.ssl_cert_key, config.ssl_cert)
    credentials = grpc.ssl_channel_credentials(*(path and Path(path).read_bytes() for path in files))
    return grpc.secure_channel(str(endpoint), credentials, _CHANNEL_OPTIONS)
