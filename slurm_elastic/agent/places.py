"""The workers of a round as the health port and the watchdog know them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from slurm_elastic.agent.health import Place, WorkerPlace
from slurm_elastic.agent.watchdog import Watched, process_state
from slurm_elastic.control import WorkerProgress
from slurm_elastic.rendezvous.membership import Slowest
from slurm_elastic.rendezvous.transport.messages import Placed

__all__ = ["place_of", "slowest", "survivors", "watched"]


def place_of(placed: Placed, pids: dict[int, int]) -> Place:
    """The place of this node, for those who ask."""
    place = placed.place
    return Place(
        round=placed.round,
        reason=placed.reason.value,
        nodes=placed.nodes,
        members=placed.members,
        node_rank=place.rank,
        world_size=placed.world_size,
        workers=tuple(WorkerPlace(place.base_rank + local, local, pid) for local, pid in sorted(pids.items())),
    )


def watched(pids: dict[int, int], envs: dict[int, dict[str, str]], round_: int) -> list[Watched]:
    """The workers of a round, for the watchdog. The logs specs have put the path of the error file beside the logs."""
    return [
        Watched(pid, int(envs[rank]["RANK"]), rank, round_, Path(error).parent if error else None)
        for rank, pid in pids.items()
        for error in [envs[rank].get("TORCHELASTIC_ERROR_FILE")]
    ]


def survivors(node: str, pids: Iterable[int]) -> str:
    """One line about processes that have survived SIGKILL."""
    shown = []
    for pid in pids:
        process = process_state(pid)
        # proc_pid_stat(5)
        waits = process is not None and process.state == "D"
        shown.append(f"{pid}{' in uninterruptible sleep' if waits else ''}")
    return (
        f"{node} has processes that SIGKILL does not end ({', '.join(shown)}), so it leaves the run; look at the node"
    )


def slowest(placed: Placed | None, progress: Iterable[WorkerProgress]) -> Slowest | None:
    """The worker of this node that has taken the fewest steps of its round; None if none tells."""
    steps = [(worker.boundary, worker.local_rank) for worker in progress if worker.attached]
    if placed is None or not steps:
        return None
    taken, local_rank = min(steps)
    return Slowest(placed.place.base_rank + local_rank, taken)
