"""Real code of several processes in one: every access to shared memory is a point where another one may go on.

Actors are threads of which only one runs at a time; who is next is drawn. Memory is weaker than that of any processor
that training runs on: what a processor has stored stays in its own buffer and comes out in any order, field by field,
until a barrier. Processors that also load in another order than the program says are not modelled.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable


class StuckError(AssertionError):
    """Nobody can go on."""


class _AbortedError(BaseException):
    """Another actor has failed; this one is to end."""


class _Actor:
    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self.name, self.act = name, act
        self.condition: Callable[[], object] | None = None
        self.baton = threading.Lock()
        self.baton.acquire()


class Interleaving:
    """Actors that take turns.

    Args:
        chance: decides who is next.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._actors: list[_Actor] = []
        self._turn: _Actor | None = None
        self._over = threading.Lock()
        self._over.acquire()
        self._failure: BaseException | None = None

    def add(self, name: str, act: Callable[[], None]) -> None:
        """Have an actor do this."""
        self._actors.append(_Actor(name, act))

    def run(self) -> None:
        """Let them act until all are done; raises what one of them raises, and StuckError if they wait for ever."""
        threads = [threading.Thread(target=self._live, args=(actor,)) for actor in self._actors]
        for thread in threads:
            thread.start()
        self._hand_on()
        self._over.acquire()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def step(self) -> None:
        """Anybody may go on here."""
        self.wait(None)

    def wait(self, condition: Callable[[], object] | None) -> None:
        """The acting one goes on when this is true."""
        actor = self._turn
        assert actor is not None
        actor.condition = condition
        self._hand_on(actor)
        if self._failure is not None:
            raise _AbortedError

    def others_are_done(self) -> bool:
        """Whether the acting one is the last."""
        return len(self._actors) == 1

    def _hand_on(self, actor: _Actor | None = None) -> None:
        ready = [each for each in self._actors if each.condition is None or each.condition()]
        if not ready and self._failure is None:
            self._failure = StuckError(f"all wait: {', '.join(each.name for each in self._actors)}")
        following = self._chance.choice(ready or self._actors)
        self._turn = following
        if following is not actor:
            following.baton.release()
            if actor is not None:
                actor.baton.acquire()

    def _live(self, actor: _Actor) -> None:
        actor.baton.acquire()
        try:
            if self._failure is None:
                actor.act()
        except _AbortedError:
            pass
        except BaseException as error:
            self._failure = self._failure or error
        self._actors.remove(actor)
        if not self._actors:
            self._over.release()
        elif self._failure is not None:
            self._turn = self._actors[0]
            self._turn.baton.release()
        else:
            self._hand_on()


class Memory:
    """What processors share."""

    def __init__(self, interleaving: Interleaving, chance: random.Random) -> None:
        self.interleaving, self._chance = interleaving, chance
        self.cells: dict[tuple[int, int], int] = {}
        self.processors: list[Processor] = []

    def write_out(self) -> None:
        """What an actor of its own does: let stores arrive, one by one."""
        while True:
            self.interleaving.wait(lambda: self._waiting() or self.interleaving.others_are_done())
            waiting = [processor for processor in self.processors if processor.buffer]
            if not waiting:
                return
            buffer = self._chance.choice(waiting).buffer
            self._arrive(buffer, self._chance.choice(list(buffer)))

    def barrier(self) -> None:
        """Every processor writes out all that it has stored; one after the other, as each is interrupted."""
        for processor in self._chance.sample(self.processors, len(self.processors)):
            self.interleaving.step()
            while processor.buffer:
                self._arrive(processor.buffer, next(iter(processor.buffer)))

    def _waiting(self) -> bool:
        return any(processor.buffer for processor in self.processors)

    def _arrive(self, buffer: dict[tuple[int, int], list[int]], cell: tuple[int, int]) -> None:
        self.cells[cell] = buffer[cell].pop(0)
        if not buffer[cell]:
            del buffer[cell]


class Processor:
    """The memory as one processor sees it."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.buffer: dict[tuple[int, int], list[int]] = {}
        memory.processors.append(self)

    def barrier(self) -> None:
        """Write out all that this one has stored."""
        while self.buffer:
            self.memory._arrive(self.buffer, next(iter(self.buffer)))


class View:
    """The fields of one page, on one processor."""

    def __init__(self, processor: Processor, page: int) -> None:
        self._processor, self._page = processor, page

    def __getitem__(self, index: int) -> int:
        self._processor.memory.interleaving.step()
        cell = (self._page, index)
        buffer = self._processor.buffer
        return buffer[cell][-1] if cell in buffer else self._processor.memory.cells.get(cell, 0)

    def __setitem__(self, index: int, value: int) -> None:
        self._processor.memory.interleaving.step()
        self._processor.buffer.setdefault((self._page, index), []).append(value)
