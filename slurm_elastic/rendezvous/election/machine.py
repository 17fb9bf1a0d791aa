"""The election as seen by one agent: a pure state machine, without I/O, clock, threads or randomness.

:func:`step` takes the state, one event and the agent's monotonic time, and returns the next state and the actions.
:mod:`.runner` carries them out; :mod:`.due` has what time alone brings about; :mod:`.term` decides in which order a
leader claims its term, confirms the last round and publishes its endpoint.

An agent follows (:class:`~.state.Following`, in `link`) or searches for a leader (:class:`~.state.Search`). Beside that
it may prepare a campaign, campaign or lead (`campaign`); it follows itself then, so that its joins take the same way as
those of all others.

| event | searches | follows | campaigns, too |
|---|---|---|---|
| LinkOpened | follows it | takes the second link to a silent leader | steps down |
| LinkFailed | tries again later | searches, if the first link is closed | tries again later |
| LinkClosed | | searches | |
| Received | | obeys the message | |
| LeaderLocationRead | tries its endpoints | | tries its endpoints |
| CampaignRecordsRead | campaigns, or waits for another term | | |
| LeaderClaimed | | | leads |
| LeaderEnded | | | ends its campaign or its term |
| Tick | reads records, connects, campaigns in its turn | by silence: connects, fences, searches | tries rivals |

The other events come from the agent's main thread. They change what the agent repeats to each new leader
(:mod:`.follower`), and are sent to the present one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slurm_elastic.rendezvous.election import campaign as campaigning
from slurm_elastic.rendezvous.election import events
from slurm_elastic.rendezvous.election import leader_location as attempting
from slurm_elastic.rendezvous.election.due import RECONNECT_AGAIN, STEP_DOWN, Due, address
from slurm_elastic.rendezvous.election.leader_location import Answer
from slurm_elastic.rendezvous.election.state import Campaigning, Election, Leading, Lookup, Preparing
from slurm_elastic.rendezvous.membership.events import (
    Ended,
    Held,
    Holding,
    Interrupted,
    Leaving,
    Left,
    Probed,
    Resigned,
    Stopping,
)
from slurm_elastic.rendezvous.membership.persistent import replace
from slurm_elastic.rendezvous.transport import messages


def step(state: Election, event: events.Event, now: float) -> tuple[Election, tuple[events.Action, ...]]:
    """Process one event at this moment; return the next state, and what has to be done, in order."""
    turn = _Step(state, now)
    turn.allow_for_own_pause(event)
    _HANDLERS[type(event)](turn, event)
    turn.advance()
    turn.change(deadline=turn.deadline())
    return turn.state, tuple(turn.actions)


class _Step(Due):
    """One step under way: what each event changes, beside what is due."""

    def tick(self, event: events.Tick) -> None:
        """All that is due by time happens in :meth:`advance`."""

    def link_opened(self, event: events.LinkOpened) -> None:
        """Use the link if it leads to a leader of this term or a later one; close it in any other case."""
        state, link = self.state, self.state.link
        endpoint = state.attempts.endpoint(event.number)
        rival = isinstance(state.campaign, Campaigning) and endpoint in self._rivals()
        if endpoint is None or state.over:
            self.act(events.CloseLink(event.number))
        elif event.term < state.known.term:
            self._close(event.number, f"{address(endpoint)} is a leader that another one has superseded")
        elif link is not None and endpoint == link.endpoint:
            # The leader has ended the older one for it.
            self.act(events.CloseLink(link.number))
            self._follow(event.number, event.endpoint)
        elif link is not None and rival:
            # A candidate follows itself, and the rival next.
            self._step_down()
            self.act(events.CloseLink(event.number))
        elif link is None and (rival or endpoint in self._endpoints()):
            if event.endpoint not in self.config.endpoints:
                # A candidate would withdraw at the next break of this link.
                self._step_down()
            if isinstance(self.state.campaign, Preparing):
                # An agent that has found a leader does not campaign, however long the records take.
                self.change(campaign=None)
            self._follow(event.number, event.endpoint)
        else:
            self._close(event.number, f"{address(endpoint)} is asked no more")

    def _close(self, number: int, why: str) -> None:
        """Close a link that leads to no leader to follow; its attempt has failed."""
        self.link_failed(events.LinkFailed(number, Answer.SILENT, why))
        self.act(events.CloseLink(number))

    def link_failed(self, event: events.LinkFailed) -> None:
        """Note what the failure says about the other side."""
        state, link = self.state, self.state.link
        endpoint = state.attempts.endpoint(event.number)
        if endpoint is None:
            return
        again = link is not None and endpoint == link.endpoint
        least_pause = state.heartbeat_limit * RECONNECT_AGAIN if again else 0.0
        pause = max(event.busy, state.search.least_pause if link is None else least_pause)
        self.change(attempts=attempting.answered(state.attempts, endpoint, event.answer, event.problem, pause))
        if link is None:
            if event.answer is Answer.VERSION and not state.over:
                self._end(events.Unreachable(event.problem, usage=True))
        elif again and link.closed:
            self._lose_link(link)

    def link_closed(self, event: events.LinkClosed) -> None:
        link = self.state.link
        if link is None or link.number != event.number:
            return
        if self.state.attempts.is_pending(link.endpoint):
            self.change(link=replace(link, closed=True))
        else:
            self._lose_link(link)

    def leader_location_read(self, event: events.LeaderLocationRead) -> None:
        lookup, location = self.state.lookup, event.location
        if lookup.pending != event.number:
            return
        if location.published and not lookup.location.published and self.state.search.lost is None:
            # What was answered before a leader listened there says nothing about it.
            self.change(attempts=self.state.attempts.without_answers(location.endpoints))
        self.change(lookup=Lookup(location, lookup.began))

    def campaign_records_read(self, event: events.CampaignRecordsRead) -> None:
        """Begin the campaign, unless another agent has claimed a term meanwhile, or the records cannot be used."""
        campaign, config, problem = self.state.campaign, self.config, event.problem
        if not isinstance(campaign, Preparing) or campaign.number != event.number:
            return
        self.change(campaign=None)
        if event.records is not None:
            try:
                claimed = campaigning.another_has_claimed(config, event.records)
                if claimed is not None and claimed not in self.state.waited_for:
                    # That agent publishes its endpoint in a moment; unless it has died in between.
                    self.change(waited_for=self.state.waited_for | {claimed})
                    return
                plan = campaigning.plan(config, event.records, campaign.loss)
                self.change(campaign=Campaigning(campaign.number))
                self.act(events.Lead(campaign.number, plan))
                return
            except (LookupError, TypeError, ValueError) as error:
                problem = str(error)
        if problem != self.state.logged_problem:
            self.change(logged_problem=problem)
            self.act(events.Warn(f"this agent cannot campaign to lead: {problem}"))

    def leader_claimed(self, event: events.LeaderClaimed) -> None:
        if self.state.campaign == Campaigning(event.number):
            self.change(campaign=Leading(event.number))

    def leader_ended(self, event: events.LeaderEnded) -> None:
        campaign = self.state.campaign
        if campaign is None or campaign.number != event.number:
            return
        self.change(campaign=None, campaign_at=self.now + STEP_DOWN)
        if event.problem:
            self.act(events.Deliver(events.LeaderLost(event.problem)))

    def join(self, event: events.Join) -> None:
        follower, joined = self.state.follower.join(event.candidate)
        self.change(follower=follower)
        self._send(joined)

    def send_to_leader(self, event: events.SendToLeader) -> None:
        if isinstance(event.message, Leaving | Left):
            self.change(known=self.state.known.leaves((self.config.agent,)))
        self.change(follower=self.state.follower.told(event.message, self.now))
        self._send(event.message)

    def stop(self, event: events.Stop) -> None:
        self.end()

    # Messages of the leader.

    def _set_heartbeat_limit(self, heartbeat_limit: float) -> None:
        """Note the heartbeat limit in force."""
        if heartbeat_limit and heartbeat_limit != self.state.heartbeat_limit:
            self.change(heartbeat_limit=heartbeat_limit)

    def received(self, event: events.Received) -> None:
        link, follower, members = self.state.link, self.state.follower, self.state.known
        if link is None or link.number != event.number:
            return
        self.change(link=replace(link, last_message_at=self.now))
        message = event.message
        match message:
            case messages.Heartbeat(limit):
                self._set_heartbeat_limit(limit)
                self._send(_BEAT)
            case Probed(probe, dumps):
                if not follower.owes_join:
                    self.act(events.AnswerProbe(link.number, probe, dumps))
            case messages.Assignment(attempt=attempt, round=round_, restarts=restarts):
                follower = follower.charged(restarts)
                placed = follower.placed(attempt, round_)
                self.change(follower=placed or follower)
                if placed is not None:
                    self.change(known=members.placed(message, link.endpoint))
                    self._set_heartbeat_limit(message.heartbeat_limit)
                    self.act(events.Deliver(message))
            case Resigned(agent, gone):
                self.change(known=members.resigns(agent, gone, link.endpoint))
            case Holding(round_, leaving):
                self.change(known=members.leaves(leaving))
                if follower.holding(round_):
                    if self.config.can_hold:
                        self.act(events.Deliver(message))
                    else:
                        self._send(Held(self.config.agent, round_, None))
            case Stopping(round=round_, step=at, leaving=leaving):
                self.change(known=members.leaves(leaving))
                stopping = follower.stopping(round_, at)
                if stopping is not None:
                    self.change(follower=stopping)
                    self.act(events.Deliver(message))
            case Interrupted(round=round_, restarts=restarts):
                follower = follower.charged(restarts)
                self.change(follower=follower)
                if follower.interrupted(round_):
                    self.change(follower=follower.note_over())
                    self.act(events.Deliver(message))
                elif follower.candidate is not None:
                    # The leader gave an assignment in that round, which was lost on the way.
                    self.join(events.Join(follower.candidate))
            case Ended():
                self.end()
                self.act(events.Deliver(message))
            case messages.LeaveAnswer() | messages.StatusRequested() | messages.StatusPart() | messages.StatusAnswer():
                # For clients, and for the runner.
                pass
            case _:
                self.act(events.Deliver(message))


_HANDLERS: dict[type, Callable[[_Step, Any], None]] = {
    events.Tick: _Step.tick,
    events.LinkOpened: _Step.link_opened,
    events.LinkFailed: _Step.link_failed,
    events.LinkClosed: _Step.link_closed,
    events.Received: _Step.received,
    events.LeaderLocationRead: _Step.leader_location_read,
    events.CampaignRecordsRead: _Step.campaign_records_read,
    events.LeaderClaimed: _Step.leader_claimed,
    events.LeaderEnded: _Step.leader_ended,
    events.Join: _Step.join,
    events.SendToLeader: _Step.send_to_leader,
    events.Stop: _Step.stop,
}

_BEAT = messages.Heartbeat()
