"""A checkpoint of Lightning in the memory of the agents, for `slurm_elastic.integrations.lightning`.

Tensors of a checkpoint go into a snapshot as they are, and all else as the bytes of a file of torch.save, of which only
plain values are read back. Trainer writes and reads it by a CheckpointIO of ours, which touches no file. All this is
what Lightning documents (read in lightning 2.6). ModelParallelStrategy has no use for a CheckpointIO: its own methods,
which have shards of the state, give way to ours meanwhile.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from slurm_elastic import snapshot

_log = logging.getLogger("slurm_elastic")

_SHARDED = ("state_dict", "optimizer_states")
"""What of a checkpoint is sharded."""
_PAGE = 4096
"""The bytes without the tensors are filled up to a multiple of this: the next step finds a place of its size."""
_resumes = ""
"""The directory for which `last_checkpoint` has looked for a snapshot."""
_newest: dict[str, dict[str, Any]] = {}
"""The checkpoint that it has found in memory, by the name that Trainer has for it, until Trainer has read it."""


class _FromMemory(CheckpointIO):
    """Reads what `last_checkpoint` has found in memory, once; leaves all else to the trainer's own."""

    def __init__(self, files: CheckpointIO) -> None:
        self._files = files

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """See base class."""
        self._files.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        """See base class."""
        found = _newest.pop(str(path), None)
        return self._files.load_checkpoint(path, *arguments, **options) if found is None else found

    def remove_checkpoint(self, path: Any) -> None:
        """See base class."""
        self._files.remove_checkpoint(path)

    def teardown(self) -> None:
        """See base class."""
        self._files.teardown()


class _Nowhere(_FromMemory):
    """Writes no file: the callback is given the checkpoint."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """See base class."""


def read_from_memory(strategy: Strategy) -> None:
    """Have a trainer read what `last_checkpoint` has found in memory; called before it reads its checkpoint."""
    if not _newest:
        return
    strategy.checkpoint_io = _FromMemory(strategy.checkpoint_io)
    if _has_shards(strategy):
        read = strategy.load_checkpoint

        def load(path: Any, *arguments: Any, **options: Any) -> Any:
            found = _newest.pop(str(path), None)
            return read(path, *arguments, **options) if found is None else _with_shards(strategy, found)

        strategy.load_checkpoint = load


def _has_shards(strategy: Strategy) -> bool:
    return isinstance(strategy, ModelParallelStrategy) and strategy._save_distributed_checkpoint


def _with_shards(strategy: Strategy, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Load this rank's shards into the model and its optimizers, as `ModelParallelStrategy.load_checkpoint` does."""
    model, optimizers = strategy.model, strategy.optimizers
    present = get_model_state_dict(model), [get_optimizer_state_dict(model, each) for each in optimizers]
    weights, states = snapshot.load(**dict(zip(_SHARDED, present, strict=True)))
    set_model_state_dict(model, weights)
    for optimizer, state in zip(optimizers, states, strict=True):
        set_optimizer_state_dict(model, optimizer, state)
    return checkpoint


