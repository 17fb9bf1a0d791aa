"""Agents' memories on one machine, whose rounds a test publishes, and workers that use them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from slurm_elastic import snapshot
from slurm_elastic.snapshot.agent_side import AgentMemory
from slurm_elastic.snapshot.lineage import Group, choose
from slurm_elastic.snapshot.transfer import Settings

_template = multiprocessing.get_context("forkserver")
_template.set_forkserver_preload([__name__, "pytest", "torch.testing._internal.distributed.fake_pg", "torch._dynamo"])
Fork = Callable[..., Any]
"""`ForkServer.fork_child`."""


class Agents:
    """Agents of one run, whose rounds the test publishes; `options` are for each `AgentMemory`."""

    def __init__(self, directory: Path, *, silence: float = 1.0, **options: Any) -> None:
        self._directory, self._silence, self._options = directory, silence, options
        self._by_name: dict[str, AgentMemory] = {}
        self.round: int | None = None
        self.origin = ""

    def add(self, name: str, secret: bytes = b"s" * 32) -> AgentMemory:
        (self._directory / name).mkdir()
        settings = Settings(secret, "7.0", name, name, "127.0.0.1", self._silence)
        made = AgentMemory(self._directory / name, settings, **self._options)
        self._by_name[name] = made
        return made

    def next_round(
        self, agents: Sequence[AgentMemory], workers: Sequence[int] = (), **ended: bool
    ) -> list[dict[str, str]]:
        """Return the variables of the workers on each agent.

        Args:
            agents: By rank.
            workers: Their number on each, 1 if not given.
            **ended: How the last round has ended; see `AgentMemory.inventory`.
        """
        with ThreadPoolExecutor() as pool:
            # They wait for each other.
            inventories = list(pool.map(lambda agent: agent.inventory(**ended), agents))
        self.origin = choose(self.round, self.origin, inventories)
        self.round = 0 if self.round is None else self.round + 1
        variables = []
        for rank, agent in enumerate(agents):
            counts = list(workers) or [1] * len(agents)
            group = Group(rank, len(agents), counts[rank], sum(counts[:rank]), sum(counts))
            variables.append(agent.begin(self.round, self.origin, group))
        return [{**each, "SLURM_ELASTIC_ROUND": str(self.round), "LOCAL_RANK": "0"} for each in variables]

    def alone(self, agent: AgentMemory, work: Any) -> Any:
        """Return what the worker of a next round returns that this agent is alone in."""
        return in_worker(self.next_round([agent])[0], work)

    def lose(self, name: str) -> None:
        """The node is lost with all that its agent holds."""
        self._by_name.pop(name).close(time.monotonic())

    def leave(self, name: str, seconds: float) -> None:
        """The agent goes within `seconds`."""
        self._by_name.pop(name).close(time.monotonic() + seconds)

    def all(self) -> list[AgentMemory]:
        """Return the agents that are left."""
        return list(self._by_name.values())

    def close(self) -> None:
        for agent in self._by_name.values():
            agent.close()


def start_worker(variables: dict[str, str], work: Any) -> Callable[[], Any]:
    """Start a worker with this environment; the answer waits for it, and returns what it returns.

    It is forked from a process without threads: agents have many here, which may hold locks.
    """
    receiving, sending = _template.Pipe(duplex=False)
    process = _template.Process(target=_work, args=(sending, {**os.environ, **variables}, cloudpickle.dumps(work)))
    process.start()
    sending.close()

    def result() -> Any:
        returned = None
        with contextlib.suppress(EOFError):
            returned = receiving.recv()
        process.join()
        return returned

    return result


def _work(sending: Connection, variables: dict[str, str], work: bytes) -> None:
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(1)
    sending.send(cloudpickle.loads(work)())


def meet(directory: Path, step: int, is_over: Callable[[], bool] = lambda: False) -> None:
    """Wait until all ranks have come to this step, as in a collective: else one may be further and further ahead."""
    rank, world = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    own = directory / f"at.{rank}"
    part = own.with_name(f".{own.name}")
    part.write_text(str(step))
    part.rename(own)
    others = [directory / f"at.{other}" for other in range(world)]
    while not is_over() and any(not path.exists() or int(path.read_text()) < step for path in others):
        time.sleep(0.01)


def in_worker(variables: dict[str, str], work: Any) -> Any:
    """Return what a worker with this environment returns."""
    return start_worker(variables, work)()


def raised_by(work: Any) -> Any:
    """Return work that returns the error of this one as text."""

    def raised() -> str:
        try:
            work()
        except (RuntimeError, ValueError, TypeError, KeyError, MemoryError) as error:
            return str(error)
        return ""

    return raised


def with_store(variables: list[dict[str, str]]) -> tuple[dist.TCPStore, list[dict[str, str]]]:
    """The store of a round, and the variables of its workers."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, [{**each, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)} for each in variables]


def together(variables: list[dict[str, str]], work: Any) -> list[Any]:
    """What the ranks of a group return."""
    store, variables = with_store(variables)
    workers = [start_worker(each, work) for each in variables]
    found = [result() for result in workers]
    del store
    return found


def saves(*steps: int, size: int = 1000) -> Any:
    def work() -> bool:
        for step in steps:
            snapshot.save(step, weights=torch.full((size,), float(step)), progress={"step": step})
        return True

    return work


def loads() -> tuple[float, int] | None:
    """The value of the weights, and the step."""
    weights, progress = snapshot.load(weights=torch.zeros(1), progress=None)
    assert (weights == weights[0]).all()
    return None if progress is None else (float(weights[0]), progress["step"])
