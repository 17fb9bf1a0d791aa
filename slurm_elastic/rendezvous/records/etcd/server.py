"""A private etcd: for tests, for work on one node, and for sites without an etcd of their own.

The counterpart of torch's EtcdServer (torch 2.13, distributed/elastic/rendezvous/records/etcd_server.py), which passes
--enable-v2 and waits for the v2 API, so that it works with no etcd later than 3.5.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from slurm_elastic.ownership import require_own
from slurm_elastic.rendezvous.records.etcd.certificates import Certificate
from slurm_elastic.rendezvous.records.etcd.config import Endpoint, EtcdConfig
from slurm_elastic.rendezvous.records.etcd.errors import EtcdServerError
from slurm_elastic.rendezvous.records.etcd.machine import find_binary, free_port
from slurm_elastic.rendezvous.records.etcd.member import Member
from slurm_elastic.rendezvous.records.etcd.supervised_process import GuardedProgram

if TYPE_CHECKING:
    from slurm_elastic.rendezvous.records.etcd.client import EtcdClient

__all__ = ["EtcdServer", "ServerTls"]

_START_ATTEMPTS = 5
_LOG_LINES = 10
_ALL_LINES = 10_000
_MESSAGE_LINES = 3
_SIGNIFICANT_WORDS = ("error", "fatal", "panic", "not defined")
_READY_SECONDS = 1.0
_READY_INTERVAL = 0.05


@dataclass(frozen=True, slots=True)
class ServerTls:
    """TLS of a server, to clients and between members.

    Attributes:
        authority: The certificate of the authority that signed all others.
        own: The server's certificate, which must also be good for a client.
        ask_clients: Whether clients must show a certificate of the authority.
    """

    authority: Path
    own: Certificate
    ask_clients: bool = False


class EtcdServer:
    """An etcd process that ends with :meth:`stop`, and with this process however that ends.

    Args:
        data_dir: Where it keeps data and log; None for a directory of its own that :meth:`stop` deletes.
        host: The name or address that it listens on and is reached by.
        binary: The etcd to run; see :func:`find_binary`.
        tls: None for no TLS.
        name: Its name among the members.
        client_port: None for a free one, at each start.
        peer_port: The same for the port between members.
        cluster: For each member, its own included, the name and peer port; None for a cluster of one.
        arguments: Further arguments for etcd, such as ``--quota-backend-bytes=...``.

    Raises:
        UsageError: There is no etcd binary.
    """

    def __init__(
        self,
        data_dir: str | Path | None = None,
        host: str = "127.0.0.1",
        binary: str | Path | None = None,
        tls: ServerTls | None = None,
        name: str = "etcd",
        client_port: int | None = None,
        peer_port: int | None = None,
        cluster: Mapping[str, int] | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self.binary = find_binary(binary)
        self.host = host
        self.tls = tls
        self.name = name
        self._wanted_ports = (client_port, peer_port)
        self.client_port = client_port or 0
        self.peer_port = peer_port or 0
        self._cluster = cluster
        self._arguments = tuple(arguments)
        self._temporary = data_dir is None
        self.data_dir = Path(data_dir or tempfile.mkdtemp(prefix="slurm-elastic-etcd-"))
        self._program: GuardedProgram | None = None

    def __enter__(self) -> EtcdServer:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """The process id, None when it does not run."""
        return None if self._program is None else self._program.pid

    @property
    def log(self) -> Path:
        """The file with everything that etcd printed."""
        return self.data_dir / "etcd.log"

    @property
    def config(self) -> EtcdConfig:
        """The configuration of a client that reaches it, with the server's own certificate where clients need one."""
        endpoints = (Endpoint(self.host, self.client_port),)
        if self.tls is None:
            return EtcdConfig(endpoints)
        own = self.tls.own if self.tls.ask_clients else None
        return EtcdConfig(
            endpoints,
            tls=True,
            ca_cert=self.tls.authority,
            ssl_cert=own.certificate if own else None,
            ssl_cert_key=own.key if own else None,
        )

    def get_port(self) -> int:
        """The port for clients; 0 before the first start, unless one was given. By torch's name, as the next three."""
        return self.client_port

    def get_host(self) -> str:
        """The host at which clients reach it."""
        return self.host

    def get_endpoint(self) -> str:
        """Host and port as ``--rdzv-endpoint`` of torchrun takes them."""
        return str(self.config.endpoints[0])

    def get_client(self) -> EtcdClient:
        """Return a new client of it, for the v3 API; to be closed by the caller.

        Raises:
            UsageError: etcd's client cannot be imported.
        """
        # The imports of the client take a while, and a process that only starts an etcd needs none.
        from slurm_elastic.rendezvous.records.etcd.client import EtcdClient

        return EtcdClient(self.config)

    def start(self, timeout: float = 30.0) -> None:
        """Start it and wait until it answers by the v3 API.

        Raises:
            EtcdServerError: It did not; the message has the end of its log.
        """
        deadline = time.monotonic() + timeout
        for attempt in range(1, _START_ATTEMPTS + 1):
            self.launch()
            try:
                self.wait_ready(max(0.0, deadline - time.monotonic()))
            except EtcdServerError:
                # Another process may have taken a port between our look and etcd's.
                conflict = "address already in use" in "\n".join(self.log_tail())
                self.kill()
                if not conflict or attempt == _START_ATTEMPTS or time.monotonic() >= deadline:
                    raise
            except BaseException:
                self.kill()
                raise
            else:
                return

    def launch(self) -> None:
        """Start it without waiting, as the members of a cluster, who wait for each other, need it."""
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_own(self.data_dir, mend="give a directory of your own by --data-dir")
        self.client_port, self.peer_port = (port or free_port(self.host) for port in self._wanted_ports)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
        belongings = self.data_dir if self._temporary else None
        self._program = GuardedProgram(self._command(), environment, self.log, belongings)

    def wait_ready(self, timeout: float = 30.0) -> None:
        """Wait until it has a leader and answers.

        Raises:
            EtcdServerError: It ended, or the time was up.
        """
        deadline = time.monotonic() + timeout
        while not self._has_leader():
            if self.pid is None:
                raise EtcdServerError(f"etcd ended at its start; the end of {self.log}: {self._log_line()}")
            if time.monotonic() >= deadline:
                raise EtcdServerError(f"etcd was not ready in time; the end of {self.log}: {self._log_line()}")
            time.sleep(_READY_INTERVAL)

    def log_tail(self, lines: int = _LOG_LINES) -> list[str]:
        """Return the last lines that etcd printed."""
        try:
            text = self.log.read_text(errors="replace")
        except FileNotFoundError:
            return []
        return [line for line in text.splitlines() if line.strip()][-lines:]

    def stop(self) -> None:
        """End it, in order if it can, and delete the data directory if it is ours. Stopping twice does no harm."""
        self._end(signal.SIGTERM)
        if self._temporary:
            shutil.rmtree(self.data_dir, ignore_errors=True)

    def kill(self) -> None:
        """End it at once, as a crash would; data and ports are kept for another start."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        program, self._program = self._program, None
        if program is not None:
            program.end(number)

    def _has_leader(self) -> bool:
        member = Member(self.config.endpoints[0], self.config)
        try:
            return bool(member.has_leader(_READY_SECONDS))
        finally:
            member.channel.close()

    def _log_line(self) -> str:
        lines = self.log_tail(_ALL_LINES)
        significant = [line for line in lines if any(word in line.lower() for word in _SIGNIFICANT_WORDS)]
        return " | ".join((significant or lines)[-_MESSAGE_LINES:]) or "(empty)"

    def _command(self) -> list[str]:
        scheme = "http" if self.tls is None else "https"
        host = f"[{self.host}]" if ":" in self.host else self.host
        client, peer = f"{scheme}://{host}:{self.client_port}", f"{scheme}://{host}:{self.peer_port}"
        members = self._cluster or {self.name: self.peer_port}
        command = [
            str(self.binary),
            f"--name={self.name}",
            f"--data-dir={self.data_dir / 'data'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            "--initial-cluster=" + ",".join(f"{name}={scheme}://{host}:{port}" for name, port in members.items()),
            # The default of 3.4 is another, deprecated logger.
            "--logger=zap",
        ]
        if self.tls is not None:
            own = self.tls.own
            for side in ("", "peer-"):
                command += [f"--{side}cert-file={own.certificate}", f"--{side}key-file={own.key}"]
            command += [f"--peer-trusted-ca-file={self.tls.authority}", "--peer-client-cert-auth"]
            if self.tls.ask_clients:
                # A trusted authority alone already makes etcd ask (etcd 3.4, pkg/transport/listener.go, ServerConfig).
                command += [f"--trusted-ca-file={self.tls.authority}", "--client-cert-auth"]
        return command + list(self._arguments)
