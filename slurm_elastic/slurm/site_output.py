"""Parsers for what scontrol and sacctmgr print about the site: configuration, partitions, QOS."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from slurm_elastic.slurm.scontrol_output import parse_duration

QOS_FORMAT = "Name,GraceTime,PreemptMode,Preempt"
"""sacctmgr(1), ``format=`` of ``show qos``."""


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """``scontrol show config``: the keys of slurm.conf(5) with the values in force."""

    fields: Mapping[str, str] = field(default_factory=dict)

    def text(self, key: str) -> str:
        """Return a value; empty where the release does not have the key or the value is ``(null)``."""
        value = self.fields.get(key, "")
        return "" if value in ("(null)", "N/A") else value

    def number(self, key: str) -> int | None:
        """Return the leading number of a value such as ``30 sec``; None if there is none."""
        match = re.match(r"[0-9]{1,9}\b", self.text(key))
        return int(match[0]) if match else None

    def parameters(self, key: str) -> dict[str, str]:
        """Return the words of a list such as SlurmctldParameters: ``a=1,b`` is ``{"a": "1", "b": ""}``."""
        words = (word.partition("=") for word in self.text(key).split(",") if word)
        return {name.strip().lower(): value for name, _, value in words}


@dataclass(frozen=True, slots=True)
class PartitionView:
    """One partition of ``scontrol show partition``. Times are in seconds; None for no limit."""

    name: str
    is_default: bool
    state: str
    """UP, DOWN, DRAIN or INACTIVE."""
    grace: int
    """GraceTime."""
    preempt_mode: str
    """PreemptMode, such as ``REQUEUE`` or ``OFF``."""
    tier: int
    """PriorityTier: with preempt/partition_prio jobs of a higher tier preempt those of a lower one."""
    max_time: int | None
    default_time: int | None
    """DefaultTime, or MaxTime where the site sets none."""
    nodes: int
    """Number of nodes."""


@dataclass(frozen=True, slots=True)
class QosView:
    """One QOS."""

    name: str
    grace: int
    preempt_mode: str
    """Empty where it is that of the cluster."""
    preempts: tuple[str, ...]
    """The QOS whose jobs this one preempts."""


def parse_config(text: str) -> ClusterConfig | None:
    """Parse ``scontrol show config``; None if it holds no configuration."""
    pairs = re.findall(r"^([A-Za-z_][\w\[\]]*)\s*= ?(.*?)\s*$", text, flags=re.MULTILINE)
    # Since 23.02 (cgroup.conf(5)) a second table follows; none of its keys is in the first one.
    config = ClusterConfig(dict(reversed(pairs)))
    return config if config.text("SLURM_VERSION") else None


def parse_partitions(text: str) -> tuple[PartitionView, ...]:
    """Parse ``scontrol --oneliner show partition``."""
    partitions = []
    for line in text.splitlines():
        fields = dict(word.partition("=")[::2] for word in line.split())
        if "PartitionName" not in fields:
            continue
        most = parse_duration(fields.get("MaxTime", ""))
        default = parse_duration(fields.get("DefaultTime", ""))
        partitions.append(
            PartitionView(
                name=fields["PartitionName"],
                is_default=fields.get("Default") == "YES",
                state=fields.get("State", ""),
                grace=_number(fields.get("GraceTime")),
                preempt_mode=fields.get("PreemptMode", ""),
                tier=_number(fields.get("PriorityTier")),
                max_time=most,
                default_time=most if default is None else default,
                nodes=_number(fields.get("TotalNodes")),
            )
        )
    return tuple(partitions)


def parse_qos(text: str) -> tuple[QosView, ...]:
    """Parse ``sacctmgr --noheader --parsable2 show qos`` with `QOS_FORMAT`."""
    qos = []
    for line in text.splitlines():
        words = line.split("|")
        if len(words) == 4 and words[0]:
            name, grace, mode, preempts = words
            mode = "" if mode.lower() == "cluster" else mode.upper()
            qos.append(QosView(name, parse_duration(grace) or 0, mode, tuple(preempts.split(",")) if preempts else ()))
    return tuple(qos)


def parse_limits(text: str) -> tuple[str, ...]:
    """Parse the lines of sacctmgr with a name and its limits on running and on submitted jobs."""
    lines = [line.split("|") for line in text.splitlines()]
    return tuple(
        f"{words[0]}: "
        + ", ".join(
            f"{limit}={value}" for limit, value in zip(("MaxJobs", "MaxSubmitJobs"), words[1:], strict=True) if value
        )
        for words in lines
        if len(words) == 3 and any(words[1:])
    )


def _number(text: str | None) -> int:
    return int(text) if text and re.fullmatch(r"[0-9]{1,9}", text) else 0
