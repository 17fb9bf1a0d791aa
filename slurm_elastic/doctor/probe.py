"""The doctor on one node of its own job: gathers the facts of this node, then those of its ways to all others."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from slurm_elastic import typed_json
from slurm_elastic.doctor.facts import CollectiveFacts, NodeFacts, ProbeResult
from slurm_elastic.doctor.gather import node_facts
from slurm_elastic.doctor.peers import Peer, PeerServer, ask_peer
from slurm_elastic.errors import UsageError
from slurm_elastic.rundir import RunDir
from slurm_elastic.slurm import AddressPreference, Controller, SlurmJob

_PEERS = 60.0
"""Seconds in which the other nodes have started this as well and gathered their facts."""
_COLLECTIVE = 60.0
_SIZE = 8 << 20
"""Bytes of an all-reduce; DistributedDataParallel's buckets have up to 25 MiB."""
_WARM_UP, _TIMES = 1, 3
_MOST_LINKS = 16
"""Nodes that each one asks: those that follow it in the job's list, so that all are asked, and by as many."""
_POLL = 0.2
_T = TypeVar("_T")


def result_name(node: str) -> str:
    """Return the name of the file with the result of a node."""
    return f"result.{node}.json"


def read_file(run_dir: RunDir, name: str, kind: type[_T]) -> _T | None:
    """Return what a node has written into a file; None if it has not, or it is damaged."""
    content = run_dir.read(name)
    try:
        return None if content is None else typed_json.decode(content, kind)
    except typed_json.JSONError:
        return None


def probe(base: Path, run_id: str, preference: AddressPreference) -> None:
    """Find everything out and write it into the run directory; never raises for what it finds.

    Args:
        base: The directory below which runs are.
        run_id: Id of the doctor's run.
        preference: The user's choice of the address.

    Raises:
        UsageError: This is no task of a Slurm job, or the run directory cannot be used here.
    """
    job = SlurmJob.from_environment(os.environ)
    if job is None:
        raise UsageError("this is for the job that `slurm-elastic doctor --nodes N` submits")
    run_dir = RunDir.for_run(base, run_id)
    run_dir.open()
    server = PeerServer(run_dir, job.node)
    toward = next((node for node in job.nodes if node != job.node), None)
    facts = node_facts(job.node, preference, Controller(), job_gpus=job.gpus_on_node, toward=toward)
    # The job itself, which comes first where it has several nodes, is the domain of all.
    label = job.failure_domain.partition("/")[2] if len(job.job_nodes) > 1 else job.failure_domain
    facts = replace(facts, failure_domain=label)
    # What is known counts even if what comes next kills this process.
    result = ProbeResult(facts, is_complete=len(job.nodes) == 1)
    _write(run_dir, result_name(job.node), result)
    if result.is_complete:
        return
    present = _meet(run_dir, job, facts, server)
    run_dir.publish(_done_name(job.node), b"done")
    # They may still have questions.
    _wait_for(run_dir, present, _done_name)


def _meet(run_dir: RunDir, job: SlurmJob, facts: NodeFacts, server: PeerServer) -> tuple[str, ...]:
    """Look at the ways to the other nodes, and return the nodes that have come."""
    # IPv4 only, as the port of the worker store.
    store = socket.create_server(("", 0))
    leader_port, free_port = server.ports
    has_torch, has_gpus = not facts.torch.error, bool(facts.gpus)
    own = Peer(job.node, facts.address, leader_port, free_port, store.getsockname()[1], has_torch, has_gpus)
    _write(run_dir, _peer_name(job.node), own)
    _wait_for(run_dir, job.nodes, _peer_name)
    peers = {node: peer for node in job.nodes if (peer := read_file(run_dir, _peer_name(node), Peer))}
    following = [*job.nodes[job.node_rank + 1 :], *job.nodes[: job.node_rank]][:_MOST_LINKS]
    links = tuple(ask_peer(run_dir, job.node, peers[node]) for node in following if node in peers)
    result = ProbeResult(facts, links)
    _write(run_dir, result_name(job.node), result)
    collectives = _collectives(job, facts, peers, store)
    _write(run_dir, result_name(job.node), replace(result, collectives=collectives, is_complete=True))
    return tuple(peers)


