"""Lightning: a Trainer that saves and stops at one step.

::

    from slurm_elastic.integrations.lightning import ElasticCallback, elastic_world, last_checkpoint

    trainer = Trainer(**elastic_world(), callbacks=[ElasticCallback(), ModelCheckpoint("out", save_last=True)])
    trainer.fit(model, loader, ckpt_path=last_checkpoint("out"))

Read in lightning 2.6. It does not requeue Slurm jobs here, since it detects TorchElasticEnvironment first.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from slurm_elastic import trainer as elastic
from slurm_elastic._ending import claim, end_worker
from slurm_elastic.data import ElasticSampler
from slurm_elastic.elastic_state import reseed
from slurm_elastic.integrations._lightning_memory import Memory, last_checkpoint, read_from_memory
from slurm_elastic.integrations._lightning_world import elastic_world, require_world

__all__ = ["ElasticCallback", "elastic_world", "last_checkpoint"]


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
        self._memory: Memory | None = None
        self._step = -1
        self._saved: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that Lightning knows the world, before it reads its checkpoint."""
        claim("ElasticCallback")
        require_world(trainer.num_devices, trainer.num_nodes)
        read_from_memory(trainer.strategy)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take Lightning's handler of SIGTERM away: it broadcasts from within the handler, and hangs where one rank
        got the signal and the others did not."""
        self._step = trainer.global_step
        self._memory = Memory(trainer, _directory(trainer), self._snapshot_every if elastic.is_managed() else 0)
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
