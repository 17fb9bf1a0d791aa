"""What a leader finds out beside what agents tell it: about nodes that are missing, and about other leaders."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence

from slurm_elastic.rendezvous import membership
from slurm_elastic.rendezvous.leader.absent_agents import agents_ended, known_places
from slurm_elastic.rendezvous.leader.fenced_records import Ledger
from slurm_elastic.rendezvous.membership import Event, Gone, NodesSeen, Phase, State
from slurm_elastic.rendezvous.run_in_thread import aside
from slurm_elastic.rendezvous.transport.connect import Endpoint

__all__ = ["Enquiries", "FencedError"]

_AGAIN = 0.2
_ASK_SLURM = 5.0
_LOOK = 1.0


class FencedError(Exception):
    """Somebody else leads this run with a newer epoch, or this agent does not lead it any more."""


class Enquiries:
    """Asks while a round is being formed; an undisturbed leader asks nobody.

    Args:
        state: gives the leader's state.
        handle: takes what was found out.
        ledger: of the leader.
        places: where agents listen that the leader may miss.
        nodes_down: asks Slurm which of these nodes are down; blocks.
        agents_gone: asks Slurm which of these agents are gone; blocks.
    """

    def __init__(
        self,
        state: Callable[[], State],
        handle: Callable[[Event], None],
        ledger: Ledger,
        places: Mapping[str, Endpoint],
        nodes_down: Callable[[Sequence[str]], frozenset[str]] | None,
        agents_gone: Callable[[Sequence[str]], frozenset[str]] | None,
    ) -> None:
        self._state, self._handle, self._ledger = state, handle, ledger
        self._places, self._nodes_down, self._agents_gone = places, nodes_down, agents_gone
        self._forming = asyncio.Event()
        self._missing = asyncio.Event()

    def note(self, state: State) -> None:
        """Look at the leader's newest state."""
        _set(self._forming, state.phase is Phase.FORMING)
        _set(self._missing, bool(membership.missing(state)))

    async def look_for_members(self) -> None:
        """While members of the last round are missed, find out whether they have ended."""
        while True:
            await self._missing.wait()
            ended = await agents_ended(known_places(membership.missing(self._state()), self._places))
            if ended:
                self._handle(Gone(ended))
            await asyncio.sleep(_AGAIN)

    async def ask_about_agents(self) -> None:
        """While members of the last round are missed, ask Slurm what has become of them.

        Slurm may not answer as long as the network is cut that somebody is missed for.
        """
        agents_gone = self._agents_gone
        while agents_gone is not None:
            await self._missing.wait()
            # Those whose node says that they have ended are out by then.
            await asyncio.sleep(_AGAIN)
            missing = membership.missing(self._state())
            if missing:
                gone = await aside(functools.partial(agents_gone, missing))
                # Whoever has come meanwhile is not gone, whatever Slurm says.
                gone = gone.intersection(membership.missing(self._state()))
                if gone:
                    self._handle(Gone(gone))
                await asyncio.sleep(_ASK_SLURM)

    async def look_for_leaders(self) -> None:
        """While a round is being formed, see whether somebody else has taken a newer epoch.

        Raises:
            FencedError: somebody has.
            RecordsError: nobody can tell.
        """
        while True:
            await self._forming.wait()
            await asyncio.sleep(_LOOK)
            if self._state().claimed and not await asyncio.to_thread(self._ledger.leads):
                raise FencedError("somebody else leads with a newer epoch")

    async def ask_about_nodes(self) -> None:
        """While nodes of the allocation are missing, ask Slurm whether they are down: these are not waited for."""
        expected = self._state().settings.expected_nodes
        if self._nodes_down is None or not expected:
            return
        while True:
            await self._forming.wait()
            await asyncio.sleep(1.0)
            state = self._state()
            present = {agent.candidate.node for agent in state.agents.values()}
            missing = [node for node in expected if node not in present and node not in state.gone_nodes]
            if state.phase is Phase.FORMING and missing:
                down = await aside(functools.partial(self._nodes_down, missing))
                if down:
                    self._handle(NodesSeen(down))
                await asyncio.sleep(4.0)


def _set(event: asyncio.Event, value: bool) -> None:
    if value:
        event.set()
    else:
        event.clear()
