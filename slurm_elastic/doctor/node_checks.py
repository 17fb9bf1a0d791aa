"""Checks of machines and of the run directory: pure functions of gathered facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from slurm_elastic import descriptors
from slurm_elastic.agent.workers.torch_hooks import NEWEST, OLDEST, release_numbers
from slurm_elastic.doctor.facts import NodeFacts, SiteFacts
from slurm_elastic.finding import Finding, Level, merged
from slurm_elastic.slurm import compress
from slurm_elastic.text import size_text

_SHARED_MEMORY = 64 << 20
"""Docker's default for /dev/shm, in which data loaders of PyTorch run out of space."""
_LOCKED_MEMORY = 64 << 20
_DESCRIPTORS = 4096
_CLOCK = 5.0
_LOCAL_FILESYSTEMS = frozenset({"btrfs", "ext2", "ext3", "ext4", "overlay", "ramfs", "tmpfs", "xfs", "zfs"})
_LITTLE_SPACE = 1 << 30
_SLOW_RECORD = 1.0
_SLOW_WRITE = 50e6


def node_findings(site: SiteFacts) -> list[Finding]:
    """Judge each machine, and make one finding of those that are alike."""
    everywhere: tuple[Callable[[NodeFacts], Finding], ...] = (
        _torch,
        _descriptors,
        _clock,
        _slurm_commands,
        _submission,
    )
    # A login node has other devices and mounts than those on which runs train.
    on_nodes = (_gpus, _shared_memory, _locked_memory, _membarrier, _ptrace, _address)
    checks = (*everywhere, *on_nodes) if site.results else everywhere if not site.job else ()
    results = [*_missing(site), *_software(site), *_failure_domains(site)]
    for check in checks:
        for result in merged(replace(check(node), nodes=(node.node,)) for node in site.nodes):
            results.append(result if site.results else replace(result, nodes=()))
    return results


def _missing(site: SiteFacts) -> Iterator[Finding]:
    if site.job and not site.expected:
        yield Finding(
            "node.answers",
            Level.BROKEN,
            f"job {site.job} ended before it had nodes",
            "nothing is known about the nodes",
            f"`scontrol show job {site.job}` says why; such as another user's or an administrator's scancel",
        )
    if not site.expected:
        return
    said = f"; the job printed: {' / '.join(site.job_output)}" if site.job_output else "; the job printed nothing"
    complete = {result.facts.node: result.is_complete for result in site.results}
    missing = tuple(node for node in site.expected if node not in complete)
    if missing:
        yield Finding(
            "node.answers",
            Level.BROKEN,
            f"no result in the run directory{said}",
            "on these nodes the command does not run, or the run directory is not that of this machine",
            "read what the job printed; give a directory that all nodes share by --run-dir, and activate the "
            "environment in the site block of the template",
            missing,
        )
    stopped = tuple(node for node in site.expected if complete.get(node) is False)
    if stopped:
        yield Finding(
            "node.answers",
            Level.BROKEN,
            f"ended before they had looked at the network{said}",
            "workers on these nodes may end in the same way",
            "read what the job printed; give the job more time by --time",
            stopped,
        )
    if not missing and not stopped:
        yield Finding("node.answers", Level.OK, f"all {len(site.expected)} nodes of job {site.job}")


def _software(site: SiteFacts) -> Iterator[Finding]:
    """Compare Python, torch and the package of all nodes."""
    if not site.results:
        return
    protocols = {node.protocol for node in site.nodes}
    compared: tuple[tuple[str, str, Callable[[NodeFacts], str], Level], ...] = (
        ("node.python", "Python", lambda node: node.python, Level.LIMIT),
        ("node.torch_release", "torch", lambda node: node.torch.release, Level.LIMIT),
        (
            "node.package",
            "slurm_elastic",
            lambda node: node.package,
            Level.LIMIT if len(protocols) == 1 else Level.BROKEN,
        ),
    )
    for check, name, value_of, level in compared:
        values = {node.node: value_of(node) or "none" for node in site.nodes}
        common, _ = Counter(values.values()).most_common(1)[0]
        others = tuple(node for node, value in values.items() if value != common)
        if not others:
            yield Finding(check, Level.OK, f"{name} {common} on all nodes")
            continue
        shown = ", ".join(f"{values[node]} on {node}" for node in others)
        why = "workers of different releases may not understand each other's messages and checkpoints"
        if check == "node.package":
            spoken = "the same protocol" if level is Level.LIMIT else "other protocols, and refuse each other"
            why = f"the agents of these versions speak {spoken}"
        yield Finding(
            check, level, f"{name} {common}, but {shown}", why, f"install one release of {name} on all nodes", others
        )


