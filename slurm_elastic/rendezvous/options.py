"""The knobs of the rendezvous, as given by torchrun's ``--rdzv-conf``."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, fields

from slurm_elastic.errors import UsageError
from slurm_elastic.rendezvous.election.campaign import default_leader_limit
from slurm_elastic.rendezvous.membership.config import OnTie, RoundOptions
from slurm_elastic.rendezvous.records.etcd.config import OPTIONS as ETCD_OPTIONS
from slurm_elastic.rendezvous.records.etcd.config import TORCH_NAMES as ETCD_TORCH_NAMES

TORCHS_OWN = frozenset({"is_host", "store_type", "close_timeout", "heartbeat_timeout", "rank"})
"""Keys of torch's c10d and static rendezvous (elastic/rendezvous, 2.13) that mean nothing here, and are ignored."""
_MAY_BE_ZERO = ("min_round_time", "leave_margin", "last_call_timeout")
_NODES = ("node_unit", "valid_nodes", "segment")
_MOST_NODES = 10**6
_KEEP_ALIVE = ("keep_alive_interval", "keep_alive_max_attempt")
_IGNORED = ("timeout", *TORCHS_OWN, *ETCD_OPTIONS, *ETCD_TORCH_NAMES)
"""torch's LaunchConfig always adds ``timeout=900`` (launcher/api.py, 2.13); its own c10d backend ignores it as well.
The options of etcd are read by :mod:`slurm_elastic.rendezvous.records.api`."""
_OTHERWISE = {
    "protocol": "write --rdzv-endpoint=etcds://HOST:PORT for https, and etcd:// for http",
    "cas_backoff_max_seconds": "leave it out: agents of this one do not compete for a record",
    "read_timeout": "the time after which an etcd that does not answer is given up is etcd_limit",
}
"""Keys of torch's own rendezvous and its etcd backends, with their names here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousOptions(RoundOptions):
    """Times in seconds. `join_timeout` and `last_call_timeout` mean what they mean to torch's own dynamic rendezvous.

    Attributes:
        leader_limit: silence after which the leader is lost, at least the default that follows from heartbeat_limit.
        etcd_limit: silence after which an etcd that keeps the records of the run is lost.
    """

    leader_limit: float = default_leader_limit(3.0)
    min_round_time: float = 2.0
    etcd_limit: float = 600.0

    def node_range(self, least: int, most: int) -> tuple[int, int]:
        """Return the least and the most nodes that a round can have within these bounds.

        Raises:
            UsageError: no valid number of nodes is within them.
        """
        valid = self.valid_nodes[bisect_left(self.valid_nodes, least) : bisect_right(self.valid_nodes, most)]
        if not self.valid_nodes:
            return least, most
        if not valid:
            unit = isinstance(self.valid_nodes, range)
            said = f"multiples of {self.valid_nodes[0]}" if unit else ", ".join(map(str, self.valid_nodes))
            near = next((number for number in self.valid_nodes if number >= least), self.valid_nodes[-1])
            raise UsageError(
                f"no round of {least} to {most} nodes is valid: --node-unit, --valid-nodes and --segment leave {said}; "
                f"give the job and --nnodes other bounds, as in {near}"
            )
        return valid[0], valid[-1]

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> RendezvousOptions:
        """Read the parsed ``--rdzv-conf``.

        Raises:
            UsageError: an unknown key, or a value that is no positive number (or zero, where that makes sense), or
                none of the words.
        """
        names = tuple(field.name for field in fields(cls))
        unknown = sorted(set(config) - {*names, *_KEEP_ALIVE, *_NODES, *_IGNORED})
        if unknown and unknown[0] in _OTHERWISE:
            raise UsageError(f"--rdzv-conf: {unknown[0]} is for torch's own rendezvous; {_OTHERWISE[unknown[0]]}")
        if unknown:
            raise UsageError(
                f"--rdzv-conf: unknown key {unknown[0]!r}; known are {', '.join((*names, 'node_unit', *_KEEP_ALIVE))}"
            )
        times = (name for name in (*names, *_KEEP_ALIVE) if name in config and name not in ("on_tie", *_NODES))
        values = {name: _seconds(name, config[name]) for name in times}
        interval, attempts = (values.pop(name, default) for name, default in zip(_KEEP_ALIVE, (1.0, 3.0), strict=True))
        if any(name in config for name in _KEEP_ALIVE):
            values.setdefault("heartbeat_limit", interval * attempts)
        least = default_leader_limit(values.get("heartbeat_limit", 3.0))
        if values.setdefault("leader_limit", least) < least:
            raise UsageError(
                f"--rdzv-conf: leader_limit={values['leader_limit']:g} is too short: a leader that is cut off needs "
                f"{least:g} s to notice and to stop its workers; give at least that, or a shorter heartbeat_limit"
            )
        return cls(
            **values,
            on_tie=_on_tie(config.get("on_tie", OnTie.LEADER.value)),
            valid_nodes=_valid_nodes(config),
            segment=_segment(config),
        )


def _seconds(name: str, value: object) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf") or (number == 0 and name not in _MAY_BE_ZERO):
        raise UsageError(f"--rdzv-conf: {name}={value} is no positive number")
    return number


def _on_tie(value: object) -> OnTie:
    try:
        return OnTie(value)
    except ValueError:
        raise UsageError(f"--rdzv-conf: on_tie={value} is neither leader nor none") from None


def _valid_nodes(config: Mapping[str, object]) -> tuple[int, ...] | range:
    """The sizes that a round may have. An option that was not given is empty or None, as from the command line."""
    unit, sizes = (str(config.get(name) or "") for name in ("node_unit", "valid_nodes"))
    segment = _segment(config)
    if unit and sizes:
        raise UsageError(f"--node-unit {unit} and --valid-nodes {sizes} both say which rounds are valid; give one")
    if unit:
        if not _is_count(unit):
            raise UsageError(f"--node-unit {unit!r} is no number of nodes; give one from 1 on, as in --node-unit 2")
        unit = str(math.lcm(int(unit), segment))
        return range(int(unit), _MOST_NODES, int(unit))
    if segment > 1 and not sizes:
        return range(segment, _MOST_NODES, segment)
    listed = [word.strip() for word in sizes.replace(":", ",").split(",")] if sizes else []
    if not all(_is_count(word) for word in listed):
        raise UsageError(f"--valid-nodes {sizes!r} is no list of numbers of nodes; write it as in --valid-nodes 2,4,8")
    valid = tuple(sorted({int(word) for word in listed if int(word) % segment == 0}))
    if listed and not valid:
        raise UsageError(f"--valid-nodes {sizes} has no multiple of --segment {segment}; give one")
    return valid


def _segment(config: Mapping[str, object]) -> int:
    segment = str(config.get("segment") or 1)
    if not _is_count(segment):
        raise UsageError(f"--segment {segment!r} is no number of nodes; give one from 1 on, as in --segment 4")
    return int(segment)


def _is_count(word: str) -> bool:
    return word.isascii() and word.isdecimal() and 0 < int(word) < _MOST_NODES
