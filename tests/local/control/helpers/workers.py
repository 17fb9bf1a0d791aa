"""Real workers of the rounds of several nodes on this machine, without agents."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from slurm_elastic.control.agent_side import RoundControl

ROOT = Path(__file__).parents[4]
SCRIPT = Path(__file__).parents[1] / "scripts" / "stepping.py"
HANG = 60.0
"""Seconds after which a test gives up."""


class Hub:
    """Answers everybody as soon as all have said something: a collective."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with self._listener:
            members = [self._listener.accept()[0] for _ in range(self._size)]
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
            for member in members:
                member.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                selector.register(stack.enter_context(member), selectors.EVENT_READ)
            arrived: set[int] = set()
            while selector.get_map():
                for key, _ in selector.select():
                    member = key.fileobj
                    assert isinstance(member, socket.socket)
                    try:
                        said = member.recv(1)
                    except ConnectionError:
                        said = b""
                    if said:
                        arrived.add(key.fd)
                    else:
                        selector.unregister(member)
                if len(arrived) == self._size:
                    arrived.clear()
                    for key in list(selector.get_map().values()):
                        assert isinstance(key.fileobj, socket.socket)
                        with contextlib.suppress(ConnectionError):
                            key.fileobj.sendall(b"x")


class Workers:
    """The workers of one round on some nodes.

    Args:
        directory: for the pages.
        nodes, local: how many nodes, and workers on each.
        steps: at most.
        coupled: whether every step is a collective.
        command: what to run instead of stepping.py.
    """

    def __init__(
        self,
        directory: Path,
        nodes: int,
        local: int,
        *,
        steps: int = 10**9,
        coupled: bool = True,
        command: tuple[str, ...] | None = None,
    ) -> None:
        self.controls = [RoundControl(directory, 0, local) for _ in range(nodes)]
        arguments = [str(SCRIPT), str(steps)]
        if coupled:
            arguments.append(str(Hub(nodes * local).port))
        self.processes = [
            subprocess.Popen(
                command or (sys.executable, *arguments),
                env={**os.environ, "PYTHONPATH": str(ROOT), **control.environment(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for control in self.controls
            for rank in range(local)
        ]

    def ready(self) -> None:
        """Wait until all are about to take their first step."""
        assert [self.line(rank) for rank in range(len(self.processes))] == ["ready"] * len(self.processes)

    def line(self, rank: int) -> str:
        """The next line that a worker prints."""
        output = self.processes[rank].stdout
        assert output is not None
        return output.readline().strip()

    def hold(self) -> int:
        """What the leader finds: the maximum over all nodes."""
        answers = [control.hold() for control in self.controls]
        assert None not in answers
        return max(answer for answer in answers if answer is not None)

    def stop_at(self, step: int, reason: str = "preempted") -> None:
        """What the leader tells."""
        for control in self.controls:
            control.stop_at(step, reason)

    def last_words(self) -> list[str]:
        """What each printed at the end; all have to end well."""
        words = [process.communicate(timeout=HANG)[0].splitlines()[-1] for process in self.processes]
        assert [process.returncode for process in self.processes] == [0] * len(words)
        return words

    def close(self) -> None:
        """End them."""
        for process in self.processes:
            process.kill()
            process.communicate()
        for control in self.controls:
            control.close()


@contextlib.contextmanager
def workers(directory: Path, nodes: int, local: int, **options: object) -> Iterator[Workers]:
    """Workers that are ended."""
    made = Workers(directory, nodes, local, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()
