"""The passing of time in the election: how long an agent follows, where it searches, when it campaigns.

:mod:`.machine` makes one step of this after each event. Pure: the moments follow from the state. Each that is looked
at (:meth:`Due.is_due`) and lies ahead is one that the machine wants to see, as no event announces it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from slurm_elastic.rendezvous.election import events
from slurm_elastic.rendezvous.election import leader_location as attempting
from slurm_elastic.rendezvous.election.campaign import (
    FENCE,
    RESTORE,
    LeaderLoss,
    campaign_delay,
    first_question_delay,
    search_pause,
)
from slurm_elastic.rendezvous.election.leader_location import Answer, Attempts
from slurm_elastic.rendezvous.election.state import Campaigning, Election, Following, Leading, Lookup, Preparing, Search
from slurm_elastic.rendezvous.membership.agents import Reason, node_of
from slurm_elastic.rendezvous.membership.persistent import replace
from slurm_elastic.rendezvous.transport.messages import AgentMessage, Endpoint, Successor

READ_AGAIN = 0.5
"""Seconds between two readings of the records while the agent searches or campaigns."""
CAMPAIGN_AGAIN = 1.0
"""Seconds between the starts of two campaigns."""
STEP_DOWN = 3.0
"""Seconds in which an agent does not campaign again after it stepped down: the time to reach the other candidate."""
UNLED = 10.0
"""Seconds after which a run that no agent has ever led is led by any agent."""
LATE = 1 / 6
"""Part of the heartbeat limit: an agent whose tick comes this much late was paused."""
SUSPICIOUS = 1 / 2
"""Part of the heartbeat limit after which an agent with a silent leader connects to it again."""
RECONNECT, RECONNECT_AGAIN = 1 / 10, 3 / 20
"""Of the heartbeat limit: how long such a connection may take, and from the start of one to that of the next."""
_FIRST_TRIED = 8
"""Agents that may follow the leader and are tried at once; one by an agent that searches among thousands."""
_LEADS_NONE = (Answer.ENDED, Answer.IDLE)


class Due:
    """One step under way: the state so far, and the actions so far."""

    def __init__(self, state: Election, now: float) -> None:
        # A copy of its own, which changes in place until the step is over.
        self.state, self.now = replace(state), now
        self.config = state.config
        self.actions: list[events.Action] = []
        self._ahead = [math.inf]

    def change(self, **changes: Any) -> None:
        """Change the state."""
        self.state.__dict__.update(changes)

    def change_search(self, **changes: Any) -> None:
        """Change what the state says of the search."""
        self.change(search=replace(self.state.search, **changes))

    def number(self) -> int:
        """Return the next number for an attempt, a reading or a campaign."""
        self.change(numbers=self.state.numbers + 1)
        return self.state.numbers

    def act(self, action: events.Action) -> None:
        """Have something done, after what has been asked for already."""
        self.actions.append(action)

    # Time.

    def allow_for_own_pause(self, event: events.Event) -> None:
        """Give the leader time if this agent was paused: a leader that was paused, too, has only just become silent.

        As when a whole job is suspended and goes on node by node. Once: an agent that is always late has to find out
        some time that it has no leader.
        """
        link, limit = self.state.link, self.state.heartbeat_limit
        if link is None or (isinstance(event, events.Received) and event.number == link.number):
            return
        suspicious = limit * SUSPICIOUS
        meant = max(self.state.deadline, link.last_message_at + suspicious)
        if self.now > meant + limit * LATE and link.last_message_at != link.allowed:
            last_message_at = self.now - suspicious
            self.change(link=replace(link, last_message_at=last_message_at, allowed=last_message_at))

    def advance(self) -> None:
        """Do what is due at this moment."""
        if self.state.over:
            return
        if self.state.link is not None:
            self._watch(self.state.link)
        if self.state.link is None:
            self._search()
        elif isinstance(self.state.campaign, Campaigning):
            self._read_location()
        if not self.state.over:
            self._connect()

    def is_due(self, moment: float) -> bool:
        """Return whether this moment has come; if it has not, the machine wants a tick when it does."""
        if self.now < moment:
            self._ahead.append(moment)
        return self.now >= moment

    def deadline(self) -> float:
        """Return when something may be due that no event announces."""
        return math.inf if self.state.over else min(self._ahead)

    # Following.

    def _watch(self, link: Following) -> None:
        """Act on the silence of the leader."""
        limit = self.state.heartbeat_limit
        if not self.is_due(link.last_message_at + limit * SUSPICIOUS):
            return
        if self.is_due(link.last_message_at + self.state.leader_limit):
            self.act(events.CloseLink(link.number))
            self._lose_link(link)
            return
        if self.is_due(link.last_message_at + limit * FENCE):
            self._fence("the leader is silent")

    def _lose_link(self, link: Following) -> None:
        """The link to the leader is of no more use: search for one."""
        self._cancel_attempts()
        members, own = self.state.known, self.config.agent
        # One of the first successors leads next, so they search at full rate, and the others have it to wait for.
        first = any(successor.agent == own for successor in members.successors[:_FIRST_TRIED])
        searching = 0 if first else members.members
        search = Search(
            self.now,
            link.endpoint,
            link.last_message_at,
            self.now if members.resigned else None,
            least_pause=search_pause(searching, own),
            asks_at=self.now + first_question_delay(searching, own),
        )
        self.change(link=None, search=search, lookup=Lookup(), attempts=Attempts())

    def _follow(self, number: int, endpoint: Endpoint) -> None:
        """Follow the leader at the other end of this link."""
        self._cancel_attempts(number)
        self.change(attempts=Attempts())
        self.change(link=Following(number, endpoint, self.now), known=replace(self.state.known, resigned=False))
        follower, greeting = self.state.follower.greet(self.now)
        self.change(follower=follower)
        for message in greeting:
            self.act(events.Send(number, message))

    def _send(self, message: AgentMessage) -> None:
        # What cannot be sent now is not lost: every new link begins with what the leader has to know.
        if self.state.link is not None:
            self.act(events.Send(self.state.link.number, message))

    def _fence(self, why: str) -> None:
        """Stop the workers here: the leader gives up this agent about now, and goes on without it."""
        cut_off = self.state.follower.cut_off_now()
        if cut_off is not None and cut_off.last_round is not None:
            self.change(follower=cut_off)
            node = node_of(self.state.known.leader)
            self.act(events.Deliver(events.CutOff(cut_off.last_round, Reason.NODE_LOST, node, why)))

    # Searching.

    def _search(self) -> None:
        search = self.state.search
        if search.lost is not None and self.is_due(search.began + RESTORE):
            self._fence("the link to the leader is broken")
        if search.lost_at is None:
            lost_at = self._lost_at()
            if lost_at is not None:
                self.change_search(lost_at=lost_at)
        self._read_location()
        search, problem = self.state.search, self.state.attempts.problem
        self._campaign_if_due()
        if self.is_due(search.began + UNLED) and not search.warned:
            self.change_search(warned=True)
            left = search.began + self.config.connect_timeout - self.now
            self.act(events.Warn(f"no leader found for {UNLED:g} s: {problem}; this agent tries for {left:.0f} s more"))
        if self.is_due(search.began + self.config.connect_timeout):
            self._end(events.LeaderLost(problem) if search.lost is not None else self._unreachable(problem))

    def _read_location(self) -> None:
        """Read from the records where the leader is, if that is due."""
        lookup, since = self.state.lookup, self.state.search.lost_at if self.state.link is None else None
        if lookup.pending is not None:
            return
        again = READ_AGAIN if self.state.campaign is not None else max(READ_AGAIN, self.state.search.least_pause)
        old = (since is not None and lookup.read_at < since) or self.is_due(lookup.read_at + again)
        if old and self.is_due(self.state.search.asks_at):
            number = self.number()
            self.act(events.ReadLeaderLocation(number, self.state.known.recorded(lookup.location)))
            self.change(lookup=replace(lookup, pending=number, began=self.now))

    def _lost_at(self) -> float | None:
        """Since when it is certain that there is no leader where there was one; None as long as it is not."""
        state, search, now = self.state, self.state.search, self.now
        if search.lost is not None:
            return now if self.state.attempts.answer(search.lost) in _LEADS_NONE or self._is_silent() else None
        location = state.lookup.location
        if not location.published:
            if not self.is_due(search.began + UNLED):
                return None
            # To lead the same run a second time is the last thing to do, also when the other leader is silent for once
            # or has finished it.
            twins = self.state.attempts.with_answer(Answer.TWIN)
            if twins and not state.twins:
                self.act(events.Warn(_twin(twins)))
            if not twins <= state.twins:
                self.change(twins=state.twins | twins)
            return None if self.state.twins else now
        gone = all(self.state.attempts.answer(endpoint) in _LEADS_NONE for endpoint in location.endpoints)
        return now if gone or self.is_due(search.began + self.state.leader_limit) else None

    def _is_silent(self) -> bool:
        return self.is_due(self.state.search.last_message_at + self.state.leader_limit)

    def _end(self, event: events.LeaderEvent) -> None:
        self.end()
        self.act(events.Deliver(event))

    def _unreachable(self, problem: str) -> events.Unreachable:
        if self.state.twins and not self.state.lookup.location.published:
            return events.Unreachable(_twin(self.state.twins), usage=True)
        return events.Unreachable(f"{problem}, tried for {self.config.connect_timeout:g} s")

    def _connect(self) -> None:
        """Start the attempts that are due.

        While the leader is merely silent a second link is tried beside the first: either the leader is paused, then the
        first one goes on; or the network was cut, and TCP would take many seconds to notice that it is whole again.
        """
        state, link, limit = self.state, self.state.link, self.state.heartbeat_limit
        endpoints = self._rivals() if isinstance(state.campaign, Campaigning) else ()
        if link is None:
            endpoints = (*self._endpoints(), *endpoints)
        elif self.now >= link.last_message_at + limit * SUSPICIOUS:
            endpoints = (link.endpoint, *endpoints)
        starting, next_at = attempting.due(state.attempts, endpoints, self.now)
        self._ahead.append(next_at)
        for endpoint in starting:
            number, again = self.number(), link is not None and endpoint == link.endpoint
            self.change(attempts=attempting.begin(self.state.attempts, endpoint, number, self.now))
            self.act(events.Connect(number, endpoint, limit * RECONNECT if again else None))

    def _cancel_attempts(self, kept: int | None = None) -> None:
        for number in self.state.attempts.pending():
            if number != kept:
                self.act(events.CloseLink(number))

    def _endpoints(self) -> tuple[Endpoint, ...]:
        """Return the endpoints of the search for a leader, in order.

        An agent that campaigns or leads follows itself.
        """
        state, search = self.state, self.state.search
        if isinstance(state.campaign, Campaigning | Leading):
            return state.config.endpoints[:1]
        left, last = state.known.left, state.known.endpoint
        endpoints = [endpoint for endpoint in state.lookup.location.endpoints if endpoint != left]
        if search.lost is not None and search.lost != left:
            endpoints.insert(0, search.lost)
        if self.is_due(search.asks_at) and (search.lost_at is not None or self.is_due(search.began + RESTORE)):
            endpoints += self._candidates()
            if last is not None and last not in (left, *state.config.endpoints):
                # It may campaign again. Candidates step down for it, so they have to find it then.
                endpoints.append(last)
        return tuple(dict.fromkeys(endpoints))

    def _candidates(self) -> Iterator[Endpoint]:
        """Yield the endpoints of the first that may campaign, as many more each second, and of those before them.

        A round on record may have thousands of members, each of which would otherwise try each other.
        """
        search, leaving = self.state.search, self.state.known.leaving
        # All of thousands ask the same agents, of which the first leads next, unless it has ended.
        most = (1 if search.least_pause else _FIRST_TRIED) * (1 + int(self.now - max(search.began, search.asks_at)))
        for successor in self._order():
            if successor.agent == self.config.agent:
                continue
            yield successor.endpoint
            in_vain = self.state.attempts.answer(successor.endpoint) in (Answer.ENDED, Answer.SILENT)
            most -= not in_vain and successor.agent not in leaving
            if most <= 0:
                return

    # Campaigning.

    def _order(self) -> Sequence[Successor]:
        """Return the agents that may follow the leader, the first to campaign first."""
        return self.state.known.order(self.state.lookup.location)

    def _rivals(self) -> tuple[Endpoint, ...]:
        """Return the endpoints of a possible leader, and of the candidates that precede this one."""
        members, own, order = self.state.known, self.config.agent, self._order()
        names = [successor.agent for successor in order]
        ahead = order[: names.index(own)] if own in names else order
        endpoints = [*self.state.lookup.location.endpoints, *(successor.endpoint for successor in ahead)]
        if members.endpoint is not None:
            # The last leader is no successor of its own. It may have come back too late to lead, and campaign as well.
            endpoints.append(members.endpoint)
        others = (members.left, *self.config.endpoints)
        return tuple(dict.fromkeys(endpoint for endpoint in endpoints if endpoint not in others))

    def _agent_at(self, endpoint: Endpoint, order: Sequence[Successor]) -> str:
        """Return the agent that listens at an endpoint; empty if it is not known.

        A leader that is lost before it gave an assignment here is not the one that gave the last.
        """
        if endpoint == self.state.known.endpoint:
            return self.state.known.leader
        return next((successor.agent for successor in order if successor.endpoint == endpoint), "")

    def _campaign_if_due(self) -> None:
        state, search = self.state, self.state.search
        if state.campaign is not None or search.lost_at is None:
            return
        # Another agent may lead since an earlier look.
        if state.lookup.read_at < search.lost_at:
            return
        order, ended = self._order(), state.attempts.with_answer(Answer.ENDED)
        names = [successor.agent for successor in order]
        gone = {successor.agent for successor in order if successor.endpoint in ended} | state.known.gone
        delay = campaign_delay(names, self.config.agent, gone, state.known.leaving)
        if self.is_due(max(search.lost_at + delay, state.campaign_at)):
            number = self.number()
            self.change(campaign=Preparing(number, self._loss(order, gone)), campaign_at=self.now + CAMPAIGN_AGAIN)
            self.act(events.ReadCampaignRecords(number))

    def _loss(self, order: Sequence[Successor], gone: AbstractSet[str]) -> LeaderLoss:
        members, search = self.state.known, self.state.search
        silent = frozenset[str]()
        if search.lost is not None and (lost := self._agent_at(search.lost, order)):
            if self.state.attempts.answer(search.lost) is Answer.ENDED:
                gone |= {lost}
            elif self._is_silent() and lost not in gone:
                silent = frozenset({lost})
        return LeaderLoss(
            Reason.NODE_LEFT if members.resigned else Reason.NODE_LOST, frozenset(gone), silent, members.round
        )

    def _step_down(self) -> None:
        """Leave it to another agent to lead."""
        if isinstance(self.state.campaign, Campaigning):
            self.act(events.StopLeading())
            self.change(campaign=None, campaign_at=self.now + STEP_DOWN)

    def end(self) -> None:
        """The run has ended for this agent, or the agent ends: leave nothing under way."""
        self._cancel_attempts()
        if isinstance(self.state.campaign, Preparing):
            self.change(campaign=None)
        self.change(over=True)


def address(endpoint: Endpoint) -> str:
    """Return an endpoint as people write it."""
    return f"{endpoint[0]}:{endpoint[1]}"


def _twin(endpoints: Collection[Endpoint]) -> str:
    where = ", ".join(sorted(address(endpoint) for endpoint in endpoints))
    return (
        f"a run of this id is led from {where} by another run directory; give one that all nodes share by --run-dir, or"
        " another --run-id"
    )