def _failure_domains(site: SiteFacts) -> Iterator[Finding]:
    """Say which nodes Slurm's topology has beside each other."""
    domains: dict[str, list[str]] = {}
    for node in site.nodes:
        domains.setdefault(node.failure_domain, []).append(node.node)
    if not site.results or not any(domains):
        return
    shown = "; ".join(f"{compress(nodes)} in {label or 'none'}" for label, nodes in domains.items())
    target = "failure domain" if len(domains) > 1 else "node of the same failure domain"
    yield Finding("node.failure_domain", Level.OK, shown, f"copies of snapshots go to another {target}")


def _torch(node: NodeFacts) -> Finding:
    check, torch = "node.torch", node.torch
    if torch.error:
        what, _, fix = torch.error.partition("; ")
        return Finding(check, Level.BROKEN, what, "no agent starts", fix)
    if torch.missing_hooks:
        return Finding(
            check,
            Level.LIMIT,
            f"{torch.release}, which lacks {', '.join(torch.missing_hooks)}",
            "torch itself starts the workers, each with its own imports: a new round takes seconds more",
            "upgrade slurm_elastic, or install a release of torch that it was tested with (docs/versions.md)",
        )
    if release_numbers(torch.release) > release_numbers(NEWEST):
        return Finding(
            check,
            Level.UNKNOWN,
            torch.release,
            f"the tested releases are {OLDEST} to {NEWEST}; all parts of torch that are used are there",
            "look for a newer release of slurm_elastic",
        )
    return Finding(check, Level.OK, torch.release, "all parts of torch that are used are there")


def _gpus(node: NodeFacts) -> Finding:
    check, torch = "node.gpus", node.torch
    names = Counter(gpu.name for gpu in node.gpus)
    shown = ", ".join(f"{count} x {name}" for name, count in names.items()) or "none"
    wrong = [f"GPU {gpu.index}: {gpu.error}" for gpu in node.gpus if gpu.error]
    if wrong:
        return Finding(
            check,
            Level.BROKEN,
            "; ".join(wrong),
            "a product of two matrices failed or was wrong",
            "have this GPU looked at, and leave out the node by --exclude",
        )
    if torch.device_error or node.job_gpus > torch.devices:
        why = (
            torch.device_error
            or f"Slurm has given the job {node.job_gpus} GPUs here, and torch can use {torch.devices}"
        )
        built = f"torch is built for CUDA {torch.cuda}" if torch.cuda else "this torch is a CPU build"
        driver = f"driver {node.nvidia_driver}" if node.nvidia_driver else "no NVIDIA driver is loaded"
        return Finding(
            check,
            Level.BROKEN,
            f"{shown}; {driver}, {built}",
            why,
            "install a build of torch for this driver (pytorch.org, Get started)",
        )
    if not node.gpus:
        return Finding(check, Level.OK, shown)
    fact = f"{shown}; driver {node.nvidia_driver}, torch is built for CUDA {torch.cuda}"
    return Finding(check, Level.OK, fact, "each made a product of two matrices")


def _shared_memory(node: NodeFacts) -> Finding:
    check, why = "node.shared_memory", "data loaders pass samples through /dev/shm, and NCCL messages"
    if node.shared_memory_error:
        return Finding(
            check,
            Level.BROKEN,
            f"no file can be made in /dev/shm: {node.shared_memory_error}",
            why,
            "empty it, or mount it writable; ask who uses it by `ls -l /dev/shm` on the node",
        )
    if node.shared_memory is None:
        return Finding(check, Level.UNKNOWN, "there is no /dev/shm", why)
    fact = f"{size_text(node.shared_memory)} free"
    if node.shared_memory < _SHARED_MEMORY:
        return Finding(
            check,
            Level.LIMIT,
            fact,
            why,
            "empty it, or mount it larger; in a container give it the host's, as --ipc=host does",
        )
    return Finding(check, Level.OK, fact)


