"""The doctor on one node of its own job: gathers the facts of this node, then those of its ways to all others."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec

from slurm_elastic import typed_json
from slurm_elastic.doctor.facts import CollectiveFacts, NodeFacts, ProbeResult
from slurm_elastic.doctor.gather import node_facts
from slurm_elastic.doctor.peers import ask_peer, serve_peers, why
from slurm_elastic.errors import UsageError
from slurm_elastic.rundir import RecordError, RunDir
from slurm_elastic.slurm import AddressPreference, Controller, SlurmJob
from slurm_elastic.slurm.address import data_network

_PEERS = 60.0
"""Seconds in which the other nodes have started this as well and gathered their facts."""
_COLLECTIVE = 60.0
_SIZE = 8 << 20
"""Bytes of an all-reduce; DistributedDataParallel's buckets have up to 25 MiB."""
_TIMES = 3
_MOST_LINKS = 16
"""Nodes that each one asks: those that follow it in the job's list, so that all are asked, and by as many."""
_POLL = 0.2


def result_name(node: str) -> str:
    """Return the name of the record with the result of a node."""
    return f"result.{node}"


def read_result(run_dir: RunDir, node: str) -> ProbeResult | None:
    """Return what a node has found out so far; None if it has written nothing, or that is damaged."""
    with contextlib.suppress(RecordError, typed_json.JSONError):
        return typed_json.convert(run_dir.read_record(result_name(node)), ProbeResult)
    return None


def probe(base: Path, run_id: str, preference: AddressPreference) -> None:
    """Find everything out and write it into the run directory; never raises for what it finds.

    Raises:
        UsageError: This is no task of a Slurm job, or the run directory cannot be used here.
    """
    job = SlurmJob.from_environment(os.environ)
    if job is None:
        raise UsageError("this is for the job that `slurm-elastic doctor --nodes N` submits")
    run_dir = RunDir.for_run(base, run_id)
    run_dir.open()
    ports = serve_peers(run_dir, job.node)
    toward = next((node for node in job.nodes if node != job.node), None)
    facts = node_facts(job.node, preference, Controller(), job_gpus=job.gpus_on_node, toward=toward)
    # The job itself, which comes first where it has several nodes, is the domain of all.
    label = job.failure_domain.partition("/")[2] if len(job.job_nodes) > 1 else job.failure_domain
    facts = replace(facts, failure_domain=label)
    # IPv4 only, as the port of the worker store.
    store = socket.create_server(("", 0))
    # What is known counts even if what comes next kills this process.
    result = ProbeResult(facts, *ports, store.getsockname()[1], is_complete=len(job.nodes) == 1)
    _write(run_dir, result)
    if result.is_complete:
        return
    peers = _wait_for(run_dir, job.nodes, lambda peer: True)
    others = [node for node in (*job.nodes[job.node_rank + 1 :], *job.nodes[: job.node_rank]) if node in peers]
    links = tuple(ask_peer(run_dir, job.node, peers[node]) for node in others[:_MOST_LINKS])
    result = replace(result, links=links)
    _write(run_dir, result)
    _write(run_dir, replace(result, collectives=_collectives(job, facts, peers, store), is_complete=True))
    # Those before it may still have questions, and all need the store of the first node.
    _wait_for(run_dir, others if job.node_rank == 0 else others[-_MOST_LINKS:], lambda peer: peer.is_complete)


def _collectives(
    job: SlurmJob, facts: NodeFacts, peers: Mapping[str, ProbeResult], listening: socket.socket
) -> tuple[CollectiveFacts, ...]:
    """Make all-reduces of all nodes by gloo, and by NCCL where all have GPUs."""
    missing = [node for node in job.nodes if node not in peers]
    without = [node for node, peer in peers.items() if peer.facts.torch.error]
    if missing:
        return (CollectiveFacts("gloo", error=f"{', '.join(missing)} did not come within {_PEERS:g} s"),)
    if without:
        return (CollectiveFacts("gloo", error=f"there is no torch that works on {', '.join(without)}"),)
    os.environ.update(data_network(facts.collective_interface, facts.collective_interface, os.environ))
    backends = ("gloo", "nccl") if all(peer.facts.gpus for peer in peers.values()) else ("gloo",)
    outcomes = {backend: CollectiveFacts(backend, error=f"no end within {_COLLECTIVE:g} s") for backend in backends}

    @cache
    def store() -> Any:
        return _store(job.node_rank, peers[job.nodes[0]], listening)

    def run() -> None:
        for backend in backends:
            outcomes[backend] = _all_reduce(backend, store, job.node_rank, len(job.nodes))

    # In a thread: where a network swallows packets, a collective may end long after its time-out, or never.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_COLLECTIVE)
    return tuple(outcomes.values())


def _store(rank: int, first: ProbeResult, listening: socket.socket) -> Any:
    """Return the store of the group, which the first node serves."""
    dist = importlib.import_module("torch.distributed")
    make = partial(dist.TCPStore, port=first.store_port, timeout=timedelta(seconds=_COLLECTIVE))
    if rank != 0:
        return make(first.facts.address)
    listening.setblocking(False)
    return make("127.0.0.1", is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _all_reduce(backend: str, store: Callable[[], Any], rank: int, size: int) -> CollectiveFacts:
    """Form a group, measure it, and end it."""
    import torch

    # Not by an import: its stores are public but not exported to type checkers (torch 2.13).
    dist = importlib.import_module("torch.distributed")
    try:
        own, timeout = dist.PrefixStore(backend, store()), timedelta(seconds=_COLLECTIVE / 2)
        dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timeout)
        tensor = torch.ones(_SIZE // 4, device="cuda:0" if backend == "nccl" else "cpu")
        # The first one makes connections.
        dist.all_reduce(tensor)
        dist.barrier()
        begin = time.monotonic()
        for _ in range(_TIMES):
            dist.all_reduce(tensor)
        if backend == "nccl":
            torch.cuda.synchronize()
        took = (time.monotonic() - begin) / _TIMES
        dist.destroy_process_group()
    except Exception as error:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        return CollectiveFacts(backend, error=why(error))
    return CollectiveFacts(backend, bandwidth=2 * (size - 1) / size * _SIZE / took)


def _write(run_dir: RunDir, result: ProbeResult) -> None:
    run_dir.publish_record(msgspec.to_builtins(result), result_name(result.facts.node))


def _wait_for(
    run_dir: RunDir, nodes: Collection[str], has_come: Callable[[ProbeResult], bool]
) -> dict[str, ProbeResult]:
    """Wait until these nodes have come so far, or their time is over, and return the results of those that have."""
    end, results = time.monotonic() + _PEERS, dict[str, ProbeResult]()
    while True:
        for node in [node for node in nodes if node not in results]:
            if (result := read_result(run_dir, node)) is not None and has_come(result):
                results[node] = result
        if len(results) == len(nodes) or time.monotonic() > end:
            return {node: results[node] for node in nodes if node in results}
        time.sleep(_POLL)
