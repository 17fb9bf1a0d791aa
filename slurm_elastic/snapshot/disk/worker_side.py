"""The worker's side of checkpoints on disk: records the start of its group there, and reads what the group starts from.

Imports of a worker cost time at each start, so this imports what it needs when a script has called `to_disk`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from slurm_elastic import typed_json
from slurm_elastic.snapshot.hand_over import Answer, Directory, round_store
from slurm_elastic.snapshot.lineage import Holder, SnapshotId

if TYPE_CHECKING:
    from slurm_elastic.snapshot.disk.checkpoints import Checkpoints
    from slurm_elastic.snapshot.disk.lineage import CheckpointId
    from slurm_elastic.snapshot.disk.stored import Stored
    from slurm_elastic.snapshot.memory import Slot


_T = TypeVar("_T")

_STORE_TIMEOUT = timedelta(minutes=5)
"""For which ranks wait for the choice of rank 0, as torch waits for a process group."""


class DiskSide:
    """The directory that a script has named with `to_disk`, and the start of its group there."""

    def __init__(self) -> None:
        self.directory: Directory | None = None
        """The directory; None if the script has named none."""
        self.started = False
        """True when the start of this group is recorded there, by `load`."""
        self._stored: Stored | None = None
        self._chosen: tuple[Checkpoints, CheckpointId] | None = None
        self.has_parts = False
        """True if the state that `load` has seen has parts."""

    def start(
        self,
        memory: SnapshotId | None,
        answered: Answer,
        name_directory: Callable[[Directory], Holder | None],
        *,
        has_parts: bool,
    ) -> Stored | None:
        """Record the start of this group, once; rank 0 does, and chooses for all.

        Args:
            memory: The snapshot in memory that the group starts from; None to start from disk.
            name_directory: Has snapshots written; returns the agent that finds steps for all.
            has_parts: True if ranks have more than the state of all ranks: then the other nodes write parts, too.

        Returns the state on disk that the group starts from, if any. Raises RuntimeError if the choice of rank 0 cannot
        be had, or the directory cannot be used.
        """
        if self.started:
            return self._stored
        from pathlib import Path

        from slurm_elastic.snapshot.disk.checkpoints import Checkpoints
        from slurm_elastic.snapshot.disk.lineage import CheckpointId

        assert self.directory is not None
        path = self.directory.path
        checkpoints = Checkpoints(Path(path))
        tells = memory is None or has_parts

        def begin() -> Directory | None:
            choice: Directory | str = ""
            if os.environ.get("RANK", "0") == "0":
                try:
                    choice = self._record(checkpoints, memory, answered, has_parts)
                    choice = replace(choice, collector=name_directory(choice))
                except Exception as error:
                    choice = str(error)
                    raise
                finally:
                    if tells:
                        _tell(choice)
                return choice
            if not tells:
                return None
            directory = replace(_read_choice(), path=path)
            if has_parts and os.environ.get("LOCAL_RANK", "0") == "0":
                name_directory(directory)
            return directory

        directory = self.read(begin)
        self.has_parts = has_parts
        if directory is not None and directory.checkpoint is not None:
            chosen = CheckpointId(*directory.checkpoint)
            self._chosen = checkpoints, chosen
            self._stored = self.read(lambda: checkpoints.read(chosen))
        self.started = True
        return self._stored

    def read(self, read: Callable[[], _T]) -> _T:
        """Return what a function reads from the directory; raises RuntimeError if it cannot be read."""
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
        self, checkpoints: Checkpoints, memory: SnapshotId | None, answered: Answer, has_parts: bool
    ) -> Directory:
        # Not the trainer API: the agent waits at a planned stop for workers that have imported it.
        from slurm_elastic.control.worker_side import is_superseded

        assert self.directory is not None
        run, round_ = os.environ.get("SLURM_ELASTIC_RUN_ID", ""), int(os.environ.get("SLURM_ELASTIC_ROUND", "0"))
        # Without parts no rank asks for the choice of rank 0 if there is a snapshot in memory.
        below, lost = answered.below, answered.lost if has_parts else None
        start, chosen = checkpoints.start(run, round_, memory, below, lambda: not is_superseded(os.environ), lost)
        origin = start.line[-1].start if memory is not None and chosen is None and start.line else 0
        begins = chosen.step if chosen is not None else memory.step if memory is not None else 0
        checkpoint = None if chosen is None else (chosen.start, chosen.step)
        return replace(
            self.directory,
            start=start.number,
            origin=origin,
            checkpoint=checkpoint,
            has_parts=has_parts,
            begins=begins,
        )


def _tell(choice: Directory | str) -> None:
    """Tell the other ranks the choice of rank 0: the directory, or why it cannot be used."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        _store().set(_key(), msgspec.json.encode(choice).decode())


def _read_choice() -> Directory:
    choice: Directory | str = typed_json.decode(_store().get(_key()), Directory | str)
    if isinstance(choice, str):
        raise RuntimeError(f"rank 0 cannot use the directory of checkpoints: {choice}")
    return choice


def _key() -> str:
    # As torch does for its process groups: torchrun keeps the store when it restarts workers.
    return f"slurm_elastic/checkpoint/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _store() -> Any:
    from torch.distributed import DistError

    try:
        return round_store(_STORE_TIMEOUT)
    except DistError as error:
        raise RuntimeError(
            f"no store at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} for the choice of a checkpoint:"
            f" {error}; without torchrun call torch.distributed.init_process_group before snapshot.load"
        ) from None
