"""A plain etcd of one member, for tests and for work on one node.

The counterpart of torch's EtcdServer (torch 2.13, distributed/elastic/rendezvous/etcd_server.py), which passes
--enable-v2 and waits for the v2 API, so that it works with no etcd later than 3.5.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from slurm_elastic.errors import UsageError
from slurm_elastic.ownership import require_own, write_own
from slurm_elastic.rendezvous.records.etcd.config import Endpoint, EtcdConfig
from slurm_elastic.rendezvous.records.etcd.errors import EtcdServerError

if TYPE_CHECKING:
    from slurm_elastic.rendezvous.records.etcd.client import EtcdClient

_BINARY_VARIABLES = ("SLURM_ELASTIC_ETCD_BINARY", "TORCHELASTIC_ETCD_BINARY_PATH")
"""The second one is torch's."""
_END_SECONDS = 10.0
_READY_INTERVAL = 0.05
_LOG_LINES = 3


def find_binary(binary: str | Path | None = None) -> Path:
    """Find an etcd: the given one, else that of SLURM_ELASTIC_ETCD_BINARY or of torch's variable, else the one in PATH.

    Raises:
        UsageError: There is none.
    """
    names = (binary, *(os.environ.get(variable) for variable in _BINARY_VARIABLES), "etcd")
    name = str(next(filter(None, names)))
    path = shutil.which(name)
    if path is None:
        where = "" if "/" in name else " in PATH"
        raise UsageError(
            f"there is no etcd binary {name!r}{where}; install etcd (Debian: etcd-server) "
            f"or name its binary by {_BINARY_VARIABLES[0]}"
        )
    return Path(path)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of this machine on which no process listens."""
    with socket.create_server((host, 0)) as listener:
        return int(listener.getsockname()[1])


class EtcdServer:
    """An etcd process without TLS and users, which ends with :meth:`stop`, or when this process exits.

    Args:
        data_dir: Where it keeps data and log; None for a directory of its own that :meth:`stop` deletes.
        host: The address that it listens on and is reached by.
        binary: The etcd to run; see :func:`find_binary`.
        arguments: Further arguments for etcd, such as ``--quota-backend-bytes=...``.

    Attributes:
        client_port: The port for clients, the same at each start that succeeds at once.

    Raises:
        UsageError: There is no etcd binary.
    """

    def __init__(
        self,
        data_dir: str | Path | None = None,
        host: str = "127.0.0.1",
        binary: str | Path | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self.binary = find_binary(binary)
        self.host = host
        self.client_port, self.peer_port = free_port(host), free_port(host)
        self.arguments = tuple(arguments)
        self._temporary = data_dir is None
        self.data_dir = Path(data_dir or tempfile.mkdtemp(prefix="slurm-elastic-etcd-"))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EtcdServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """The process id, None when it does not run."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    @property
    def log(self) -> Path:
        """The file with everything that etcd printed."""
        return self.data_dir / "etcd.log"

    @property
    def config(self) -> EtcdConfig:
        """The configuration of a client that reaches it."""
        return EtcdConfig((Endpoint(self.host, self.client_port),))

    def get_port(self) -> int:
        """The port for clients. By torch's name, as the next three."""
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

    def start(self, timeout: float = 30.0, num_retries: int = 3, stderr: int | IO[bytes] | None = None) -> None:
        """Start it and wait until it has a leader and answers.

        Args:
            timeout: Seconds for each attempt.
            num_retries: Number of attempts, as torch counts them. Each has ports of its own: another process may take
                a free port before etcd does.
            stderr: A file for what etcd prints, as subprocess takes it; None for :attr:`log`.

        Raises:
            EtcdServerError: It did not; the message has the end of its log.
        """
        for attempt in range(1, num_retries + 1):
            try:
                self.launch(stderr)
                self.wait_ready(timeout)
                return
            except BaseException as error:
                self.stop()
                if attempt == num_retries or not isinstance(error, EtcdServerError):
                    raise
                self.client_port, self.peer_port = free_port(self.host), free_port(self.host)

    def launch(self, stderr: int | IO[bytes] | None = None) -> None:
        """Start it without waiting, as the members of a cluster, which wait for each other, need it."""
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_own(self.data_dir, fix="give a directory of your own")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
        with os.fdopen(write_own(self.log), "wb") as output:
            # In a session of its own, so that a Ctrl-C for this process does not end it before its clients.
            self._process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output if stderr is None else stderr,
                env=environment,
                start_new_session=True,
            )
        atexit.register(self.stop)

    def wait_ready(self, timeout: float = 30.0) -> None:
        """Wait until it has a leader and answers.

        Raises:
            EtcdServerError: It ended, or the time was up.
        """
        deadline = time.monotonic() + timeout
        while not self.is_ready():
            if self.pid is None or time.monotonic() >= deadline:
                what = "ended at its start" if self.pid is None else "was not ready in time"
                raise EtcdServerError(f"etcd {what}; the end of {self.log}: {self._log_end()}")
            time.sleep(_READY_INTERVAL)

    def is_ready(self) -> bool:
        """Return whether it has a leader and answers."""
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with contextlib.suppress(OSError), direct.open(f"http://{self.get_endpoint()}/health", timeout=1.0) as answer:
            return b'"true"' in answer.read()
        return False

    def stop(self) -> None:
        """End it, in order if it can, and delete the data directory if it is ours. Stopping twice does no harm."""
        atexit.unregister(self.stop)
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
            self.kill()
        if self._temporary:
            shutil.rmtree(self.data_dir, ignore_errors=True)

    def kill(self) -> None:
        """End it at once, as a crash would; data and ports are kept for another start."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def command(self) -> list[str]:
        """Return the command that runs it."""
        client, peer = (f"http://{Endpoint(self.host, port)}" for port in (self.client_port, self.peer_port))
        return [
            str(self.binary),
            f"--data-dir={self.data_dir / 'data'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            # The default of 3.4 is another, deprecated logger.
            "--logger=zap",
            *self.arguments,
        ]

    def _log_end(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        significant = [line for line in lines if re.search("error|fatal|not defined", line, re.IGNORECASE)]
        return " | ".join((significant or lines)[-_LOG_LINES:]) or "(empty)"
