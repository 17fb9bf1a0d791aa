"""Transformers: a Trainer that saves and stops at one step, and keeps its batch when the number of ranks changes.

::

    from slurm_elastic.integrations.transformers import ElasticCallback, batch_arguments, last_checkpoint

    args = TrainingArguments("out", **batch_arguments(global_batch=256, micro_batch=8), ...)
    trainer = Trainer(model, args, train_dataset=..., callbacks=[ElasticCallback()])
    trainer.train(resume_from_checkpoint=last_checkpoint("out"))

Read in transformers 5.23.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sized
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from slurm_elastic import trainer
from slurm_elastic._ending import claim, end_worker
from slurm_elastic.data import batch_plan

__all__ = ["ElasticCallback", "batch_arguments", "last_checkpoint"]

_log = logging.getLogger(__name__)


def batch_arguments(global_batch: int, micro_batch: int) -> dict[str, int]:
    """Return the arguments of TrainingArguments that make a step of `global_batch` samples in the world as it is.

    Trainer resumes by counting steps and batches (`_init_training_state`): the epoch, and what is skipped of it, are
    right in another world only if a step has the same number of samples there.

    Raises:
        ValueError: it does not divide; the message says what would.
    """
    plan = batch_plan(global_batch, micro_batch)
    return {"per_device_train_batch_size": plan.micro_batch, "gradient_accumulation_steps": plan.accumulation}


def last_checkpoint(output_dir: str | Path) -> str | None:
    """Return the newest complete checkpoint, None if there is none.

    Trainer writes a checkpoint into its final directory, `trainer_state.json` last. One that a lost node has left
    unfinished lacks it; `get_last_checkpoint` of transformers would take it all the same.
    """
    found = [path for path in Path(output_dir).glob("checkpoint-*") if path.name.rpartition("-")[2].isdecimal()]
    found.sort(key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    return next((str(path) for path in found if _is_complete(path)), None)


def _is_complete(checkpoint: Path) -> bool:
    try:
        return "global_step" in json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
    except (OSError, ValueError):
        return False


class ElasticCallback(TrainerCallback):
    """Asks after every optimizer step whether to stop; then Trainer saves, and the worker ends when training has.

    It also reports the checkpoints that Trainer writes, and the losses that Trainer logs.
    """

    def __init__(self) -> None:
        self._stop: trainer.Stop | None = None
        self._logged = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Say so if Trainer goes on at another place of its data than the checkpoint was at."""
        claim("ElasticCallback")
        self._logged = state.global_step
        loader = kwargs.get("train_dataloader")
        if not state.global_step or not state.epoch or not isinstance(loader, Sized):
            return
        steps = max(1, len(loader) // args.gradient_accumulation_steps)
        resumed = state.global_step / steps
        if abs(resumed - state.epoch) > 1.5 / steps and state.is_world_process_zero:
            _log.warning(
                "the checkpoint is at epoch %.3f, and Trainer goes on at %.3f: a step had another number of samples; "
                "keep it the same in every world by batch_arguments(global_batch=..., micro_batch=...)",
                state.epoch,
                resumed,
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Ask, and have Trainer save and stop after this step on all ranks."""
        self._stop = trainer.should_stop(state.global_step)
        if self._stop:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False
        return control

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Report the loss, which is the mean of all ranks over the steps since the last log or the start.

        A mean over fewer steps than at other times is left out, as it would differ from that of a run without a start
        between.
        """
        if logs is None or "loss" not in logs:
            return
        steps, self._logged = state.global_step - self._logged, state.global_step
        if steps >= state.logging_steps and state.is_world_process_zero:
            trainer.report(state.global_step, loss=logs["loss"])

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Keep Trainer from evaluating and saving once more on its way out."""
        if self._stop:
            control.should_save = control.should_evaluate = False
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Tell the agent of the checkpoint."""
        if state.is_world_process_zero:
            trainer.report_checkpoint(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the worker: what the script does after its training is not for a run that goes on."""
        if self._stop:
            end_worker()
