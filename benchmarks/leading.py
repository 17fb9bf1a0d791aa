"""A leader in a process of its own, as the agents of a benchmark see it."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import resource
import socket
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.usage import Usage, usage
from slurm_elastic.descriptors import raise_limit
from slurm_elastic.rendezvous.leader.agent_connections import AcceptedConnection
from slurm_elastic.rendezvous.leader.fenced_records import FencedRecords
from slurm_elastic.rendezvous.leader.leader import Leader
from slurm_elastic.rendezvous.membership.config import Settings
from slurm_elastic.rendezvous.records.api import open_records
from slurm_elastic.rendezvous.records.etcd import load_config
from slurm_elastic.rundir import RunDir

RUN = "benchmark.0"
GIVEN_LIMITS = (1024, 20000)
"""Soft and hard limit on open files with which the leader's process begins."""
SECRET = b"0123456789abcdef0123456789abcdef"


class LeaderProcess:
    """A leader that expects the nodes n0 to n<nodes - 1>, and writes its rounds to a run directory, or to etcd."""

    def __init__(self, nodes: int, min_nodes: int, etcd: str = "") -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._directory = tempfile.TemporaryDirectory(prefix="benchmark-")
        self.run_dir = RunDir.for_run(Path(self._directory.name), "benchmark").open()
        arguments = (other, nodes, min_nodes, self.run_dir, etcd)
        self._process = context.Process(target=_main, args=arguments, daemon=True)

    def __enter__(self) -> LeaderProcess:
        self._process.start()
        self.endpoint: tuple[str, int] = ("127.0.0.1", self._pipe.recv())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self._directory.cleanup()

    @property
    def pid(self) -> int:
        """Id of the leader's process."""
        assert self._process.pid is not None
        return self._process.pid

    def usage(self) -> Usage:
        """What the leader's process uses now."""
        answer = self._ask("usage")
        assert isinstance(answer, Usage)
        return answer

    def wait_connected(self, agents: int) -> None:
        """Return when this many agents have proved who they are; blocks."""
        self._ask(agents)

    def _ask(self, question: object) -> object:
        self._pipe.send(question)
        return self._pipe.recv()


class _CountingLeader(Leader):
    """Knows when a number of agents are there."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._present = 0
        self._awaited: tuple[int, asyncio.Event] = (0, asyncio.Event())

    def authenticated(self, connection: AcceptedConnection) -> None:
        super().authenticated(connection)
        self._present += 1
        if self._present >= self._awaited[0]:
            self._awaited[1].set()

    async def wait_connected(self, agents: int) -> None:
        self._awaited = (agents, asyncio.Event())
        if self._present < agents:
            await self._awaited[1].wait()


def _main(pipe: Connection, nodes: int, min_nodes: int, run_dir: RunDir, etcd: str) -> None:
    logging.basicConfig(level=logging.WARNING, format="leader: %(message)s")
    # What most login shells hand to Slurm; the rest is the product's own doing.
    resource.setrlimit(resource.RLIMIT_NOFILE, GIVEN_LIMITS)
    raise_limit()
    asyncio.run(_live(pipe, nodes, min_nodes, run_dir, etcd))


async def _live(pipe: Connection, nodes: int, min_nodes: int, run_dir: RunDir, etcd: str) -> None:
    names = tuple(f"n{index}" for index in range(nodes))
    settings = Settings(min_nodes=min_nodes, max_nodes=nodes, expected_nodes=names)
    records = open_records(run_dir, RUN, load_config(etcd) if etcd else None, limit=60.0)
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = listener.getsockname()[1]
    fenced_records = FencedRecords(
        records, RUN, 1, {"agent": "leader", "address": "127.0.0.1", "port": port, "epoch": 1}, None
    )
    fenced_records.claim()
    leader = _CountingLeader(RUN, SECRET, 1, settings, fenced_records, lambda decision: None)
    serving = asyncio.create_task(leader.serve(listener))
    serving.add_done_callback(lambda task: task.result())
    pipe.send(port)
    while True:
        question = await asyncio.to_thread(pipe.recv)
        if isinstance(question, int):
            await leader.wait_connected(question)
            pipe.send(None)
        else:
            pipe.send(usage())
