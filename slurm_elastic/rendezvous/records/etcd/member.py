"""An open channel to one member of etcd."""

from __future__ import annotations

from collections.abc import Callable

from slurm_elastic.rendezvous.records.etcd._stubs import load_rpc
from slurm_elastic.rendezvous.records.etcd.config import Endpoint, EtcdConfig
from slurm_elastic.rendezvous.records.etcd.diagnosis import system_authorities

__all__ = ["INTERRUPT_SECONDS", "Member"]

INTERRUPT_SECONDS = 0.1
"""How often a wait looks at its interrupt hook; well inside the 0.2 s that a signal may take."""

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

    def leader(self, timeout: float, check: Callable[[], None] = lambda: None) -> int | None:
        """Return the id of the leader that the member knows, 0 for none, None if it does not answer.

        Args:
            timeout: Seconds.
            check: Called every 0.1 s while the answer takes its time; may raise.
        """
        rpc = load_rpc()
        try:
            stub = self.stubs["Maintenance"].Status
            call = stub.future(rpc.etcd.StatusRequest(), timeout=timeout, metadata=self.credentials)
            while True:
                try:
                    return int(call.result(INTERRUPT_SECONDS).leader)
                except rpc.grpc.FutureTimeoutError:
                    check()
        except (rpc.grpc.RpcError, rpc.grpc.FutureCancelledError, ValueError):
            # ValueError: another thread has closed the channel.
            return None
