"""The election as seen by one agent: a pure state machine, without I/O, clock, threads or randomness.

:func:`step` takes the state, one event and the agent's monotonic time, and returns the next state and the actions.
:mod:`.runner` carries them out; :mod:`.term` decides in which order a leader claims its term, confirms the last round
and publishes its endpoint.

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
| TermClaimed | | | leads |
| CampaignBlocked | | | steps down after BLOCKING_LIMIT |
| LeaderEnded | | | ends its campaign or its term |
| Tick | reads records, connects, campaigns in its turn | by silence: connects, fences, searches | tries rivals |

The other events come from the agent's main thread. They change what the agent repeats to each new leader
(:mod:`.follower`), and are sent to the present one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

from slurm_elastic.rendezvous.election import actions, endpoints, events
from slurm_elastic.rendezvous.election import campaign as campaigning
from slurm_elastic.rendezvous.election import leader_location as attempting
from slurm_elastic.rendezvous.election.leader_location import Answer, Attempts
from slurm_elastic.rendezvous.election.policy import (
    BLOCKING_LIMIT,
    FENCE,
    RESTORE,
    LeaderLoss,
    campaign_delay,
    first_question_delay,
    search_pause,
)
from slurm_elastic.rendezvous.election.state import Campaigning, Election, Following, Leading, Lookup, Preparing, Search
from slurm_elastic.rendezvous.leader_events import CutOff, LeaderEvent, LeaderLost, Unreachable
from slurm_elastic.rendezvous.membership import Held, Reason, replace
from slurm_elastic.rendezvous.requests import LeaveAnswer, StatusAnswer, StatusPart, StatusRequested
from slurm_elastic.rendezvous.transport.connect import Endpoint
from slurm_elastic.rendezvous.transport.messages import (
    AgentMessage,
    Assignment,
    Ended,
    Heartbeat,
    Holding,
    Interrupted,
    Probed,
    Resigned,
    Stopping,
)

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
RECONNECT, RECONNECT_AGAIN = 1 / 10, 1 / 20
"""Of the heartbeat limit: how long such a connection may take, and the pause before the next one."""


def step(state: Election, event: events.Event, now: float) -> tuple[Election, tuple[actions.Action, ...]]:
    """Process one event.

    Args:
        state: as the last step left it.
        event: what happened.
        now: the agent's monotonic time.

    Returns:
        The next state, and what has to be done, in order.
    """
    turn = _Step(state, now)
    turn.allow_for_own_pause(event)
    _HANDLERS[type(event)](turn, event)
    turn.advance()
    turn.change(deadline=turn.deadline())
    return turn.state, tuple(turn.actions)


class _Step:
    """One step under way: the state so far, and the actions so far."""

    def __init__(self, state: Election, now: float) -> None:
        # A copy of its own, which changes in place until the step is over.
        self.state, self.now = replace(state), now
        self.config = state.config
        self.actions: list[actions.Action] = []
        # When the next attempts start, and how long the search goes before a campaign, once that is known.
        self.attempts_at = self.rivals_at = self.delay = math.inf

    def change(self, **changes: Any) -> None:
        self.state.__dict__.update(changes)

    def change_search(self, **changes: Any) -> None:
        self.change(search=replace(self.state.search, **changes))

    def number(self) -> int:
        self.change(numbers=self.state.numbers + 1)
        return self.state.numbers

    def act(self, action: actions.Action) -> None:
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
        if isinstance(self.state.campaign, Campaigning) and not self.state.over:
            self._watch_campaign(self.state.campaign)

    def deadline(self) -> float:
        """When something is due that no event announces."""
        state = self.state
        if state.over:
            return math.inf
        moments = []
        link = state.link
        if link is not None:
            limit = state.heartbeat_limit
            if self.now < link.last_message_at + limit * SUSPICIOUS:
                moments.append(link.last_message_at + limit * SUSPICIOUS)
            else:
                moments.append(link.last_message_at + state.leader_limit)
                if self.now < link.last_message_at + limit * FENCE:
                    moments.append(link.last_message_at + limit * FENCE)
                if link.reconnect is None:
                    moments.append(link.reconnect_at)
        else:
            moments += self._search_deadlines()
        if isinstance(state.campaign, Campaigning):
            moments.append(self.rivals_at)
            if state.campaign.blocks_since is not None:
                moments.append(state.campaign.blocks_since + BLOCKING_LIMIT)
        if state.lookup.pending is None and (link is None or isinstance(state.campaign, Campaigning)):
            moments.append(max(state.lookup.read_at + self._read_again(), state.search.asks_at))
        return min(moments)

    def _search_deadlines(self) -> list[float]:
        state, config, search = self.state, self.config, self.state.search
        moments = [
            search.began + config.connect_timeout,
            self.attempts_at,
        ]
        if self.now < search.asks_at:
            moments.append(search.asks_at)
        if self.now < search.began + RESTORE:
            moments.append(search.began + RESTORE)
        if search.lost_at is not None:
            if state.campaign is None and config.campaign is not None and state.lookup.read_at >= search.lost_at:
                moments.append(max(search.lost_at + self.delay, state.campaign_at))
        elif search.lost is not None:
            moments.append(search.last_message_at + state.leader_limit)
        elif state.lookup.location.published:
            moments.append(search.began + state.leader_limit)
        if self.now < search.began + UNLED:
            moments.append(search.began + UNLED)
        return moments

    # Following.

    def _watch(self, link: Following) -> None:
        """Act on the silence of the leader.

        While the leader is merely silent a second link is tried beside the first: either the leader is paused, then the
        first one goes on; or the network was cut, and TCP would take many seconds to notice that it is whole again.
        """
        limit = self.state.heartbeat_limit
        if self.now < link.last_message_at + limit * SUSPICIOUS:
            return
        if self.now >= link.last_message_at + self.state.leader_limit:
            self.act(actions.CloseLink(link.number))
            self._lose_link(link)
            return
        if self.now >= link.last_message_at + limit * FENCE:
            self._fence("the leader is silent")
        if link.reconnect is None and self.now >= link.reconnect_at:
            number = self.number()
            self.act(actions.Connect(number, link.endpoint, limit * RECONNECT))
            self.change(link=replace(link, reconnect=number))

    def _lose_link(self, link: Following) -> None:
        """The link to the leader is of no more use: search for one."""
        if link.reconnect is not None:
            self.act(actions.CancelConnect(link.reconnect))
        members, own = self.state.known, self.config.agent
        # One of the first successors leads next, so they search at full rate, and the others have it to wait for.
        first = any(successor.agent == own for successor in members.successors[: endpoints.FIRST_TRIED])
        searching = 0 if first else members.members
        search = Search(
            self.now,
            link.endpoint,
            link.last_message_at,
            self.now if members.resigned else None,
            least_pause=search_pause(searching, own),
            asks_at=self.now + first_question_delay(searching, own),
        )
        self.change(link=None, search=search, lookup=Lookup())

    def _follow(self, number: int, endpoint: Endpoint) -> None:
        """Follow the leader at the other end of this link."""
        self.change(link=Following(number, endpoint, self.now), known=replace(self.state.known, resigned=False))
        follower, greeting = self.state.follower.greet(self.now)
        self.change(follower=follower)
        for message in greeting:
            self.act(actions.Send(number, message))

    def _send(self, message: AgentMessage) -> None:
        # What cannot be sent now is not lost: every new link begins with what the leader has to know.
        if self.state.link is not None:
            self.act(actions.Send(self.state.link.number, message))

    def _fence(self, why: str) -> None:
        """Stop the workers here: the leader gives up this agent about now, and goes on without it."""
        cut_off = self.state.follower.cut_off_now()
        if cut_off is not None and cut_off.last_round is not None:
            self.change(follower=cut_off)
            self.act(actions.StopWorkers(CutOff(cut_off.last_round, Reason.NODE_LOST, self.state.known.node, why)))

    # Searching.

    def _search(self) -> None:
        search = self.state.search
        if search.lost is not None and self.now >= search.began + RESTORE:
            self._fence("the link to the leader is broken")
        if search.lost_at is None:
            lost_at = self._lost_at()
            if lost_at is not None:
                self.change_search(lost_at=lost_at)
        if self._read_location():
            return
        search = self.state.search
        starting, self.attempts_at = attempting.due(
            search.attempts, endpoints.of_search(self.state, self.now), self.now
        )
        if starting:
            self.change_search(attempts=self._connect(search.attempts, starting))
        self._campaign_if_due()
        if self.now >= search.began + UNLED and not search.warned:
            self.change_search(warned=True)
            self.act(actions.Warn(self._no_leader_yet(search)))
        if self.now >= search.began + self.config.connect_timeout:
            problem = search.attempts.problem
            self._end(LeaderLost(problem) if search.lost is not None else self._unreachable(problem))

    def _read_location(self) -> bool:
        """Read the records if that is due. Returns whether they say that there will be no leader."""
        lookup, since = self.state.lookup, self.state.search.lost_at if self.state.link is None else None
        if lookup.location.refusal and self.state.link is None:
            self._end(Unreachable(lookup.location.refusal, usage=True))
            return True
        old = self.now >= lookup.read_at + self._read_again() or (since is not None and lookup.read_at < since)
        if lookup.pending is None and old and self.now >= self.state.search.asks_at:
            number = self.number()
            self.act(actions.ReadLeaderLocation(number, self.state.known.recorded(lookup.location)))
            self.change(lookup=replace(lookup, pending=number, began=self.now))
        return False

    def _read_again(self) -> float:
        """Return the seconds between two readings of the records."""
        return READ_AGAIN if self.state.campaign is not None else max(READ_AGAIN, self.state.search.least_pause)

    def _lost_at(self) -> float | None:
        """Since when it is certain that there is no leader where there was one; None as long as it is not."""
        state, search, now = self.state, self.state.search, self.now
        if search.lost is not None:
            return now if search.attempts.answer(search.lost) in _LEADS_NONE or self._is_silent() else None
        location = state.lookup.location
        if not location.published:
            if now < search.began + UNLED or self.config.campaign is None:
                return None
            # To lead the same run a second time is the last thing to do, also when the other leader is silent for once
            # or has finished it.
            twins = search.attempts.with_answer(Answer.TWIN)
            if twins and not state.twins:
                self.act(actions.Warn(_twin(twins)))
            if not twins <= state.twins:
                self.change(twins=state.twins | twins)
            return None if self.state.twins else now
        gone = all(search.attempts.answer(endpoint) in _LEADS_NONE for endpoint in location.endpoints)
        return now if gone or now >= search.began + self.state.leader_limit else None

    def _is_silent(self) -> bool:
        return self.now >= self.state.search.last_message_at + self.state.leader_limit

    def _end(self, event: LeaderEvent) -> None:
        self.stop(events.Stop())
        self.act(actions.Deliver(event))

    def _unreachable(self, problem: str) -> Unreachable:
        if self.state.twins and not self.state.lookup.location.published:
            return Unreachable(_twin(self.state.twins), usage=True)
        return Unreachable(f"{problem}, tried for {self.config.connect_timeout:g} s")

    def _no_leader_yet(self, search: Search) -> str:
        left = search.began + self.config.connect_timeout - self.now
        return f"no leader found for {UNLED:g} s: {search.attempts.problem}; this agent tries for {left:.0f} s more"

    def _connect(self, attempts: Attempts, endpoints: Collection[Endpoint]) -> Attempts:
        for endpoint in endpoints:
            number = self.number()
            attempts = attempting.begin(attempts, endpoint, number, self.now)
            self.act(actions.Connect(number, endpoint))
        return attempts

    def _cancel_attempts(self, attempts: Attempts, kept: int | None = None) -> None:
        for number in attempts.pending():
            if number != kept:
                self.act(actions.CancelConnect(number))

    # Campaigning.

    def _campaign_delay(self) -> float:
        order, gone = endpoints.succession(self.state)
        names = [successor.agent for successor in order]
        return campaign_delay(names, self.config.agent, gone, self.state.known.leaving)

    def _campaign_if_due(self) -> None:
        state, search = self.state, self.state.search
        if state.campaign is not None or self.config.campaign is None or search.lost_at is None:
            return
        # Another agent may lead since an earlier look.
        if state.lookup.read_at < search.lost_at:
            return
        self.delay = self._campaign_delay()
        if self.now >= max(search.lost_at + self.delay, state.campaign_at):
            number = self.number()
            self.change(campaign=Preparing(number, self._loss()), campaign_at=self.now + CAMPAIGN_AGAIN)
            self.act(actions.ReadCampaignRecords(number))

    def _loss(self) -> LeaderLoss:
        members, search = self.state.known, self.state.search
        order, gone = endpoints.succession(self.state)
        silent = frozenset[str]()
        if search.lost is not None and (lost := endpoints.agent_at(self.state, search.lost, order)):
            if search.attempts.answer(search.lost) is Answer.ENDED:
                gone |= {lost}
            elif self._is_silent() and lost not in gone:
                silent = frozenset({lost})
        return LeaderLoss(
            Reason.NODE_LEFT if members.resigned else Reason.NODE_LOST, frozenset(gone), silent, members.round
        )

    def _watch_campaign(self, campaign: Campaigning) -> None:
        """Try endpoints of a leader and of candidates that precede this one; step down if this one blocks others."""
        if self.state.link is not None:
            self._read_location()
        if campaign.blocks_since is not None and self.now >= campaign.blocks_since + BLOCKING_LIMIT:
            self._step_down()
            return
        starting, self.rivals_at = attempting.due(campaign.attempts, endpoints.of_rivals(self.state), self.now)
        if starting:
            self.change(campaign=replace(campaign, attempts=self._connect(campaign.attempts, starting)))

    def _step_down(self) -> None:
        """Leave it to another agent to lead."""
        campaign = self.state.campaign
        if isinstance(campaign, Campaigning):
            self._cancel_attempts(campaign.attempts)
            self.act(actions.StopLeading(campaign.number))
            self.change(campaign=None, campaign_at=self.now + STEP_DOWN)

    # Events.

    def tick(self, event: events.Tick) -> None:
        """All that is due by time happens in :meth:`advance`."""

    def link_opened(self, event: events.LinkOpened) -> None:
        """Use the link if it leads to a leader of this term or a later one; close it in any other case."""
        state, link, campaign = self.state, self.state.link, self.state.campaign
        outdated = event.term < state.known.term
        if link is not None and link.reconnect == event.number and not state.over:
            if outdated:
                self.link_failed(events.LinkFailed(event.number, Answer.SILENT, _SUPERSEDED))
                self.act(actions.CloseLink(event.number))
            else:
                # The leader has ended the older one for it.
                self.act(actions.CloseLink(link.number))
                self._follow(event.number, event.endpoint)
            return
        searching = link is None and not state.over
        endpoint = state.search.attempts.endpoint(event.number) if searching else None
        if endpoint is not None:
            if outdated:
                self.link_failed(events.LinkFailed(event.number, Answer.SILENT, f"{_at(endpoint)} is {_SUPERSEDED}"))
                self.act(actions.CloseLink(event.number))
                return
            rival = isinstance(campaign, Campaigning) and endpoint in endpoints.of_rivals(self.state)
            if endpoint not in endpoints.of_search(self.state, self.now) and not rival:
                self.link_failed(events.LinkFailed(event.number, Answer.SILENT, f"{_at(endpoint)} is asked no more"))
                self.act(actions.CloseLink(event.number))
                return
            self._cancel_attempts(state.search.attempts, kept=event.number)
            self.change_search(attempts=Attempts())
            if event.endpoint not in self.config.endpoints:
                # A candidate would withdraw at the next break of this link.
                self._step_down()
            if isinstance(self.state.campaign, Preparing):
                # An agent that has found a leader does not campaign, however long the records take.
                self.change(campaign=None)
            self._follow(event.number, event.endpoint)
            return
        self.act(actions.CloseLink(event.number))
        if isinstance(campaign, Campaigning) and (rival_at := campaign.attempts.endpoint(event.number)) is not None:
            if outdated:
                self.link_failed(events.LinkFailed(event.number, Answer.SILENT, f"{_at(rival_at)} is {_SUPERSEDED}"))
            else:
                self._step_down()

    def link_failed(self, event: events.LinkFailed) -> None:
        """Note what the failure says about the other side."""
        state, link, campaign = self.state, self.state.link, self.state.campaign
        if link is not None and link.reconnect == event.number:
            again_at = self.now + self.state.heartbeat_limit * RECONNECT_AGAIN
            self.change(link=replace(link, reconnect=None, reconnect_at=again_at))
            if link.closed:
                self._lose_link(replace(link, reconnect=None))
            return
        endpoint = state.search.attempts.endpoint(event.number) if link is None else None
        if endpoint is not None:
            failed = attempting.answered(
                state.search.attempts, endpoint, event.answer, event.problem, event.busy, state.search.least_pause
            )
            self.change_search(attempts=failed)
            if event.answer is Answer.VERSION and not state.over:
                self._end(Unreachable(event.problem, usage=True))
        elif isinstance(campaign, Campaigning) and (rival := campaign.attempts.endpoint(event.number)) is not None:
            failed = attempting.answered(campaign.attempts, rival, event.answer, event.problem, event.busy)
            self.change(campaign=replace(campaign, attempts=failed))

    def link_closed(self, event: events.LinkClosed) -> None:
        link = self.state.link
        if link is None or link.number != event.number:
            return
        if link.reconnect is not None:
            self.change(link=replace(link, closed=True))
        else:
            self._lose_link(link)

    def leader_location_read(self, event: events.LeaderLocationRead) -> None:
        if self.state.lookup.pending == event.number:
            self.change(lookup=Lookup(event.location, self.state.lookup.began))

    def campaign_records_read(self, event: events.CampaignRecordsRead) -> None:
        """Begin the campaign, unless another agent has claimed a term meanwhile."""
        campaign, config = self.state.campaign, self.config.campaign
        if not isinstance(campaign, Preparing) or campaign.number != event.number or config is None:
            return
        try:
            claimed = campaigning.another_has_claimed(config, event.records)
            if claimed is not None and claimed not in self.state.waited_for:
                # That agent publishes its endpoint in a moment; unless it has died in between.
                self.change(campaign=None, waited_for=self.state.waited_for | {claimed})
                return
            plan = campaigning.plan(config, event.records, campaign.loss)
        except (LookupError, TypeError, ValueError) as error:
            self.campaign_records_failed(events.CampaignRecordsFailed(event.number, str(error)))
            return
        self.change(campaign=Campaigning(campaign.number))
        self.act(actions.Lead(campaign.number, plan))

    def campaign_records_failed(self, event: events.CampaignRecordsFailed) -> None:
        campaign = self.state.campaign
        if not isinstance(campaign, Preparing) or campaign.number != event.number:
            return
        self.change(campaign=None)
        if event.why != self.state.logged_problem:
            self.change(logged_problem=event.why)
            self.act(actions.Warn(f"this agent cannot campaign to lead: {event.why}"))

    def term_claimed(self, event: events.TermClaimed) -> None:
        campaign = self.state.campaign
        if isinstance(campaign, Campaigning) and campaign.number == event.number:
            self._cancel_attempts(campaign.attempts)
            self.change(campaign=Leading(campaign.number))

    def campaign_blocked(self, event: events.CampaignBlocked) -> None:
        campaign = self.state.campaign
        if isinstance(campaign, Campaigning) and campaign.number == event.number:
            self.change(campaign=replace(campaign, blocks_since=self.now if event.blocks else None))

    def leader_ended(self, event: events.LeaderEnded) -> None:
        campaign = self.state.campaign
        if campaign is None or campaign.number != event.number:
            return
        if isinstance(campaign, Campaigning):
            self._cancel_attempts(campaign.attempts)
        self.change(campaign=None)
        if event.problem:
            self.act(actions.Deliver(LeaderLost(event.problem)))

    def join(self, event: events.Join) -> None:
        follower, joined = self.state.follower.join(event.candidate)
        self.change(follower=follower)
        self._send(joined)

    def announce_leave(self, event: events.AnnounceLeave) -> None:
        follower, leaving = self.state.follower.leaving(event.reason, event.seconds, self.now)
        self.change(follower=follower, known=self.state.known.leaves((self.config.agent,)))
        self._send(leaving)

    def send_to_leader(self, event: events.SendToLeader) -> None:
        self._send(event.message)

    def depart(self, event: events.Depart) -> None:
        follower, left = self.state.follower.left(event.reason, stopped=event.stopped)
        self.change(follower=follower, known=self.state.known.leaves((self.config.agent,)))
        self._send(left)

    def report_failure(self, event: events.ReportFailure) -> None:
        follower, failed = self.state.follower.failed(event.failure)
        self.change(follower=follower)
        self._send(failed)

    def report_finished(self, event: events.ReportFinished) -> None:
        follower, finished = self.state.follower.finished()
        self.change(follower=follower)
        self._send(finished)

    def close_run(self, event: events.CloseRun) -> None:
        follower, closed = self.state.follower.closing()
        self.change(follower=follower)
        self._send(closed)

    def workers_stopped(self, event: events.WorkersStopped) -> None:
        self.change(follower=self.state.follower.stopped())

    def stop(self, event: events.Stop) -> None:
        if self.state.link is None:
            self._cancel_attempts(self.state.search.attempts)
        elif self.state.link.reconnect is not None:
            self.act(actions.CancelConnect(self.state.link.reconnect))
        if isinstance(self.state.campaign, Campaigning):
            self._cancel_attempts(self.state.campaign.attempts)
        if isinstance(self.state.campaign, Preparing):
            self.change(campaign=None)
        self.change(over=True)

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
            case Heartbeat(limit):
                self._set_heartbeat_limit(limit)
                self._send(_BEAT)
            case Probed(probe, dumps):
                if not follower.owes_join:
                    self.act(actions.AnswerProbe(link.number, probe, dumps))
            case Assignment(attempt=attempt, round=round_, restarts=restarts):
                follower = follower.charged(restarts)
                placed = follower.placed(attempt, round_)
                self.change(follower=placed or follower)
                if placed is not None:
                    self.change(known=members.placed(message, link.endpoint))
                    self._set_heartbeat_limit(message.heartbeat_limit)
                    self.act(actions.Deliver(message))
            case Resigned(agent, gone):
                self.change(known=members.resigns(agent, gone, link.endpoint))
            case Holding(round_, leaving):
                self.change(known=members.leaves(leaving))
                if follower.holding(round_):
                    if self.config.can_hold:
                        self.act(actions.Deliver(message))
                    else:
                        self._send(Held(self.config.agent, round_, None))
            case Stopping(round=round_, step=at, leaving=leaving):
                self.change(known=members.leaves(leaving))
                stopping = follower.stopping(round_, at)
                if stopping is not None:
                    self.change(follower=stopping)
                    self.act(actions.Deliver(message))
            case Interrupted(round=round_, restarts=restarts):
                follower = follower.charged(restarts)
                self.change(follower=follower)
                if follower.interrupted(round_):
                    self.change(follower=follower.note_over())
                    self.act(actions.Deliver(message))
                elif follower.candidate is not None:
                    # The leader gave an assignment in that round, which was lost on the way.
                    self.join(events.Join(follower.candidate))
            case Ended():
                self.stop(events.Stop())
                self.act(actions.Deliver(message))
            case LeaveAnswer() | StatusRequested() | StatusPart() | StatusAnswer():
                # For clients, and for the runner.
                pass
            case _:
                self.act(actions.Deliver(message))


_HANDLERS: dict[type, Callable[[_Step, Any], None]] = {
    events.Tick: _Step.tick,
    events.LinkOpened: _Step.link_opened,
    events.LinkFailed: _Step.link_failed,
    events.LinkClosed: _Step.link_closed,
    events.Received: _Step.received,
    events.LeaderLocationRead: _Step.leader_location_read,
    events.CampaignRecordsRead: _Step.campaign_records_read,
    events.CampaignRecordsFailed: _Step.campaign_records_failed,
    events.TermClaimed: _Step.term_claimed,
    events.CampaignBlocked: _Step.campaign_blocked,
    events.LeaderEnded: _Step.leader_ended,
    events.Join: _Step.join,
    events.AnnounceLeave: _Step.announce_leave,
    events.SendToLeader: _Step.send_to_leader,
    events.Depart: _Step.depart,
    events.ReportFailure: _Step.report_failure,
    events.ReportFinished: _Step.report_finished,
    events.CloseRun: _Step.close_run,
    events.WorkersStopped: _Step.workers_stopped,
    events.Stop: _Step.stop,
}

_BEAT = Heartbeat()
_LEADS_NONE = (Answer.ENDED, Answer.IDLE)

_SUPERSEDED = "a leader that another one has superseded"
"""Of an endpoint, in the reason of a failure: its term is not the newest."""


def _at(endpoint: Endpoint) -> str:
    return f"{endpoint[0]}:{endpoint[1]}"


def _twin(endpoints: Collection[Endpoint]) -> str:
    where = ", ".join(sorted(_at(endpoint) for endpoint in endpoints))
    return (
        f"a run of this id is led from {where} by another run directory; give one that all nodes share by --run-dir, or"
        " another --run-id"
    )