class Memory:
    """Copies the checkpoints of one training into the memory of the agents.

    Args:
        trainer: The trainer.
        directory: Where it writes checkpoints on disk.
        every: Steps between two copies; 0 for none.
    """

    def __init__(self, trainer: Trainer, directory: Path, every: int) -> None:
        self._every = every if _resumes == _path(directory) else 0
        # Strategies that write shards do it without a CheckpointIO.
        is_whole = type(trainer.strategy).save_checkpoint is Strategy.save_checkpoint
        if self._every and not is_whole and not _has_shards(trainer.strategy):
            self._every = 0
            name = type(trainer.strategy).__name__
            _tell(f"{name} shows no shards, as ModelParallelStrategy(save_distributed_checkpoint=True) does")
        self._trainer, self._directory, self._kept = trainer, directory, trainer.global_step
        self.checkpoint: dict[str, Any] | None = None
        """The checkpoint that Trainer makes; for the callback, which is given it on all ranks."""
        self.saves = False
        """True while Trainer makes one for the memory."""
        self._refused = self._tried = False

    def keep(self, every: int = 0) -> None:
        """Copy the state if so many steps were taken since the last copy; on all ranks."""
        step = self._trainer.global_step
        if not self._every or step - self._kept < (every or self._every):
            return
        self._kept, self.saves, strategy = step, True, self._trainer.strategy
        files, strategy.checkpoint_io = strategy.checkpoint_io, _Nowhere(strategy.checkpoint_io)
        if is_sharded := _has_shards(strategy):
            strategy.save_checkpoint = lambda *arguments, **options: None
        try:
            # All ranks meet in it, those with a full memory too.
            self._trainer.save_checkpoint(self._directory / "memory", weights_only=False)
        finally:
            strategy.checkpoint_io, self.saves = files, False
            if is_sharded:
                del strategy.save_checkpoint
        checkpoint, self.checkpoint = self.checkpoint, None
        if not self._refused and checkpoint is not None:
            self._save(step, checkpoint)

    def _save(self, step: int, checkpoint: dict[str, Any]) -> None:
        try:
            is_sharded = _has_shards(self._trainer.strategy)
            shards: dict[str, Any] = {name: checkpoint.pop(name, None) if is_sharded else None for name in _SHARDED}
            packed = _packed(checkpoint)
            if not self._tried:
                _unpacked(**packed)
            self._tried = True
            snapshot.save(step, output=_path(self._directory), **{**packed, **shards})
        except (snapshot.OutOfMemoryError, TypeError, ValueError, AttributeError, pickle.PickleError) as error:
            self._refused = True
            _tell(str(error).partition("\n")[0])


def _tell(reason: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        _log.warning("no snapshots are taken, a lost node costs the steps since the last checkpoint: %s", reason)


def last_checkpoint(directory: str | Path) -> str | None:
    """Return the newest checkpoint for `fit(ckpt_path=...)`, None if there is none; call it on all ranks.

    That is the one in the memory of the agents, if `ElasticCallback` has put one there: a name for it, which the
    callback has Trainer understand. Else it is the newest ``*.ckpt`` in the directory.
    """
    global _resumes
    _resumes = _path(directory)
    paths = Path(directory).glob("*.ckpt")
    on_disk = max(paths, key=lambda path: path.stat().st_mtime, default=None)
    try:
        output, size, rest, tensors = snapshot.load(output=None, size=None, rest=None, tensors=None)
    except KeyError:
        # The script takes snapshots of its own.
        _resumes = output = ""
    if output != _path(directory):
        return None if on_disk is None else str(on_disk)
    checkpoint = _unpacked(size, rest, tensors)
    if on_disk is not None and _step_of(on_disk) > checkpoint["global_step"]:
        return str(on_disk)
    _newest[name := f"step {checkpoint['global_step']}, in the memory of the agents"] = checkpoint
    return name


def _path(directory: str | Path) -> str:
    return str(Path(directory).expanduser().absolute())


def _step_of(path: Path) -> int:
    """Return the step of a checkpoint on disk; -1 if it has objects of the user's, and cannot be read without them."""
    with contextlib.suppress(Exception):
        return int(torch.load(path, map_location="meta", mmap=True, weights_only=True)["global_step"])
    return -1


def _packed(checkpoint: dict[str, Any]) -> dict[str, Any]:
    tensors: list[torch.Tensor] = []
    buffer = io.BytesIO()
    torch.save(_without_tensors(checkpoint, tensors), buffer)
    rest = torch.zeros(-(-buffer.tell() // _PAGE) * _PAGE, dtype=torch.uint8)
    rest[: buffer.tell()] = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    # The size may differ between ranks: tensors do, plain values of a snapshot do not.
    return {"size": torch.tensor(buffer.tell()), "rest": rest, "tensors": tensors}


def _unpacked(size: torch.Tensor, rest: torch.Tensor, tensors: list[torch.Tensor]) -> dict[str, Any]:
    buffer = io.BytesIO(bytes(rest[: int(size)].tolist()))
    checkpoint: dict[str, Any] = _with_tensors(torch.load(buffer, weights_only=True), tensors)
    return checkpoint


def _without_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a value with the index of each tensor, in a set of one, in its place; append the tensors."""
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return {len(tensors) - 1}
    if isinstance(value, dict):
        return {key: _without_tensors(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(item, tensors) for item in value)
    if isinstance(value, set):
        raise TypeError(f"a checkpoint with a set ({value!r}) cannot be kept in memory")
    return value


def _with_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, set):
        return tensors[value.pop()]
    if isinstance(value, dict):
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_tensors(item, tensors) for item in value)
    return value