def _collectives(
    job: SlurmJob, facts: NodeFacts, peers: Mapping[str, Peer], listening: socket.socket
) -> tuple[CollectiveFacts, ...]:
    """Make all-reduces of all nodes by gloo, and by NCCL where all have GPUs."""
    missing = [node for node in job.nodes if node not in peers]
    without = [node for node in peers if not peers[node].has_torch]
    if missing:
        return (CollectiveFacts("gloo", error=f"{', '.join(missing)} did not come within {_PEERS:g} s"),)
    if without:
        return (CollectiveFacts("gloo", error=f"there is no torch that works on {', '.join(without)}"),)
    # This imports torch.
    from slurm_elastic.slurm.address import data_network

    os.environ.update(data_network(facts.collective_interface, facts.collective_interface, os.environ))
    backends = ("gloo", "nccl") if all(peer.has_gpus for peer in peers.values()) else ("gloo",)
    outcomes = {backend: CollectiveFacts(backend, error=f"no end within {_COLLECTIVE:g} s") for backend in backends}

    def run() -> None:
        try:
            store = _store(job.node_rank, peers[job.nodes[0]], listening)
            for backend in backends:
                outcomes[backend] = _all_reduce(backend, store, job.node_rank, len(job.nodes))
        except Exception as error:
            for name in backends:
                if outcomes[name].bandwidth is None:
                    outcomes[name] = CollectiveFacts(name, error=_first_line(error))

    # In a thread: where a network swallows packets, a collective may end long after its time-out, or never.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_COLLECTIVE)
    return tuple(outcomes.values())


def _store(rank: int, first: Peer, listening: socket.socket) -> Any:
    """Return the store of the group, which the first node serves."""
    make = partial(_distributed().TCPStore, port=first.store_port, timeout=timedelta(seconds=_COLLECTIVE))
    if rank != 0:
        return make(first.address)
    listening.setblocking(False)
    return make("127.0.0.1", is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _all_reduce(backend: str, store: Any, rank: int, size: int) -> CollectiveFacts:
    """Form a group, measure it, and end it."""
    import torch

    dist = _distributed()
    try:
        own, timeout = dist.PrefixStore(backend, store), timedelta(seconds=_COLLECTIVE / 2)
        dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timeout)
        tensor = torch.ones(_SIZE // 4, device="cuda:0" if backend == "nccl" else "cpu")
        for _ in range(_WARM_UP):
            dist.all_reduce(tensor)
        dist.barrier()
        begin = time.monotonic()
        for _ in range(_TIMES):
            dist.all_reduce(tensor)
        if backend == "nccl":
            torch.cuda.synchronize()
        took = (time.monotonic() - begin) / _TIMES
        dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        return CollectiveFacts(backend, error=_first_line(error))
    return CollectiveFacts(backend, bandwidth=2 * (size - 1) / size * _SIZE / took)


def _distributed() -> Any:
    """Return torch.distributed, whose stores are public but not exported to type checkers (torch 2.13)."""
    return importlib.import_module("torch.distributed")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _write(run_dir: RunDir, name: str, content: object) -> None:
    run_dir.publish(name, msgspec.json.encode(content))


def _peer_name(node: str) -> str:
    return f"peer.{node}.json"


def _done_name(node: str) -> str:
    return f"done.{node}"


def _wait_for(run_dir: RunDir, nodes: Sequence[str], name: Callable[[str], str]) -> None:
    """Wait until these nodes have come as far as a file of theirs says, or their time is over."""
    end, missing = time.monotonic() + _PEERS, list(nodes)
    while missing and time.monotonic() < end:
        missing = [node for node in missing if run_dir.read(name(node)) is None]
        if missing:
            time.sleep(_POLL)
