"""Checks of machines and of the ways between them: pure functions of gathered facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from slurm_elastic import descriptors
from slurm_elastic.agent.workers.torch_hooks import NEWEST, OLDEST, release_numbers
from slurm_elastic.doctor.facts import LinkFacts, NodeFacts, SiteFacts
from slurm_elastic.finding import Check, Finding, merged
from slurm_elastic.text import size_text

_SHARED_MEMORY = 64 << 20
"""Docker's default for /dev/shm, in which data loaders of PyTorch run out of space."""
_LOCKED_MEMORY = 64 << 20
_DESCRIPTORS = 4096
_CLOCK = 5.0
_SLOW_ROUND_TRIP = 0.05
_SLOW_BANDWIDTH = 10e6
_SHOWN = 8
"""Pairs of nodes that a finding names."""


def node_findings(site: SiteFacts) -> list[Finding]:
    """Judge each machine, and make one finding of those that are alike."""
    results = [*_missing(site), *_software(site)]
    if site.job and not site.results:
        return results
    everywhere = (_torch, _descriptors, _clock, _slurm_commands)
    # A login node has other devices and mounts than those on which runs train.
    on_nodes = (_gpus, _shared_memory, _locked_memory, _address) if site.results else ()
    for judge in (*everywhere, *on_nodes):
        for result in merged(replace(judge(node), nodes=(node.node,)) for node in site.nodes):
            results.append(result if site.results else replace(result, nodes=()))
    return results


def _missing(site: SiteFacts) -> Iterator[Finding]:
    check = Check("node.answers")
    if site.job and not site.expected:
        fix = f"`scontrol show job {site.job}` says why; such as another user's or an administrator's scancel"
        yield check.broken(f"job {site.job} ended before it had nodes", "nothing is known about the nodes", fix)
    if not site.expected:
        return
    said = f"; the job printed: {' / '.join(site.job_output)}" if site.job_output else "; the job printed nothing"
    complete = {result.facts.node: result.is_complete for result in site.results}
    missing = tuple(node for node in site.expected if node not in complete)
    if missing:
        yield check.broken(
            f"no result in the run directory{said}",
            "on these nodes the command does not run, or the run directory is not that of this machine",
            "read what the job printed; give a directory that all nodes share by --run-dir, and activate the "
            "environment in the site block of the template",
            missing,
        )
    stopped = tuple(node for node in site.expected if complete.get(node) is False)
    if stopped:
        why = "workers on these nodes may end in the same way"
        fix = "read what the job printed; give the job more time by --time"
        yield check.broken(f"ended before they had looked at the network{said}", why, fix, stopped)
    if not missing and not stopped:
        yield check.ok(f"all {len(site.expected)} nodes of job {site.job}")


def _software(site: SiteFacts) -> Iterator[Finding]:
    """Compare Python, torch and the package of all nodes."""
    if not site.results:
        return
    one_protocol = len({node.protocol for node in site.nodes}) == 1
    spoken = "the same protocol" if one_protocol else "other protocols, and refuse each other"
    why = "workers of different releases may not understand each other's messages and checkpoints"
    why_package = f"the agents of these versions speak {spoken}"
    compared = (
        (Check("node.python"), "Python", [node.python for node in site.nodes], why),
        (Check("node.torch_release"), "torch", [node.torch.release for node in site.nodes], why),
        (Check("node.package"), "slurm_elastic", [node.package for node in site.nodes], why_package),
    )
    for check, name, releases, meaning in compared:
        values = {node.node: release or "none" for node, release in zip(site.nodes, releases, strict=True)}
        common, _ = Counter(values.values()).most_common(1)[0]
        others = tuple(node for node, value in values.items() if value != common)
        if not others:
            yield check.ok(f"{name} {common} on all nodes")
            continue
        judge = check.limit if one_protocol or name != "slurm_elastic" else check.broken
        shown = ", ".join(f"{values[node]} on {node}" for node in others)
        fix = f"install one release of {name} on all nodes"
        yield judge(f"{name} {common}, but {shown}", meaning, fix, others)


