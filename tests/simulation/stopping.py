"""A round of a few nodes that is to stop at one step: workers, agents, leaders, as drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable

from slurm_elastic.control.agent_side import Agreement
from slurm_elastic.control.shared_page import ATTACHED, DEADLINE, HOLD, NONE, STEP, STOP
from slurm_elastic.control.worker_side import Stop, WorkerControl
from tests.simulation.interleaving import Interleaving, Memory, Processor, View

REASON = "preempted"  # more than one field long


class StopSchedule:
    """One schedule, and what came of it.

    Drawn are: nodes and workers; how many steps one may be ahead of the last (0: a collective in every step), how many
    steps there are in all; when a leader asks, whether it gives up and asks again, and whether it dies after it has
    told some, so that another one asks.

    Args:
        seed: of all this.
        agreement, worker: the code to be played.
        barrier: what the agents' barrier does.
        forgetful: the second leader lets the workers go first, as if none had been told.
    """

    def __init__(
        self,
        seed: int,
        *,
        agreement: type[Agreement] = Agreement,
        worker: type[WorkerControl] = WorkerControl,
        barrier: Callable[[Memory], None] = Memory.barrier,
        forgetful: bool = False,
    ) -> None:
        self.chance = chance = random.Random(seed)
        self.interleaving = Interleaving(chance)
        self.memory = Memory(self.interleaving, chance)
        self.worker, self.forgetful = worker, forgetful
        nodes, local = chance.choice(((1, 1), (1, 3), (2, 1), (2, 2), (3, 2)))
        self.ranks = range(nodes * local)
        self.steps, self.lead = chance.choice((2, 5, 12)), chance.choice((0, 0, 0, 1, 2, 1000))
        self.passed = dict.fromkeys(self.ranks, 0)
        self.stops: dict[int, tuple[int, Stop]] = {}
        self.stop_step: int | None = None
        self.orders: list[list[str | int]] = [[] for _ in range(nodes)]
        self.answers: list[list[int | None]] = [[] for _ in range(nodes)]
        self.leaders_gone = False
        for cell in ((rank, field) for rank in self.ranks for field in (DEADLINE, STEP)):
            self.memory.cells[cell] = NONE
        self.agents: list[Agreement] = []
        for node in range(nodes):
            processor = Processor(self.memory)
            pages = [View(processor, rank) for rank in range(node * local, (node + 1) * local)]

            def all_barrier(_: bool, own: Processor = processor) -> None:
                own.barrier()
                barrier(self.memory)

            self.agents.append(agreement(pages, all_barrier))

    def play(self) -> None:
        """Play it.

        Raises:
            AssertionError: a promise is broken.
        """
        for rank in self.ranks:
            self.interleaving.add(f"rank {rank}", lambda rank=rank: self._train(rank))  # type: ignore[misc]
        for node in range(len(self.agents)):
            self.interleaving.add(f"agent {node}", lambda node=node: self._obey(node))  # type: ignore[misc]
        self.interleaving.add("leader", self._lead)
        self.interleaving.add("memory", self.memory.write_out)
        self.interleaving.run()
        if self.stop_step is None or self.stop_step > self.steps:
            assert not self.stops, "stopped without an agreement"
            assert set(self.passed.values()) == {self.steps}
            return
        stopped = {rank: at for rank, (at, _) in self.stops.items()}
        assert stopped == dict.fromkeys(self.ranks, self.stop_step), f"{stopped}, not all at {self.stop_step}"
        assert {stop.reason for _, stop in self.stops.values()} == {REASON}

    def _train(self, rank: int) -> None:
        def pause(_: float) -> None:
            cells = self.memory.cells
            self.interleaving.wait(lambda: cells.get((rank, STOP)) or not cells.get((rank, HOLD)))

        worker = self.worker(View(Processor(self.memory), rank), pause)
        while (asked := self.passed[rank] + 1) <= self.steps:
            # The collective of a step ends when everybody takes part in it.
            self.interleaving.wait(lambda: self.passed[rank] - min(self.passed.values()) <= self.lead)
            stop = worker.ask(asked)
            if stop is not None:
                self.stops[rank] = asked, stop
                return
            assert self.stop_step is None or asked < self.stop_step, f"rank {rank} has passed step {self.stop_step}"
            self.passed[rank] = asked

    def _obey(self, node: int) -> None:
        agent, orders = self.agents[node], self.orders[node]
        while True:
            self.interleaving.wait(lambda: bool(orders) or self.leaders_gone)
            if not orders:
                return
            match orders.pop(0):
                case "hold":
                    self.answers[node].append(agent.hold())
                case "release":
                    agent.release()
                case int() as step:
                    agent.stop_at(step, REASON)

    def _lead(self) -> None:
        chance, nodes = self.chance, range(len(self.agents))
        begin = chance.randrange(self.steps + 1)
        self.interleaving.wait(lambda: max(self.passed.values()) >= begin)
        for _ in range(chance.choice((0, 0, 0, 1, 2))):  # asks, and gives up
            self._ask()
            self._tell("release")
        if chance.random() < 0.5:  # dies, having told some; another one leads
            step = self._ask()
            told = chance.randrange(len(nodes) + 1)
            if step is not None and told:
                self.stop_step = step
                for node in chance.sample(nodes, told):
                    self.orders[node].append(step)
            for _ in range(chance.randrange(30)):
                self.interleaving.step()
            if self.forgetful:
                self._tell("release")
        step = self._ask()
        if step is None:  # a worker had not started; this leader asks once more when all have
            self._tell("release")
            self.interleaving.wait(lambda: all(self.memory.cells.get((rank, ATTACHED)) for rank in self.ranks))
            step = self._ask()
        assert step is not None, "somebody takes no part"
        assert self.stop_step in (None, step), f"{step} agreed upon, {self.stop_step} told by another leader"
        self.stop_step = step
        self._tell(step)
        self.leaders_gone = True

    def _ask(self) -> int | None:
        for answers in self.answers:
            answers.clear()
        self._tell("hold")
        self.interleaving.wait(lambda: all(self.answers))
        steps = [answers[0] for answers in self.answers]
        return None if None in steps else max(step for step in steps if step is not None)

    def _tell(self, order: str | int) -> None:
        for orders in self.orders:
            orders.append(order)
            self.interleaving.step()