def _descriptors(node: NodeFacts) -> Finding:
    hard = node.descriptors_hard
    agents = descriptors.connections_at_most(hard)
    fact = f"{node.descriptors_soft} soft, {hard} hard"
    why = f"an agent raises its soft limit, and can lead {agents} agents with the hard one; workers keep the soft one"
    if hard < _DESCRIPTORS:
        return Finding(
            "node.descriptors",
            Level.LIMIT,
            fact,
            why,
            "raise the hard limit of the shell that submits the job, or of slurmd (LimitNOFILE)",
        )
    return Finding("node.descriptors", Level.OK, fact, why)


def _locked_memory(node: NodeFacts) -> Finding:
    check, limit = "node.locked_memory", node.locked_memory
    if limit < 0:
        return Finding(check, Level.OK, "no limit")
    if limit < _LOCKED_MEMORY and node.gpus:
        return Finding(
            check,
            Level.LIMIT,
            size_text(limit),
            "InfiniBand registers memory that it locks, and NCCL fails without",
            "ask for LimitMEMLOCK=infinity of slurmd and PropagateResourceLimitsExcept=MEMLOCK",
        )
    return Finding(check, Level.OK, size_text(limit), "InfiniBand needs more; other networks do not")


def _membarrier(node: NodeFacts) -> Finding:
    check = "node.membarrier"
    if node.has_membarrier:
        return Finding(check, Level.OK, "works", "all ranks stop at one step")
    return Finding(
        check,
        Level.OK,
        "not here: Linux before 4.16, or a seccomp filter",
        "the agent waits 50 ms instead when all ranks stop at one step",
    )


def _ptrace(node: NodeFacts) -> Finding:
    check, scope = "node.ptrace", node.ptrace_scope
    fact = (
        f"py-spy {'is' if node.has_py_spy else 'is not'} in PATH, ptrace_scope {'absent' if scope is None else scope}"
    )
    # Documentation/admin-guide/LSM/Yama.rst: an ancestor may trace its descendants with scope 1.
    if not node.has_py_spy:
        return Finding(
            check, Level.OK, fact, "with it, the stacks of a hung worker have Python's lines: pip install py-spy"
        )
    if scope is not None and scope >= 2:
        return Finding(
            check,
            Level.LIMIT,
            fact,
            "py-spy may not look into workers, so the stacks of a hung worker have the kernel's lines only",
            "ask for kernel.yama.ptrace_scope=1, or set PYTHONFAULTHANDLER=1 for workers",
        )
    return Finding(check, Level.OK, fact, "the stacks of a hung worker have Python's lines")


def _clock(node: NodeFacts) -> Finding:
    check, offset = "node.clock", node.controller_offset
    if offset is None:
        return Finding(check, Level.UNKNOWN, "the controller's time is not known here", "logs may be in a wrong order")
    if abs(offset) > _CLOCK:
        return Finding(
            check,
            Level.LIMIT,
            f"{offset:+.0f} s against the controller",
            "no agent decides by it, but logs and reports of several nodes are in a wrong order",
            "have the clock set by NTP",
        )
    return Finding(check, Level.OK, f"within {_CLOCK:g} s of the controller", "logs of several nodes are in order")


def _slurm_commands(node: NodeFacts) -> Finding:
    check = "node.slurm_commands"
    missing = [name for name, works in (("scontrol", node.has_scontrol), ("squeue", node.has_squeue)) if not works]
    if not missing:
        return Finding(check, Level.OK, "scontrol and squeue answer", "agents learn why they are signalled")
    return Finding(
        check,
        Level.LIMIT,
        f"{' and '.join(missing)} {'get' if len(missing) > 1 else 'gets'} no answer",
        "an agent here takes each SIGTERM for a preemption with --grace seconds, and does not requeue its job",
        "make Slurm's commands, slurm.conf and munge's socket available here, in a container by bind mounts "
        "(docs/howto/containers.md); the batch script requeues from outside of it",
    )


def _submission(node: NodeFacts) -> Finding:
    why = "slurm-elastic grow and resize ask for further jobs by sbatch; runs themselves do without"
    refusal = node.submit_refusal and f"sbatch takes no job here: {node.submit_refusal}"
    return Finding("node.submission", Level.OK, refusal or "sbatch takes jobs", why)