def _torch(node: NodeFacts) -> Finding:
    check, torch, why = Check("node.torch"), node.torch, "all parts of torch that are used are there"
    if torch.error:
        return check.refused(torch.error, "no agent starts")
    if release_numbers(torch.release) > release_numbers(NEWEST):
        tested = f"the tested releases are {OLDEST} to {NEWEST}"
        return check.unknown(torch.release, f"{tested}; {why}", "look for a newer release of slurm_elastic")
    return check.ok(torch.release, why)


def _gpus(node: NodeFacts) -> Finding:
    check, cuda = Check("node.gpus"), node.torch.cuda
    names = Counter(gpu.name for gpu in node.gpus)
    shown = ", ".join(f"{count} x {name}" for name, count in names.items()) or "none"
    wrong = [f"GPU {index}: {gpu.error}" for index, gpu in enumerate(node.gpus) if gpu.error]
    if wrong:
        why = "a product of two matrices failed or was wrong"
        return check.broken("; ".join(wrong), why, "have this GPU looked at, and leave out the node by --exclude")
    if node.job_gpus > len(node.gpus):
        built = f"torch is built for CUDA {cuda}" if cuda else "this torch is a CPU build"
        driver = f"driver {node.nvidia_driver}" if node.nvidia_driver else "no NVIDIA driver is loaded"
        few = f"Slurm has given the job {node.job_gpus} GPUs here, and torch can use {len(node.gpus)}"
        fix = "install a build of torch for this driver (pytorch.org, Get started)"
        return check.broken(f"{shown}; {driver}, {built}", few, fix)
    if not node.gpus:
        return check.ok(shown)
    fact = f"{shown}; driver {node.nvidia_driver}, torch is built for CUDA {cuda}"
    return check.ok(fact, "each made a product of two matrices")


def _shared_memory(node: NodeFacts) -> Finding:
    check, why = Check("node.shared_memory"), "data loaders pass samples through /dev/shm, and NCCL messages"
    if node.shared_memory_error:
        return check.refused(node.shared_memory_error, why)
    fact = f"{size_text(node.shared_memory)} free"
    if node.shared_memory < _SHARED_MEMORY:
        fix = "empty it, or mount it larger; in a container give it the host's, as --ipc=host does"
        return check.limit(fact, why, fix)
    return check.ok(fact)


def _descriptors(node: NodeFacts) -> Finding:
    hard = node.descriptors_hard
    agents = descriptors.connections_at_most(hard)
    fact = f"{node.descriptors_soft} soft, {hard} hard"
    why = f"an agent raises its soft limit, and can lead {agents} agents with the hard one; workers keep the soft one"
    fix = "raise the hard limit of the shell that submits the job, or of slurmd (LimitNOFILE)"
    return Check("node.descriptors").limit_if(hard < _DESCRIPTORS, fact, why, fix)


def _locked_memory(node: NodeFacts) -> Finding:
    check, limit = Check("node.locked_memory"), node.locked_memory
    if limit < 0:
        return check.ok("no limit")
    if limit < _LOCKED_MEMORY and node.gpus:
        fix = "ask for LimitMEMLOCK=infinity of slurmd and PropagateResourceLimitsExcept=MEMLOCK"
        return check.limit(size_text(limit), "InfiniBand registers memory that it locks, and NCCL fails without", fix)
    return check.ok(size_text(limit), "InfiniBand needs more; other networks do not")


def _clock(node: NodeFacts) -> Finding:
    check, offset = Check("node.clock"), node.controller_offset
    if offset is None:
        return check.unknown("the controller's time is not known here", "logs may be in a wrong order")
    if abs(offset) > _CLOCK:
        why = "no agent decides by it, but logs and reports of several nodes are in a wrong order"
        return check.limit(f"{offset:+.0f} s against the controller", why, "have the clock set by NTP")
    return check.ok(f"within {_CLOCK:g} s of the controller", "logs of several nodes are in order")


def _slurm_commands(node: NodeFacts) -> Finding:
    check = Check("node.slurm_commands")
    works = {"scontrol": node.controller_offset is not None, "squeue": node.has_squeue}
    missing = [name for name, answers in works.items() if not answers]
    if not missing:
        return check.ok("scontrol and squeue answer", "agents learn why they are signalled")
    return check.limit(
        f"{' and '.join(missing)} {'get' if len(missing) > 1 else 'gets'} no answer",
        "an agent here takes each SIGTERM for a preemption with --grace seconds, and does not requeue its job",
        "make Slurm's commands, slurm.conf and munge's socket available here, in a container by bind mounts "
        "(docs/howto/containers.md); the batch script requeues from outside of it",
    )


