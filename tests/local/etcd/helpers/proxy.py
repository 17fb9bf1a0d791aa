"""A network between client and etcd that can be cut."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType

from slurm_elastic.rendezvous.records.etcd.config import Endpoint, EtcdConfig


class Proxy:
    """Forwards connections to an endpoint, until told otherwise."""

    def __init__(self, target: Endpoint) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._cut = False
        self._mute = threading.Event()

    def __enter__(self) -> Proxy:
        self._start(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cut()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(*self._listener.getsockname())

    @property
    def config(self) -> EtcdConfig:
        return EtcdConfig((self.endpoint,))

    def mute(self) -> None:
        """Swallow all answers; requests still arrive."""
        self._mute.set()

    def cut(self) -> None:
        """Break all connections, and each new one."""
        with self._lock:
            self._cut = True
            for one in self._open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Let connections through again."""
        with self._lock:
            self._cut = False
        self._mute.clear()

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                inner, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self._cut:
                    inner.close()
                    continue
                try:
                    outer = socket.create_connection((self._target.host, self._target.port))
                except OSError:
                    inner.close()
                    continue
                self._open += [inner, outer]
            self._start(self._pump, inner, outer, None)
            self._start(self._pump, outer, inner, self._mute)

    def _pump(self, source: socket.socket, sink: socket.socket, mute: threading.Event | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if mute is None or not mute.is_set():
                    sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