def _address(node: NodeFacts) -> Finding:
    check = "network.address"
    if node.address_error:
        what, _, fix = node.address_error.partition("; ")
        return Finding(check, Level.BROKEN, what, "other nodes could not reach this one", fix)
    interface = next((name for name, address in node.interfaces.items() if address == node.address), "")
    # The addresses differ from node to node; the way in which they were found does not.
    fact = f"on {interface}" if interface else "by name"
    if node.own_name_address.startswith("127.") and not node.collective_interface:
        return Finding(
            check,
            Level.LIMIT,
            f"{fact}; its own name resolves to {node.own_name_address}",
            "agents do not use the name, but gloo does: collectives on the CPU may not find the other nodes",
            f"give --interface {interface}, so that collectives use it, too" if interface else "give --interface",
        )
    if not node.interfaces or all(address.startswith("127.") for address in node.interfaces.values()):
        return Finding(
            check,
            Level.LIMIT,
            "there is only a loopback interface",
            "no other node can be reached",
            "look at `ip address` on the node",
        )
    return Finding(check, Level.OK, fact, "other nodes reach this one there")


def run_dir_findings(site: SiteFacts) -> Iterator[Finding]:
    """Judge the run directory."""
    facts = site.run_dir
    if facts is None:
        return
    if facts.error:
        what, _, fix = facts.error.partition("; ")
        yield Finding("run_dir.usable", Level.BROKEN, what, "agents refuse it", fix)
        return
    if not facts.is_exclusive:
        yield Finding(
            "run_dir.usable",
            Level.BROKEN,
            f"{facts.path}: a file was created twice",
            "two groups of workers could train at once, as a round is claimed by the creation of a file",
            "give a run directory on another file system by --run-dir",
        )
    else:
        yield Finding(
            "run_dir.usable",
            Level.OK,
            facts.path,
            "files can be made, linked, renamed and removed, and one creation of a file succeeds",
        )
    yield _shared(site, facts.filesystem)
    if facts.free is not None:
        quota = "quotas apart" if facts.quota_left is None else f"{size_text(facts.quota_left)} left of your quota"
        little = min(facts.free, facts.free if facts.quota_left is None else facts.quota_left) < _LITTLE_SPACE
        yield Finding(
            "run_dir.space",
            Level.LIMIT if little else Level.OK,
            f"{size_text(facts.free)} free, {quota}",
            "records, logs and checkpoints beside them need space; a run whose records cannot be written ends"
            if little
            else "",
            "make space, or give another run directory by --run-dir" if little else "",
        )
    if facts.record_seconds is not None and facts.write_speed is not None:
        slow = facts.record_seconds > _SLOW_RECORD or facts.write_speed < _SLOW_WRITE
        yield Finding(
            "run_dir.speed",
            Level.LIMIT if slow else Level.OK,
            f"{facts.record_seconds * 1000:.0f} ms for a record, {facts.write_speed / 1e6:.0f} MB/s for a large file",
            "each round waits for two records; a checkpoint in this file system takes its size by this speed",
            "put the run directory and checkpoints on a faster file system" if slow else "",
        )


def _shared(site: SiteFacts, filesystem: str) -> Finding:
    check, name = "run_dir.shared", filesystem or "an unknown file system"
    # A node that was not reached was not asked for a file.
    delays = [link.file_delay for result in site.results for link in result.links if not link.free_port_error]
    if delays:
        seen = [delay for delay in delays if delay is not None]
        if len(seen) == len(delays):
            return Finding(
                check,
                Level.OK,
                f"{name}, shared by {len(site.results)} nodes; a new file is seen after {max(seen):.2f} s",
                "agents read the records of others there",
            )
        return Finding(
            check,
            Level.BROKEN,
            f"{name}; {len(delays) - len(seen)} of {len(delays)} new files of other nodes were not seen within seconds",
            "agents would not see the records of others",
            "give a run directory that all nodes share by --run-dir; look at the mount options lookupcache and "
            "acdirmax",
        )
    if site.job:
        return Finding(check, Level.UNKNOWN, f"{name}; no node has looked for a file of another one")
    if filesystem not in _LOCAL_FILESYSTEMS:
        return Finding(check, Level.OK, name, "all agents of a run have to see one directory")
    return Finding(
        check,
        Level.UNKNOWN,
        f"{name}, which is a local file system as a rule",
        "all agents of a run have to see one directory",
        "let `slurm-elastic doctor --nodes 2` see whether nodes share it, or give another by --run-dir",
    )
