"""The worker's side of checkpoints on disk: records the start of its group there, and reads what the group starts from.

Imports of a worker cost time at each start, so this imports what it needs when a script has called `to_disk`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurm_elastic.snapshot.hand_over import Directory
from slurm_elastic.snapshot.lineage import SnapshotId

if TYPE_CHECKING:
    from slurm_elastic.snapshot.checkpoint_lineage import CheckpointId, Start
    from slurm_elastic.snapshot.checkpoints import Checkpoints
    from slurm_elastic.snapshot.memory import Slot

__all__ = ["DiskSide", "Started"]

_STORE_TIMEOUT = 300.0
"""Seconds that ranks wait for the choice of rank 0, as torch waits for a process group."""


@dataclass(frozen=True, slots=True)
class Started:
    """The start of this group in the directory of checkpoints.

    Attributes:
        directory: For the process that writes; None on other ranks than 0.
        state: The state of the checkpoint that the group starts from; None if it starts from none.
    """

    directory: Directory | None = None
    state: dict[str, Any] | None = None


class DiskSide:
    """The directory that a script has named with `to_disk`, and the start of its group there."""

    def __init__(self) -> None:
        self._configured: tuple[str, float, int] | None = None
        self.started: Started | None = None
        """The start of this group; None before `load`."""

    @property
    def is_configured(self) -> bool:
        """True if the script has named a directory."""
        return self._configured is not None

    def configure(self, path: str, every: float, keep: int) -> None:
        """Name the directory; see `to_disk`.

        Raises:
            RuntimeError: `load` was called before.
        """
        if self.started is not None:
            raise RuntimeError("snapshot.to_disk comes too late: call it before snapshot.load")
        self._configured = path, float(every), keep

    def require_start(self) -> None:
        """Make sure that what is saved is known to come from what is on disk.

        Raises:
            RuntimeError: There is a directory, and `load` was not called.
        """
        if self._configured is not None and self.started is None:
            raise RuntimeError("snapshot.save comes before snapshot.load: after snapshot.to_disk call load first")

    def start(self, memory: SnapshotId | None, below: int | None) -> Started:
        """Record the start of this group; rank 0 does, and chooses for all.

        Args:
            memory: The snapshot in memory that the group starts from; None to start from disk.
            below: Only checkpoints of earlier steps are used; None for all.

        Raises:
            RuntimeError: The choice of rank 0 cannot be had, or the directory cannot be used.
        """
        from pathlib import Path

        from slurm_elastic.snapshot.checkpoints import CheckpointError, Checkpoints

        assert self._configured is not None
        path, every, keep = self._configured
        checkpoints = Checkpoints(Path(path))
        is_first = os.environ.get("RANK", "0") == "0"
        directory, chosen = None, None
        try:
            if is_first:
                start, chosen = self._record(checkpoints, memory, below)
                origin = start.line[-1].start if memory is not None and start.line else None
                directory = Directory(path, every, keep, start.number, origin)
            elif memory is None:
                chosen = _read_choice()
            state = None if chosen is None else checkpoints.read(chosen)
        except (CheckpointError, OSError) as error:
            raise RuntimeError(f"the checkpoint that this round starts from cannot be had: {error}") from None
        self.started = Started(directory, state)
        return self.started

    def write(self, directory: Directory, slots: Sequence[Slot], round_: int) -> None:
        """Write what this process holds until it ends."""
        import atexit

        from slurm_elastic.snapshot.disk import DiskWriter, Target

        writer, owner = DiskWriter(slots), os.getpid()
        writer.aim(Target(directory.path, directory.every, directory.keep, directory.start, round_))

        def end() -> None:
            if os.getpid() == owner:
                writer.close()

        atexit.register(end)

    def _record(
        self, checkpoints: Checkpoints, memory: SnapshotId | None, below: int | None
    ) -> tuple[Start, CheckpointId | None]:
        # Not the trainer API: the agent waits at a planned stop for workers that have imported it.
        from slurm_elastic.control import is_superseded

        run, round_ = os.environ.get("SLURM_ELASTIC_RUN_ID", ""), int(os.environ.get("SLURM_ELASTIC_ROUND", "0"))
        try:
            start, chosen = checkpoints.start(run, round_, memory, below, lambda: not is_superseded(os.environ))
        except Exception as error:
            if memory is None:
                _tell_choice({"error": str(error)})
            raise
        if memory is None:
            _tell_choice({} if chosen is None else {"start": chosen.start, "step": chosen.step})
        return start, chosen


def _tell_choice(choice: dict[str, Any]) -> None:
    import json

    if _has_others():
        store, key = _store()
        store.set(key, json.dumps(choice))


def _read_choice() -> CheckpointId | None:
    import json

    from slurm_elastic.snapshot.checkpoint_lineage import CheckpointId

    store, key = _store()
    choice = json.loads(store.get(key))
    if "error" in choice:
        raise RuntimeError(f"rank 0 cannot use the directory of checkpoints: {choice['error']}")
    return CheckpointId(choice["start"], choice["step"]) if choice else None


def _has_others() -> bool:
    return os.environ.get("WORLD_SIZE", "1") != "1"


def _store() -> tuple[Any, str]:
    """Return the store of the round, and the key for the choice of rank 0. Values are bytes; nothing is unpickled."""
    from datetime import timedelta

    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=_STORE_TIMEOUT)
    try:
        store = TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
    except DistError as error:
        raise RuntimeError(
            f"no store at {address}:{port} for the choice of a checkpoint: {error}; without torchrun call"
            " torch.distributed.init_process_group before snapshot.load"
        ) from None
    # As torch does for its process groups: torchrun keeps the store when it restarts workers.
    return store, f"slurm_elastic/checkpoint/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
