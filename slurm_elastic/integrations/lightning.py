"""Lightning: a Trainer that saves and stops at one step; docs/howto/frameworks.md has an example.

Read in lightning 2.6. It does not requeue Slurm jobs here, since it detects TorchElasticEnvironment first.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from slurm_elastic import snapshot
from slurm_elastic import trainer as elastic
from slurm_elastic.data import ElasticSampler
from slurm_elastic.elastic_state import claim, end_worker, reseed, tell_no_snapshots
from slurm_elastic.integrations.fabric import elastic_world, require_world
from slurm_elastic.snapshot.state import flatten, rebuild

__all__ = ["ElasticCallback", "elastic_world", "last_checkpoint"]

_SHARDED = ("state_dict", "optimizer_states")
"""What of a checkpoint is sharded."""
_PAGE = 4096
"""The bytes without the tensors are filled up to a multiple of this: the next step finds a place of its size."""
_resumes = ""
"""The directory for which `last_checkpoint` has looked for a snapshot."""
_newest: dict[str, dict[str, Any]] = {}
"""The checkpoint that it has found in memory, by the name that Trainer has for it, until Trainer has read it."""


class ElasticCallback(Callback):
    """Asks after every optimizer step whether to stop; then it saves `last.ckpt`, and the worker ends.

    It also reports the checkpoints that others write, as ModelCheckpoint does. Where all ranks have the whole model,
    or its shards by ModelParallelStrategy, and the script takes its checkpoint from `last_checkpoint`, it copies the
    state into the memory of the agents.

    The checkpoint is where the first ModelCheckpoint writes, else in the trainer's `default_root_dir`; for
    `fit(ckpt_path="last")` ModelCheckpoint needs a directory that is the same at every start.
    """

    def __init__(self, sampler: ElasticSampler | None = None, *, snapshot_every: int = 1, reseed: bool = True) -> None:
        """Note the sampler.

        Args:
            sampler: the batch sampler of the training's loader: its position is kept in every checkpoint. Without one
                Lightning takes an epoch that was interrupted from its beginning, and ends it early.
            snapshot_every: Steps between copies into memory; a lost node costs as many. 0 for none.
            reseed: True to seed torch, random and numpy before each batch by the seed of `seed_everything`, rank and
                step, so that a restart changes no random number; False to leave them alone.
        """
        self._sampler, self._snapshot_every, self._reseeds = sampler, snapshot_every, reseed
        self._memory: _Memory | None = None
        self._step = -1
        self._saved: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that Lightning knows the world, before it reads its checkpoint."""
        claim("ElasticCallback")
        require_world(trainer.num_devices, trainer.num_nodes)
        _read_from_memory(trainer.strategy)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take Lightning's handler of SIGTERM away: it broadcasts from within the handler, and hangs where one rank
        got the signal and the others did not."""
        self._step = trainer.global_step
        self._memory = _Memory(trainer, _directory(trainer), self._snapshot_every if elastic.is_managed() else 0)
        if self._sampler is not None:
            # Of a checkpoint after the last batch of an epoch, Lightning begins the next one without a call of
            # on_train_epoch_start (FitLoop.on_advance_start).
            self._sampler.set_epoch(trainer.current_epoch)
        if elastic.is_managed():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have the sampler deal this epoch."""
        if self._sampler is not None:
            self._sampler.set_epoch(trainer.current_epoch)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Note the step: the checkpoint is about to be written."""
        if self._memory is not None and self._memory.saves:
            self._memory.checkpoint = checkpoint
        else:
            self._saved = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Copy the state after the step before: Lightning has logged, validated and saved by now.

        Report the checkpoint that was written since then.
        """
        if self._memory is not None:
            self._memory.keep()
        seed = os.environ.get("PL_GLOBAL_SEED")
        if self._reseeds and seed is not None:
            reseed(int(seed), trainer.global_rank, f"{trainer.global_step} {batch_idx}")
        if self._saved is not None and trainer.is_global_zero:
            elastic.report_checkpoint(self._saved)
        self._saved = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ask, save and stop, unless gradients are being accumulated."""
        if self._sampler is not None:
            self._sampler.step()
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if not elastic.should_stop(self._step):
            return
        if self._memory is not None:
            self._memory.keep(every=1)
        trainer.save_checkpoint(_directory(trainer) / "last.ckpt")
        if trainer.is_global_zero:
            elastic.report_checkpoint(self._step)
        # Not by `trainer.should_stop`: Lightning would take the epoch for finished, validate, and have ModelCheckpoint
        # save that as the newest checkpoint.
        end_worker()

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's position."""
        return {} if self._sampler is None else {"sampler": self._sampler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at the sampler's position."""
        if self._sampler is not None and "sampler" in state_dict:
            self._sampler.load_state_dict(state_dict["sampler"])


def _directory(trainer: Trainer) -> Path:
    return Path(getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir)


# A checkpoint in the memory of the agents. Its tensors go into a snapshot as they are, and all else, which may differ
# between ranks, as the bytes of a file of torch.save. Trainer writes and reads it by methods of its strategy,
# which give way to ours meanwhile, so that no file is touched.
def _read_from_memory(strategy: Strategy) -> None:
    """Have a trainer read what `last_checkpoint` has found in memory; called before it reads its checkpoint."""
    if not _newest:
        return
    read = strategy.load_checkpoint

    def load(path: Any, *arguments: Any, **options: Any) -> Any:
        checkpoint = _newest.pop(str(path), None)
        if checkpoint is None:
            return read(path, *arguments, **options)
        return _with_shards(strategy, checkpoint) if _has_shards(strategy) else checkpoint

    strategy.load_checkpoint = load


def _has_shards(strategy: Strategy) -> bool:
    return isinstance(strategy, ModelParallelStrategy) and strategy._save_distributed_checkpoint


def _with_shards(strategy: Strategy, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Load this rank's shards into the model and its optimizers, as `ModelParallelStrategy.load_checkpoint` does."""
    model, optimizers = strategy.model, strategy.optimizers
    present = get_model_state_dict(model), [get_optimizer_state_dict(model, optimizer) for optimizer in optimizers]
    weights, states = snapshot.load(**dict(zip(_SHARDED, present, strict=True)))
    set_model_state_dict(model, weights)
    for optimizer, state in zip(optimizers, states, strict=True):
        set_optimizer_state_dict(model, optimizer, state)
    return checkpoint


class _Memory:
    """Copies the checkpoints of one training into the memory of the agents, each `every` steps; 0 for none."""

    def __init__(self, trainer: Trainer, directory: Path, every: int) -> None:
        self._every = every if _resumes == _path(directory) else 0
        # Strategies that write shards have a method of their own.
        is_whole = type(trainer.strategy).save_checkpoint is Strategy.save_checkpoint
        if self._every and not is_whole and not _has_shards(trainer.strategy):
            self._every = 0
            name = type(trainer.strategy).__name__
            tell_no_snapshots(
                f"{name} shows no shards, as ModelParallelStrategy(save_distributed_checkpoint=True) does"
            )
        self._trainer, self._directory, self._kept = trainer, directory, trainer.global_step
        self.checkpoint: dict[str, Any] | None = None
        """The checkpoint that Trainer makes; for the callback, which is given it on all ranks."""
        self.saves = False
        """True while Trainer makes one for the memory."""
        self._refused = self._tried = False

    def keep(self, every: int = 0) -> None:
        """Copy the state if `every` steps were taken since the last copy, 0 for the user's number; on all ranks."""
        step = self._trainer.global_step
        if not self._every or step - self._kept < (every or self._every):
            return
        self._kept, self.saves, strategy = step, True, self._trainer.strategy
        # The callback is given the checkpoint.
        strategy.save_checkpoint = lambda *arguments, **options: None
        try:
            # All ranks meet in it, those with a full memory too.
            self._trainer.save_checkpoint(self._directory / "memory", weights_only=False)
        finally:
            self.saves = False
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
            tell_no_snapshots(str(error).partition("\n")[0])


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
        output, *packed = snapshot.load(output=None, size=None, rest=None, tensors=None, sharded=None)
    except KeyError:
        # The script takes snapshots of its own.
        _resumes = output = ""
    if output != _path(directory):
        return None if on_disk is None else str(on_disk)
    checkpoint = _unpacked(*packed)
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
    # Hyperparameters may be what a snapshot does not hold, and torch reads back, as a torch.dtype.
    plain = {name: checkpoint.pop(name) for name in [*checkpoint] if name.endswith("hyper_parameters")}
    flat = flatten(checkpoint)
    buffer = io.BytesIO()
    torch.save([flat.tree, plain], buffer)
    rest = torch.zeros(-(-buffer.tell() // _PAGE) * _PAGE, dtype=torch.uint8)
    rest[: buffer.tell()] = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    # The size may differ between ranks: tensors do, plain values of a snapshot do not.
    return {"size": torch.tensor(buffer.tell()), "rest": rest, "tensors": flat.tensors, "sharded": flat.sharded}


def _unpacked(
    size: torch.Tensor, rest: torch.Tensor, tensors: list[torch.Tensor], sharded: list[torch.Tensor]
) -> dict[str, Any]:
    buffer = io.BytesIO(bytes(rest[: int(size)].tolist()))
    tree, plain = torch.load(buffer, weights_only=True)
    return {**rebuild(tree, tensors, sharded), **plain}
