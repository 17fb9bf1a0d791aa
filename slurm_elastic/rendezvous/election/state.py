"""The state of one agent's part in the election. Frozen data only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from slurm_elastic.rendezvous.election.campaign import ElectionConfig, LeaderLoss, default_leader_limit, search_pause
from slurm_elastic.rendezvous.election.follower import Follower
from slurm_elastic.rendezvous.election.leader_location import Attempts, LeaderLocation, Leadership
from slurm_elastic.rendezvous.transport.messages import Endpoint


@dataclass(frozen=True)
class Following:
    """The link to the leader.

    Attributes:
        allowed: The value that `last_message_at` got when the agent itself had been paused.
        closed: True if the link has ended while a second one is being opened, for which the leader ends the first.
    """

    number: int
    endpoint: Endpoint
    last_message_at: float
    allowed: float = -math.inf
    closed: bool = False


@dataclass(frozen=True)
class Search:
    """The search for a leader.

    Attributes:
        lost: Endpoint of the leader whose link has broken; None for the first search.
        last_message_at: When the last message of that leader came.
        lost_at: When it became certain that no leader is at that endpoint; None until then.
        least_pause: Least seconds between two attempts at an endpoint, and between two readings of the records.
        asks_at: When the agent first reads the records and tries other endpoints than that of the lost leader.
    """

    began: float
    lost: Endpoint | None = None
    last_message_at: float = -math.inf
    lost_at: float | None = None
    warned: bool = False
    least_pause: float = 0.0
    asks_at: float = -math.inf


@dataclass(frozen=True)
class Lookup:
    """The readings of the records about the leader; a file system may be slow, so the search does not wait for them.

    Attributes:
        read_at: When that reading began; it has everything that was written before.
        pending, began: Number of the reading that is under way, and when that began.
    """

    location: LeaderLocation = field(default_factory=LeaderLocation)
    read_at: float = -math.inf
    pending: int | None = None
    began: float = -math.inf


@dataclass(frozen=True)
class Preparing:
    """The agent reads the records for a campaign."""

    number: int
    loss: LeaderLoss


@dataclass(frozen=True)
class Campaigning:
    """The agent collects joins, and looks for a leader and for candidates that precede it."""

    number: int


@dataclass(frozen=True)
class Leading:
    """The agent leads in a term of its own."""

    number: int


@dataclass(frozen=True)
class Election:
    """One agent's part in the election.

    Attributes:
        deadline: Latest time for the next Tick; infinite if only events matter.
        heartbeat_limit: The limit in force, from the last leader; all limits of fencing derive from it.
        link: None while the agent searches.
        attempts: Those at links to a leader; to the same one again while it is silent; to rivals of a candidate.
        waited_for: Terms whose new leaders got the time to publish their endpoint.
        twins: Endpoints of leaders of this run with another run directory.
        logged_problem: The last logged reason for which no campaign was possible.
        numbers: The last number given to an attempt, reading or campaign.
        over: True once the run has ended for this agent, or the agent ends.
    """

    config: ElectionConfig
    follower: Follower
    search: Search
    heartbeat_limit: float
    deadline: float = -math.inf
    known: Leadership = field(default_factory=Leadership)
    link: Following | None = None
    attempts: Attempts = field(default_factory=Attempts)
    lookup: Lookup = field(default_factory=Lookup)
    campaign: Preparing | Campaigning | Leading | None = None
    campaign_at: float = -math.inf
    waited_for: frozenset[int] = frozenset()
    twins: frozenset[Endpoint] = frozenset()
    logged_problem: str = ""
    numbers: int = 0
    over: bool = False

    @property
    def leader_limit(self) -> float:
        """Seconds of silence after which the leader is lost."""
        return max(self.config.leader_limit, default_leader_limit(self.heartbeat_limit))


FOUNDER = 0
"""Number of the campaign of an agent that has claimed the first term of the run before it begins to search."""


def initial_election(config: ElectionConfig, now: float, *, founder: bool = False) -> Election:
    """Return the state of an agent that has just started; it acts with its first Tick.

    A founder leads already, in the first term of the run.
    """
    settings = config.settings
    expected_agents = max(len(settings.expected_nodes), settings.min_nodes)
    return Election(
        config,
        Follower(config.agent, coming=config.has_workers),
        Search(now, least_pause=search_pause(expected_agents, config.agent)),
        settings.limit_of(expected_agents),
        campaign=Leading(FOUNDER) if founder else None,
    )
