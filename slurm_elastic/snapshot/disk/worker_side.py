"""The worker's side of checkpoints on disk: records the start of its group there, and reads what the group starts from.

Imports of a worker cost time at each start, so this imports what it needs when a script has called `to_disk`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from slurm_elastic import typed_json
from slurm_elastic.snapshot.hand_over import Directory
from slurm_elastic.snapshot.lineage import Holder, SnapshotId

if TYPE_CHECKING:
    from slurm_elastic.snapshot.disk.checkpoints import Checkpoints
    from slurm_elastic.snapshot.disk.lineage import CheckpointId
    from slurm_elastic.snapshot.disk.stored import Stored
    from slurm_elastic.snapshot.memory import Slot


_T = TypeVar("_T")

_STORE_TIMEOUT = 300.0
"""Seconds that ranks wait for the choice of rank 0, as torch waits for a process group."""


@dataclass(frozen=True, slots=True)
class Started:
    """The start of this group in the directory of checkpoints, and the checkpoint that it starts from, if any."""

    stored: Stored | None = None


class Choice(msgspec.Struct, frozen=True):
    """The choice of rank 0, for the other ranks.

    Attributes:
        checkpoint: The start and the step of the checkpoint that the group starts from; None if from none.
        directory: Of rank 0.
        error: Why the directory cannot be used; empty if it can.
    """

    checkpoint: tuple[int, int] | None = None
    directory: Directory | None = None
    error: str = ""


class DiskSide:
    """The directory that a script has named with `to_disk`, and the start of its group there."""

    def __init__(self) -> None:
        self._configured: tuple[str, float, int, int] | None = None
        self.started: Started | None = None
        """The start of this group; None before `load`."""
        self._chosen: tuple[Checkpoints, CheckpointId] | None = None
        self.has_parts = False
        """True if the state that `load` has seen has parts."""

    @property
    def is_configured(self) -> bool:
        """True if the script has named a directory."""
        return self._configured is not None

    def configure(self, path: str, every: float, keep: int, every_steps: int) -> None:
        """Name the directory; see `to_disk`.

        Raises:
            RuntimeError: `load` was called before.
        """
        if self.started is not None:
            raise RuntimeError("snapshot.to_disk comes too late: call it before snapshot.load")
        self._configured = path, float(every), keep, every_steps

    def require_start(self) -> None:
        """Make sure that what is saved is known to come from what is on disk.

        Raises:
            RuntimeError: There is a directory, and `load` was not called.
        """
        if self._configured is not None and self.started is None:
            raise RuntimeError("snapshot.save comes before snapshot.load: after snapshot.to_disk call load first")

    def start(
        self,
        memory: SnapshotId | None,
        below: int | None,
        lost: SnapshotId | None,
        name_directory: Callable[[Directory], Holder | None],
        *,
        has_parts: bool,
    ) -> None:
        """Record the start of this group; rank 0 does, and chooses for all.

        Args:
            memory: The snapshot in memory that the group starts from; None to start from disk.
            below: Only checkpoints of earlier steps are used; None for all.
            lost: See :class:`~.lineage.Origin`; for state with parts.
            name_directory: Has snapshots written; returns the process that finds steps for all agents.
            has_parts: True if the other nodes write parts of snapshots.

        Raises:
            RuntimeError: The choice of rank 0 cannot be had, or the directory cannot be used.
        """
        from pathlib import Path

        from slurm_elastic.snapshot.disk.checkpoints import Checkpoints
        from slurm_elastic.snapshot.disk.lineage import CheckpointId

        assert self._configured is not None
        path, *_ = self._configured
        checkpoints = Checkpoints(Path(path))
        choice = Choice()
        tells = memory is None or has_parts

        def begin() -> None:
            nonlocal choice
            if os.environ.get("RANK", "0") == "0":
                try:
                    choice = self._record(checkpoints, memory, below, lost, has_parts)
                    assert choice.directory is not None
                    collector = name_directory(choice.directory)
                    choice = Choice(choice.checkpoint, replace(choice.directory, collector=collector))
                except Exception as error:
                    choice = Choice(error=str(error))
                    raise
                finally:
                    if tells:
                        _tell(choice)
            elif tells:
                choice = _read_choice()
                if has_parts and choice.directory is not None and os.environ.get("LOCAL_RANK", "0") == "0":
                    name_directory(replace(choice.directory, path=path, first=False, checkpoint=""))

        self.read(begin)
        self.has_parts = has_parts
        chosen = None if choice.checkpoint is None else CheckpointId(*choice.checkpoint)
        self._chosen = None if chosen is None else (checkpoints, chosen)
        self.started = Started(None if chosen is None else self.read(lambda: checkpoints.read(chosen)))

    def read(self, read: Callable[[], _T]) -> _T:
        """Return what a function reads from the directory.

        Raises:
            RuntimeError: It cannot be read.
        """
        from slurm_elastic.snapshot.disk.stored import CheckpointError, DamagedCheckpointError

        try:
            return read()
        except (CheckpointError, OSError) as error:
            if isinstance(error, DamagedCheckpointError) and self._chosen is not None:
                checkpoints, chosen = self._chosen
                checkpoints.mark_damaged(chosen, str(error))
            raise RuntimeError(f"the checkpoint that this round starts from cannot be had: {error}") from None

    def write(self, directory: Directory, slots: Sequence[Slot], parts: Sequence[Slot], round_: int) -> None:
        """Write what this process holds until it ends."""
        import atexit

        from slurm_elastic.snapshot.disk.agent_side import DiskWriter, HeldSlots, Target

        writer, owner = DiskWriter(lambda: HeldSlots(slots, parts)), os.getpid()
        writer.aim(Target(directory, round_))

        def end() -> None:
            if os.getpid() == owner:
                writer.close()

        atexit.register(end)

    def _record(
        self,
        checkpoints: Checkpoints,
        memory: SnapshotId | None,
        below: int | None,
        lost: SnapshotId | None,
        has_parts: bool,
    ) -> Choice:
        # Not the trainer API: the agent waits at a planned stop for workers that have imported it.
        from slurm_elastic.control import is_superseded

        assert self._configured is not None
        path, every, keep, every_steps = self._configured
        run, round_ = os.environ.get("SLURM_ELASTIC_RUN_ID", ""), int(os.environ.get("SLURM_ELASTIC_ROUND", "0"))
        # Without parts no rank asks for the choice of rank 0 if there is a snapshot in memory.
        lost = lost if has_parts else None
        start, chosen = checkpoints.start(run, round_, memory, below, lambda: not is_superseded(os.environ), lost)
        origin = start.line[-1].start if memory is not None and chosen is None and start.line else None
        name = "" if chosen is None else checkpoints.path_of(chosen).name
        begins = chosen.step if chosen is not None else memory.step if memory is not None else 0
        directory = Directory(
            path,
            every,
            keep,
            start.number,
            origin,
            name,
            has_parts=has_parts,
            every_steps=every_steps,
            begins=begins,
        )
        return Choice(None if chosen is None else (chosen.start, chosen.step), directory)


def _tell(choice: Choice) -> None:
    if _has_others():
        store, key = _store()
        store.set(key, msgspec.json.encode(choice).decode())


def _read_choice() -> Choice:
    store, key = _store()
    choice = typed_json.decode(store.get(key), Choice)
    if choice.error:
        raise RuntimeError(f"rank 0 cannot use the directory of checkpoints: {choice.error}")
    return choice


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
