"""An open channel to one member of etcd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slurm_elastic.rendezvous.records.etcd._stubs import load_rpc
from slurm_elastic.rendezvous.records.etcd.config import Endpoint, EtcdConfig
from slurm_elastic.rendezvous.records.etcd.diagnosis import system_authorities

__all__ = ["INTERRUPT_SECONDS", "Member"]

INTERRUPT_SECONDS = 0.1
"""How often a wait looks at its interrupt hook; well inside the 0.2 s that a signal may take."""

_REFUSED = ("FAILED_PRECONDITION", "INVALID_ARGUMENT", "PERMISSION_DENIED", "UNAUTHENTICATED")
"""Codes of etcd for a client whose certificate names no user, without a user, without the right, or with a token that
etcd does not know."""

_CHANNEL_OPTIONS = (
    # Sites set http_proxy for the world outside; etcd is inside, and gRPC would send it through the proxy.
    ("grpc.enable_http_proxy", 0),
    # Without this, channels of one process share a subchannel, and with it its back-off after a failure.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    # A member whose node lost power sends nothing; pings tell. etcd forbids more than one in 5 s
    # (its --grpc-keepalive-min-time).
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
)


class Member:
    """An open channel to one member, with its stubs and our token there.

    Attributes:
        unanswered: How many calls in a row it left without an answer in time.
    """

    def __init__(self, endpoint: Endpoint, config: EtcdConfig) -> None:
        rpc = load_rpc()
        self.endpoint = endpoint
        self.token: str | None = None
        self.unanswered = 0
        options = list(_CHANNEL_OPTIONS)
        if config.tls:
            authorities = config.ca_cert.read_bytes() if config.ca_cert else system_authorities()
            key = config.ssl_cert_key.read_bytes() if config.ssl_cert_key else None
            certificate = config.ssl_cert.read_bytes() if config.ssl_cert else None
            credentials = rpc.grpc.ssl_channel_credentials(authorities, key, certificate)
            self.channel = rpc.grpc.secure_channel(str(endpoint), credentials, options)
        else:
            self.channel = rpc.grpc.insecure_channel(str(endpoint), options)
        self.stubs = {
            name: getattr(rpc.etcd, f"{name}Stub")(self.channel)
            for name in ("KV", "Watch", "Lease", "Auth", "Maintenance")
        }

    @property
    def credentials(self) -> tuple[tuple[str, str], ...]:
        """Return our token, as it goes along with a call."""
        return (("token", self.token),) if self.token else ()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what goes along with most calls: our token, and no answers from a member without a leader."""
        return (*self.credentials, ("hasleader", "true"))

    def has_leader(self, timeout: float, check: Callable[[], None] = lambda: None) -> bool | None:
        """Return whether the member knows a leader, None if it does not answer.

        With authentication, etcd 3.5.30 shows its status to root alone; 3.4.23 and 3.5.16 show it to every client. A
        member that refuses is asked to read a key instead, for which it needs a leader before it looks at permissions.

        Args:
            timeout: Seconds for each question.
            check: Called every 0.1 s while the answer takes its time; may raise.
        """
        rpc = load_rpc()
        try:
            status = self.stubs["Maintenance"].Status
            return bool(self._wait(status.future(rpc.etcd.StatusRequest(), **self._question(timeout)), check).leader)
        except rpc.grpc.RpcError as error:
            if error.code().name not in _REFUSED:
                return None
        except (rpc.grpc.FutureCancelledError, ValueError):
            # ValueError: another thread has closed the channel.
            return None
        try:
            read = self.stubs["KV"].Range
            self._wait(read.future(rpc.etcd.RangeRequest(key=b"\0"), **self._question(timeout)), check)
        except rpc.grpc.RpcError as error:
            return error.code().name in _REFUSED
        except (rpc.grpc.FutureCancelledError, ValueError):
            return None
        return True

    def _question(self, timeout: float) -> dict[str, Any]:
        return {"timeout": timeout, "metadata": self.credentials}

    def _wait(self, call: Any, check: Callable[[], None]) -> Any:
        while True:
            try:
                return call.result(INTERRUPT_SECONDS)
            except load_rpc().grpc.FutureTimeoutError:
                check()
