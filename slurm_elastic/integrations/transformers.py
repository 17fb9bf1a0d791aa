"""Transformers: a Trainer that saves and stops at one step, and keeps its batch when the number of ranks changes.

docs/howto/frameworks.md has an example. Read in transformers 5.23.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sized
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.utils import WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from slurm_elastic import snapshot, trainer
from slurm_elastic.data import batch_plan
from slurm_elastic.elastic_state import claim, end_worker, reseed, tell_no_snapshots

__all__ = ["ElasticCallback", "batch_arguments", "last_checkpoint"]

_log = logging.getLogger(__name__)

_FILES = {"model": WEIGHTS_NAME, "optimizer": OPTIMIZER_NAME, "scheduler": SCHEDULER_NAME, "scaler": SCALER_NAME}
"""Of a checkpoint, by the name of a state in a snapshot."""
_NAMES = ("output", "trainer", "history", "numbers", "shards")
_RANKS_OWN = {"is_local_process_zero": False, "is_world_process_zero": False}
"""What TrainerState has of a rank: the same on all of them in a snapshot, and set anew by Trainer."""
_resumes = ""
"""The directory for which `last_checkpoint` has looked for a snapshot."""
_to_load: int | None = None
"""The step of a sharded snapshot that it has found: each rank loads its shards when Trainer has made them."""
_files = contextlib.ExitStack()
"""The files that it has made, which are freed when Trainer has read them."""
atexit.register(_files.close)


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
    """Return the newest complete checkpoint, None if there is none; call it on all ranks.

    That is the snapshot in the memory of the agents, if `ElasticCallback` has taken one since: as files in memory, for
    this process alone. They have no weights of a sharded model, of which the callback loads the shards. On disk Trainer
    writes a checkpoint into its final directory, `trainer_state.json` last. One that a lost node has left unfinished
    lacks it; `get_last_checkpoint` of transformers would take it all the same.
    """
    paths = [path for path in Path(output_dir).glob("checkpoint-*") if path.name.rpartition("-")[2].isdecimal()]
    paths.sort(key=_step_of, reverse=True)
    on_disk = next((path for path in paths if _is_complete(path)), None)
    state = _snapshot_for(_path(output_dir))
    if state is not None and (on_disk is None or _step_of(on_disk) <= state["trainer"]["global_step"]):
        return _in_memory(state)
    return None if on_disk is None else str(on_disk)


def _path(output_dir: str | Path) -> str:
    return str(Path(output_dir).expanduser().absolute())


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _snapshot_for(output_dir: str) -> dict[str, Any] | None:
    """Return the state that the round starts from; None if there is none, or if it is not that of this training."""
    global _resumes
    _resumes = output_dir
    try:
        found = dict(zip(_NAMES, snapshot.load(**dict.fromkeys(_NAMES)), strict=True))
    except KeyError:
        # The script takes snapshots of its own.
        _resumes = ""
        return None
    if found["output"] != output_dir:
        return None
    numbers = iter(found["numbers"].tolist())
    history = [
        {name: next(numbers) if value is None else value for name, value in entry.items()}
        for entry in json.loads(found["history"])
    ]
    return {**found, "trainer": {**json.loads(found["trainer"]), "log_history": history}}


def _in_memory(state: Mapping[str, Any]) -> str:
    """Return a directory for Trainer, whose large files are memory of this process."""
    global _to_load
    directory = Path(tempfile.mkdtemp(prefix="slurm-elastic-"))
    _files.callback(shutil.rmtree, directory, ignore_errors=True)
    names = list(_FILES)
    if state["shards"] is not None:
        # An index of a file without any weights, for Trainer to find all of them there.
        names, _to_load = ["scheduler", "scaler"], state["trainer"]["global_step"]
        (directory / WEIGHTS_INDEX_NAME).write_text(json.dumps({"weight_map": dict.fromkeys(state["shards"], "none")}))
        torch.save({}, directory / "none")
    for name, content in zip(names, snapshot.load(**dict.fromkeys(names)), strict=True):
        if content is not None:
            descriptor = os.memfd_create(_FILES[name])
            _files.callback(os.close, descriptor)
            (directory / _FILES[name]).symlink_to(f"/proc/self/fd/{descriptor}")
            torch.save(content, directory / _FILES[name])
    (directory / TRAINER_STATE_NAME).write_text(json.dumps(state["trainer"]))
    return str(directory)


def _is_complete(checkpoint: Path) -> bool:
    try:
        return "global_step" in json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
    except (OSError, ValueError):
        return False


def _is_sharded(model: torch.nn.Module) -> bool:
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())


def _obstacle(args: TrainingArguments, model: torch.nn.Module) -> str:
    """Return what has state besides the arguments of a callback, or on ranks alone; nothing if they have all of it."""
    state = AcceleratorState()
    kind = str(state.distributed_type.value)
    if kind == "FSDP" and not state.is_fsdp2:
        return "FSDP1 has no names for its shards; fsdp_config={'version': 2} has"
    if kind != "FSDP" and not kind.startswith(("NO", "MULTI_")):
        return f"{kind} has the state"
    if _is_sharded(model) and hasattr(model, "peft_config"):
        return "a sharded model with adapters (PEFT) is not read from memory by Trainer"
    for name in ("auto_find_batch_size", "restore_callback_states_from_checkpoint"):
        if getattr(args, name):
            return f"{name} is set"
    return ""


class ElasticCallback(TrainerCallback):
    """Asks after every optimizer step whether to stop; then Trainer saves, and the worker ends when training has.

    It also reports the checkpoints that Trainer writes, and the losses that Trainer logs. Where all ranks have the
    whole model, or its shards by FSDP2, it copies the state into the memory of the agents, for `last_checkpoint` in the
    next round.
    """

    def __init__(self, *, snapshot_every: int = 1, reseed: bool = True) -> None:
        """Note what is copied.

        Args:
            snapshot_every: Steps between copies into memory; a lost node costs as many. 0 for none.
            reseed: True to seed torch, random and numpy before each step by the seed of TrainingArguments, rank and
                step, so that a restart changes no random number; False to leave them alone.
        """
        self._stop: trainer.Stop | None = None
        self._logged = self._kept = 0
        self._snapshot_every, self._reseeds = snapshot_every, reseed
        self._history: tuple[int, str, torch.Tensor] = 0, "[]", torch.zeros(0)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Say so if Trainer goes on at another place of its data than the checkpoint was at."""
        global _to_load
        claim("ElasticCallback")
        self._logged = self._kept = state.global_step
        if not trainer.is_managed() or _resumes != _path(args.output_dir):
            self._snapshot_every = 0
        if self._snapshot_every and (obstacle := _obstacle(args, kwargs["model"])):
            self._snapshot_every = 0
            tell_no_snapshots(obstacle)
        if state.global_step and state.global_step == _to_load:
            snapshot.load(model=kwargs["model"], optimizer=kwargs["optimizer"], scheduler=kwargs["lr_scheduler"])
        _to_load = None
        if not args.auto_find_batch_size:
            _files.close()
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

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Seed what orders the data: the same on all ranks."""
        self._keep(args, state, kwargs)
        if self._reseeds:
            reseed(args.seed, 0, f"epoch {int(state.epoch or 0)}")

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Copy the state after the step before: Trainer has logged, evaluated and saved by now."""
        self._keep(args, state, kwargs)
        if self._reseeds:
            reseed(args.seed, args.process_index, state.global_step)

    def _keep(self, args: TrainingArguments, state: TrainerState, kwargs: Mapping[str, Any], every: int = 0) -> None:
        every = every or self._snapshot_every
        if not self._snapshot_every or state.global_step - self._kept < every:
            return
        self._kept = state.global_step
        try:
            snapshot.save(state.global_step, output=_path(args.output_dir), **self._state(state, **kwargs))
        except (snapshot.OutOfMemoryError, TypeError, ValueError) as error:
            self._snapshot_every = 0
            tell_no_snapshots(error)

    def _state(
        self, state: TrainerState, *, model: Any, optimizer: Any, lr_scheduler: Any, **_: object
    ) -> dict[str, Any]:
        plain = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
        # The rank that saves notes states of callbacks there, which no other has; only their names have to come back.
        plain["stateful_callbacks"] = {name: type(each)() for name, each in state.stateful_callbacks.items()}
        entries, before = plain.pop("log_history"), self._history
        if len(entries) != before[0]:
            # Ranks measure different times.
            shapes = [{name: None if isinstance(v, float) else v for name, v in entry.items()} for entry in entries]
            numbers = [value for entry in entries for value in entry.values() if isinstance(value, float)]
            self._history = len(entries), json.dumps(shapes), torch.tensor(numbers, dtype=torch.float64)
        scaler, weights = getattr(optimizer, "scaler", None), model.state_dict()
        return {
            "trainer": json.dumps({**plain, **_RANKS_OWN}),
            "history": self._history[1],
            "numbers": self._history[2],
            "shards": list(weights) if _is_sharded(model) else None,
            "model": weights,
            "optimizer": optimizer.state_dict(),
            "scheduler": lr_scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
        }

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
        """Tell the agent of the checkpoint, and have the same in memory."""
        self._keep(args, state, kwargs, every=1)
        if state.is_world_process_zero:
            trainer.report_checkpoint(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the worker: what the script does after its training is not for a run that goes on."""
        if self._stop:
            end_worker()