def _address(node: NodeFacts) -> Finding:
    check = Check("network.address")
    if node.address_error:
        return check.refused(node.address_error, "other nodes could not reach this one")
    interface = next((name for name, address in node.interfaces.items() if address == node.address), "")
    # The addresses differ from node to node; the way in which they were found does not.
    fact = f"on {interface}" if interface else "by name"
    return check.ok(fact, "other nodes reach this one there")


def network_findings(site: SiteFacts) -> Iterator[Finding]:
    """Judge what the nodes have found out about each other."""
    if len(site.results) < 2:
        return
    yield _ports(site, "leader_port", "below the ephemeral range", "agents meet at")
    yield _ports(site, "free_port", "of the kernel's choice", "worker store and gloo listen at")
    yield _round_trip(site)
    yield from _collectives(site)


def _ports(site: SiteFacts, name: str, kind: str, use: str) -> Finding:
    check, links = Check(f"network.{name}"), _links(site)
    wrong = [(here, link.peer, error) for here, link in links if (error := getattr(link, f"{name}_error"))]
    if not links:
        return check.unknown("no node has asked another one", f"{use} a port {kind}")
    if not wrong:
        return check.ok(f"a port {kind} was reached on {len(links)} of {len(links)} ways", f"{use} such a port")
    pairs = "; ".join(f"{here} does not reach {there}: {error}" for here, there, error in wrong[:_SHOWN])
    rest = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    why = f"{use} a port {kind}"
    fix = "open all ports between nodes in their firewalls; or give --interface with the name of another network"
    return check.broken(f"{pairs}{rest}", why, fix, tuple(dict.fromkeys(there for _, there, _ in wrong)))


def _links(site: SiteFacts) -> list[tuple[str, LinkFacts]]:
    """Return each way with the node from which it leads."""
    return [(result.facts.node, link) for result in site.results for link in result.links]


def _round_trip(site: SiteFacts) -> Finding:
    check = Check("network.round_trip")
    measured = [(link.round_trip, here, link.peer) for here, link in _links(site) if link.round_trip is not None]
    if not measured:
        return check.unknown("no message was answered", "a step of training takes many round trips")
    longest, here, there = max(measured)
    fact = f"at most {longest * 1000:.2f} ms, from {here} to {there}"
    why = "an unplanned new round takes a few round trips, a step of training many"
    fix = "see whether the nodes are busy, or give --interface"
    return check.limit_if(longest > _SLOW_ROUND_TRIP, fact, why, fix, (here, there))


def _collectives(site: SiteFacts) -> Iterator[Finding]:
    outcomes = [(result.facts.node, outcome) for result in site.results for outcome in result.collectives]
    for backend in dict.fromkeys(outcome.backend for _, outcome in outcomes):
        made = [(node, outcome) for node, outcome in outcomes if outcome.backend == backend]
        wrong = {node: outcome.error for node, outcome in made if outcome.error}
        speeds = [outcome.bandwidth for _, outcome in made if outcome.bandwidth is not None]
        check = Check(f"network.{backend}")
        why = f"all-reduces of all nodes by {backend}, as DistributedDataParallel makes them"
        if wrong or not speeds:
            said = "; ".join(dict.fromkeys(wrong.values())) or "no all-reduce was made"
            name = "GLOO_SOCKET_IFNAME" if backend == "gloo" else "NCCL_SOCKET_IFNAME, and NCCL_DEBUG=INFO says why"
            fix = f"give --interface with the name of the network between the nodes, or set {name}"
            yield check.broken(said, why, fix, tuple(wrong))
            continue
        measured = f"{min(speeds) / 1e6:.0f} MB/s bus bandwidth"
        fix = "give --interface with the name of a faster network"
        yield check.limit_if(min(speeds) < _SLOW_BANDWIDTH, measured, why, fix)
