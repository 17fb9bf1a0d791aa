"""Checks of the ways between nodes, and of etcd: pure functions of gathered facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from slurm_elastic.doctor.facts import LinkFacts, SiteFacts
from slurm_elastic.finding import Finding, Level

_SLOW_ROUND_TRIP = 0.05
_SLOW_BANDWIDTH = 10e6
_CLOCK = 5.0
_SHOWN = 8
"""Pairs of nodes that a finding names."""


def network_findings(site: SiteFacts) -> Iterator[Finding]:
    """Judge what the nodes have found out about each other."""
    if len(site.results) < 2:
        return
    yield _ports(site, "network.leader_port", "leader_port_error", "below the ephemeral range", "agents meet at")
    yield _ports(
        site, "network.free_port", "free_port_error", "of the kernel's choice", "worker store and gloo listen at"
    )
    yield _round_trip(site)
    yield _clocks(site)
    yield from _collectives(site)


def _ports(site: SiteFacts, check: str, name: str, kind: str, use: str) -> Finding:
    wrong = [
        (result.facts.node, link.peer, error)
        for result in site.results
        for link in result.links
        if (error := getattr(link, name))
    ]
    count = sum(len(result.links) for result in site.results)
    if not count:
        return Finding(check, Level.UNKNOWN, "no node has asked another one", f"{use} a port {kind}")
    if not wrong:
        return Finding(check, Level.OK, f"a port {kind} was reached on {count} of {count} ways", f"{use} such a port")
    pairs = "; ".join(f"{here} does not reach {there}: {error}" for here, there, error in wrong[:_SHOWN])
    rest = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return Finding(
        check,
        Level.BROKEN,
        f"{pairs}{rest}",
        f"{use} a port {kind}",
        "open all ports between nodes in their firewalls; or give --interface with the name of another network",
        tuple(dict.fromkeys(there for _, there, _ in wrong)),
    )


def _worst(site: SiteFacts, measure: Callable[[LinkFacts], float | None]) -> tuple[float, str, str] | None:
    """Return the largest value that was measured between two nodes, and these; None without any."""
    links = ((measure(link), result.facts.node, link.peer) for result in site.results for link in result.links)
    return max(((value, here, there) for value, here, there in links if value is not None), default=None)


def _round_trip(site: SiteFacts) -> Finding:
    check = "network.round_trip"
    worst = _worst(site, lambda link: link.round_trip)
    if worst is None:
        return Finding(check, Level.UNKNOWN, "no message was answered", "a step of training takes many round trips")
    longest, here, there = worst
    measured = f"at most {longest * 1000:.2f} ms, from {here} to {there}"
    why = "an unplanned new round takes a few round trips, a step of training many"
    if longest > _SLOW_ROUND_TRIP:
        return Finding(
            check, Level.LIMIT, measured, why, "see whether the nodes are busy, or give --interface", (here, there)
        )
    return Finding(check, Level.OK, measured, why)


def _clocks(site: SiteFacts) -> Finding:
    check = "network.clocks"
    worst = _worst(site, lambda link: None if link.clock_offset is None else abs(link.clock_offset))
    if worst is None:
        return Finding(check, Level.UNKNOWN, "no node has told its time", "logs may be in a wrong order")
    largest, here, there = worst
    measured = f"at most {largest:.3f} s apart, {here} and {there}"
    if largest > _CLOCK:
        return Finding(
            check,
            Level.LIMIT,
            measured,
            "no agent decides by it, but logs and reports of several nodes are in a wrong order",
            "have the clocks set by NTP",
            (here, there),
        )
    return Finding(check, Level.OK, measured, "logs of several nodes are in order")


def _collectives(site: SiteFacts) -> Iterator[Finding]:
    backends = dict.fromkeys(outcome.backend for result in site.results for outcome in result.collectives)
    for backend in backends:
        made = [
            (r.facts.node, outcome) for r in site.results for outcome in r.collectives if outcome.backend == backend
        ]
        wrong = {node: outcome.error for node, outcome in made if outcome.error}
        speeds = [outcome.bandwidth for _, outcome in made if outcome.bandwidth is not None]
        check, why = (
            f"network.{backend}",
            f"all-reduces of all nodes by {backend}, as DistributedDataParallel makes them",
        )
        if wrong or not speeds:
            said = "; ".join(dict.fromkeys(wrong.values())) or "no all-reduce was made"
            name = "GLOO_SOCKET_IFNAME" if backend == "gloo" else "NCCL_SOCKET_IFNAME, and NCCL_DEBUG=INFO says why"
            yield Finding(
                check,
                Level.BROKEN,
                said,
                why,
                f"give --interface with the name of the network between the nodes, or set {name}",
                tuple(wrong),
            )
            continue
        measured = f"{min(speeds) / 1e6:.0f} MB/s bus bandwidth"
        if min(speeds) < _SLOW_BANDWIDTH:
            yield Finding(check, Level.LIMIT, measured, why, "give --interface with the name of a faster network")
        else:
            yield Finding(check, Level.OK, measured, why)


def etcd_findings(site: SiteFacts) -> Iterator[Finding]:
    """Judge the etcd that the user has named."""
    etcd = site.etcd
    if etcd is None:
        return
    if etcd.error:
        what, _, fix = etcd.error.partition("; ")
        yield Finding("etcd", Level.BROKEN, what, "records of a run cannot be kept there", fix)
    else:
        took = f", {etcd.seconds * 1000:.0f} ms for a transaction" if etcd.seconds is not None else ""
        yield Finding("etcd", Level.OK, f"{etcd.endpoint}{took}", "it lets this user in, to read and to write")
