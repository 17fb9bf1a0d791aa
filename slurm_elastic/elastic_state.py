"""One object for a training script: what comes back after a restart, and what is done after each step.

It stands on `slurm_elastic.trainer`, `slurm_elastic.snapshot` and `slurm_elastic.data`, for scripts that want less, or
more. The integrations share with it who saves and stops in a process, and how a worker ends.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import itertools
import json
import logging
import operator
import os
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from slurm_elastic import snapshot, trainer
from slurm_elastic.data import ElasticSampler, own_place
from slurm_elastic.snapshot.hand_over import round_store
from slurm_elastic.snapshot.state import flatten, is_stateful, state_of

if TYPE_CHECKING:
    from typing import TextIO

__all__ = ["ElasticState"]

_Batch = TypeVar("_Batch")

_OWN = "elastic"
"""Name of the object's own values in a snapshot."""
_MEETING = timedelta(minutes=5)
"""For ranks that come to the object later than others."""
_SAVING = timedelta(minutes=30)
"""For ranks that still save; the time after which torch gives up a collective."""
_claimed = ""
"""What saves and stops in this process."""

logger = logging.getLogger("slurm_elastic")


class ElasticState:
    """The state of a training, and its loop.

    ::

        sampler = ElasticSampler(data_set, global_batch_size=256)
        loader = DataLoader(data_set, batch_sampler=sampler)
        state = ElasticState(model=model, optimizer=optimizer, sampler=sampler, best=0.0)
        for epoch in state.epochs(10):
            for images, labels in state.batches(loader):
                loss = cross_entropy(model(images), labels)
                optimizer.zero_grad()
                state.mean(loss).backward()
                optimizer.step()
                state.report(loss=loss)
            state.best = max(state.best, accuracy(model))

    When it is made, the state comes back from the memory of the agents, else from the newest checkpoint, else it stays
    as it is. After each step it is copied into that memory, and now and then to disk; where the agents have agreed to
    stop, the worker ends with 0 then, and the next round goes on from there. Under plain python and torchrun there
    are checkpoints only. One object per process, made on every rank.

    Values that are no objects become attributes, as `best` here. They are the same on all ranks. For type checkers
    declare them in a subclass: ``class Training(ElasticState): best: float``.
    """

    def __init__(
        self,
        *,
        sampler: ElasticSampler | None = None,
        checkpoints: str | os.PathLike[str] | None = None,
        checkpoint_every: float = 600.0,
        checkpoint_every_steps: int | None = None,
        keep: int = 2,
        snapshot_every: int = 1,
        reseed: bool = True,
        **state: object,
    ) -> None:
        """Bring the state back.

        Args:
            sampler: Deals the samples; without one, the loops skip the batches that were taken before a restart.
            checkpoints: Directory that all nodes see. Unless it is given, that of the run has one; outside of a run
                nothing is written then.
            checkpoint_every: Seconds between checkpoints. The newest state is also written before the agent or, outside
                of a run, the script ends.
            checkpoint_every_steps: Steps between checkpoints, if they are over before those seconds.
            keep: Number of checkpoints that stay.
            snapshot_every: Steps between copies into memory; a lost node costs as many.
            reseed: True to seed torch, random and numpy before each batch by torch's seed at the first start, rank and
                step, so that a restart changes no random number; False to leave them alone.
            **state: By name, what has to come back: objects with `state_dict` and `load_state_dict`, such as models,
                also in DistributedDataParallel or sharded by FSDP2, optimizers and schedulers; or plain values:
                numbers, strings, bytes, tensors, and dicts, lists and tuples of them.

        Raises:
            TypeError: Something cannot be saved, or has the wrong type; the message names it.
            ValueError: A number is too small.
            KeyError: What is in memory or on disk has no state of a name.
            RuntimeError: There is another such object, or a rank has none, or the state cannot be had.
        """
        _require_types(sampler, checkpoint_every, checkpoint_every_steps, snapshot_every)
        for name in state:
            if name in (_OWN, "per_rank", "check_finite") or hasattr(type(self), name):
                raise TypeError(f"ElasticState has a {name} of its own: give yours another name")
        if sampler is not None:
            state = {**state, "sampler": sampler}
        objects = {name: value for name, value in state.items() if is_stateful(value)}
        self._rank, self._world_size = own_place()
        for name, value in objects.items():
            if self._world_size > 1 and _is_loader(value):
                raise TypeError(
                    f"{name} is a {type(value).__name__}, whose state is that of one rank: give it to batches() only"
                )
        self._given, self._sampler = objects, sampler
        self._objects = {name: _unwrapped(value) for name, value in objects.items()}
        self._values = {name: value for name, value in state.items() if name not in objects}
        self._reseeds, self._seed = reseed, torch.initial_seed() % 2**63
        self._snapshot_every = snapshot_every
        self._steps = self._epoch = self._taken = 0
        self._stopped = self._in_epoch = self._warned = False
        # What an agent would refuse is refused without one, too.
        flatten(state_of(self._saved()))
        claim("ElasticState")
        if self._world_size > 1 and "SLURM_ELASTIC_ROUND" in os.environ:
            self._meet()
        run_dir = trainer.start_info().run_dir
        if checkpoints is None and run_dir:
            checkpoints = Path(run_dir, "checkpoints")
        self._metrics: TextIO | None = None
        if checkpoints is not None:
            snapshot.to_disk(checkpoints, every=checkpoint_every, keep=keep, every_steps=checkpoint_every_steps)
        self._restore()
        self._snapshot_step = self._steps
        if checkpoints is not None and self._rank == 0:
            self._metrics = Path(checkpoints, "metrics.jsonl").open("a", buffering=1)  # noqa: SIM115 (until the end)
        trainer._await_first(by_script=True)

    if not TYPE_CHECKING:
        # Type checkers know what a subclass declares.
        def __getattr__(self, name):
            for held in ("_values", "_given"):
                if name in self.__dict__.get(held, ()):
                    return self.__dict__[held][name]
            raise AttributeError(f"ElasticState has no {name}: give it ElasticState({name}=...)")

        def __setattr__(self, name, value):
            if name in self.__dict__.get("_values", ()):
                self._values[name] = value
            elif name.startswith("_"):
                super().__setattr__(name, value)
            else:
                raise AttributeError(f"ElasticState has no value {name} to set: give it ElasticState({name}=...)")

    @property
    def steps(self) -> int:
        """Steps over all epochs and restarts; in a loop over `batches`, with the present one."""
        return self._steps

    @property
    def epoch(self) -> int:
        """The present epoch, from 0."""
        return self._epoch

    def epochs(self, number: int) -> Iterator[int]:
        """Yield the present epoch and those after it, while they are less than `number`.

        What the body does after its batches, such as an evaluation or a step of a scheduler, belongs to the epoch: its
        last step is saved after that, so that no restart leaves it out.
        """
        number = operator.index(number)
        while self._epoch < number and not self._stopped:
            if self._sampler is not None:
                self._sampler.set_epoch(self._epoch)
            self._reseed(self._steps, self._rank)
            self._in_epoch = True
            try:
                yield self._epoch
            finally:
                self._in_epoch = False
            self._epoch, self._taken = self._epoch + 1, 0
            if self._sampler is not None:
                self._sampler.set_epoch(self._epoch)
            if self._steps != self._snapshot_step:
                self._finish()

    def batches(self, loader: Iterable[_Batch], *, skip: bool = True) -> Iterator[_Batch]:
        """Yield what is left of an epoch, and finish a step after each batch.

        The body makes one step of its optimizer. `break` leaves the loop, and the batch counts as taken.

        Args:
            loader: With ``batch_sampler=sampler``, if there is one. Another is taken from its beginning, and batches
                that were taken before a restart are skipped: those of the whole group, divided among the ranks.
            skip: False if the loader begins at the right place by itself.
        """
        dealt = self._sampler is not None
        other = getattr(loader, "batch_sampler", self._sampler)
        if other is not self._sampler and (dealt or isinstance(other, ElasticSampler)):
            raise TypeError(
                "the loader and ElasticState have different samplers: DataLoader(data_set, batch_sampler=sampler) and"
                " ElasticState(sampler=sampler)"
            )
        set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
        if not dealt and set_epoch is not None:
            set_epoch(self._epoch)
        length = operator.length_hint(loader)
        # A loader that shuffles draws its order with its first batch, and all ranks may have to draw the same.
        self._reseed(f"epoch {self._epoch}", self._rank if dealt else 0)
        trainer._await_first(by_script=False)
        iterator = iter(trainer.loading(iter(loader)))
        at = 0
        if skip and not dealt and id(loader) not in map(id, self._given.values()):
            at = self._taken // self._world_size
            for _ in itertools.islice(iterator, at):
                pass
        while True:
            if dealt or at:
                self._reseed(self._steps, self._rank)
            try:
                batch = next(iterator)
            except StopIteration:
                return
            at += 1
            self._steps += 1
            yield batch
            self._end_step(is_last=at == length)
            if self._stopped:
                return

    def step(self) -> None:
        """Finish a step in a loop of the script's own, after that of the optimizer; `batches` does it by itself."""
        self._steps += 1
        self._end_step(is_last=False)
        self._reseed(self._steps, self._rank)

    def stop(self) -> None:
        """End both loops after this step, as for an early stop, for restarts, too; all ranks call it."""
        self._stopped = True

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss for backward: its gradient, averaged over the ranks, is that of the mean over all samples.

        That is the loss itself where each rank has as many samples of the step, as in most.

        Args:
            loss: The mean over the samples of this rank, or one loss for each.
        """
        loss = loss.mean()
        return loss if self._sampler is None else loss * (self._sampler.share * self._sampler.weight)

    def report(self, metrics: Mapping[str, SupportsFloat] | None = None, /, **more: SupportsFloat) -> None:
        """Report numbers of the present step.

        Status and metrics of the agent show the `loss` of rank 0. Beside the checkpoints, `metrics.jsonl` has all that
        rank 0 reports, a line for each call; of a step that is there twice the later line counts.

        Args:
            metrics: Numbers, or tensors with one element, by name. The call waits for those on a device.
            **more: The same.

        Raises:
            TypeError: One is no number.
        """
        numbers = {name: _number(name, value) for name, value in {**(metrics or {}), **more}.items()}
        if "loss" in numbers:
            trainer.report(self._steps, loss=numbers["loss"])
        if self._metrics is not None:
            round_ = trainer.start_info().round
            self._metrics.write(
                json.dumps({"step": self._steps, "epoch": self._epoch, "round": round_, **numbers}) + "\n"
            )

    def _end_step(self, *, is_last: bool) -> None:
        sampler = self._sampler
        self._taken += self._world_size
        if sampler is not None:
            self._warn_of_shares(sampler)
            sampler.step()
            is_last = sampler.consumed >= sampler.size
        # The script has yet to finish the epoch.
        if not (is_last and self._in_epoch):
            self._finish()

    def _finish(self) -> None:
        """Save, and end the worker if the agents have agreed on this step."""
        is_saved = self._steps - self._snapshot_step >= self._snapshot_every
        if is_saved:
            self._save()
        if trainer.should_stop(self._steps):
            if not is_saved:
                self._save()
            end_worker()

    def _save(self) -> None:
        with trainer._time_counts("saving"):
            snapshot.save(self._steps, **self._saved())
        self._snapshot_step = self._steps

    def _saved(self) -> dict[str, Any]:
        own = {
            "steps": self._steps,
            "epoch": self._epoch,
            "taken": self._taken,
            "stopped": self._stopped,
            # A tensor may differ between ranks, as the seeds of some scripts do.
            "seed": torch.tensor(self._seed),
        }
        return {**self._objects, **self._values, _OWN: own}

    def _restore(self) -> None:
        state = self._saved()
        with trainer._time_counts("restoring"):
            plain = snapshot.load(**state)
        names = [name for name in state if name not in self._objects]
        restored = dict(zip(names, plain if len(names) > 1 else (plain,), strict=True))
        own = restored.pop(_OWN)
        self._values = restored
        self._steps, self._epoch, self._taken, self._stopped = (
            own[name] for name in ("steps", "epoch", "taken", "stopped")
        )
        self._seed = int(own["seed"])

    def _meet(self) -> None:
        try:
            _wait_for_all("slurm_elastic/state", self._world_size, _MEETING)
        except dist.DistError:
            raise RuntimeError(
                f"rank {self._rank} waits for the ElasticState of the other {self._world_size - 1} ranks since"
                f" {_MEETING.total_seconds():g} s: make it on every rank, not only where the rank is 0"
            ) from None

    def _reseed(self, place: object, rank: int) -> None:
        if self._reseeds:
            reseed(self._seed, rank, place)

    def _warn_of_shares(self, sampler: ElasticSampler) -> None:
        if self._warned or sampler.weighted or sampler.share * sampler.world_size == sampler.step_size:
            return
        self._warned = True
        if self._rank == 0:
            logger.warning(
                "step %d has %d samples for %d ranks: call state.mean(loss).backward(), so that each sample counts"
                " the same",
                *(self._steps, sampler.step_size, sampler.world_size),
            )


def reseed(seed: int, rank: int, place: object) -> None:
    """Seed torch, random and numpy by a seed of the training, the rank, and the place in the training."""
    text = f"{seed}/{rank}/{place}".encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
    # Not torch.manual_seed, which is slow where there is no GPU.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def _require_types(sampler: object, checkpoint_every: object, every_steps: object, snapshot_every: int) -> None:
    for name, value, kind, fix in (
        ("sampler", sampler, ElasticSampler | None, "ElasticSampler(data_set, global_batch_size=...), or none"),
        ("checkpoint_every", checkpoint_every, int | float, "seconds"),
        ("checkpoint_every_steps", every_steps, int | None, "steps"),
        ("snapshot_every", snapshot_every, int, "steps"),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{name} is a {type(value).__name__}: give {fix}")
    if snapshot_every < 1:
        raise ValueError(f"snapshot_every={snapshot_every}: a snapshot is taken after 1 step or more")


def _number(name: str, value: object) -> float:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise TypeError(f"{name} is a tensor of shape {tuple(value.shape)}: report one number, such as its mean()")
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"{name} is a {type(value).__name__}: report a number")
    return float(value.item() if isinstance(value, torch.Tensor) else value)


def _is_loader(value: object) -> bool:
    stateful = (ElasticSampler, torch.nn.Module, torch.optim.Optimizer)
    return hasattr(value, "__iter__") and not isinstance(value, stateful)


def _unwrapped(value: object) -> object:
    # So that a checkpoint is the same with and without it.
    return value.module if isinstance(value, DistributedDataParallel) else value


def claim(owner: str) -> None:
    """Note what saves and stops in this process: a second one would count the steps twice.

    Raises:
        RuntimeError: There is another one.
    """
    global _claimed
    if "ElasticState" in (owner, _claimed) and _claimed:
        raise RuntimeError(
            f"this process has an {_claimed} and gets an {owner}: one object counts, saves and stops; give it all state"
        )
    _claimed = owner
    trainer._await_first(by_script=False)


def tell_no_snapshots(reason: object) -> None:
    """Log, once per node, why an integration takes no snapshots."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        logger.warning("no snapshots are taken, a lost node costs the steps since the last checkpoint: %s", reason)


def end_worker() -> None:
    """End this process with 0, when all ranks are here: rank 0 has written its checkpoint by then.

    What the script does after its training, such as an evaluation, is left to the round that finishes it.

    Raises:
        SystemExit: always.
    """
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() > 1:
            _wait_for_all("slurm_elastic/end", dist.get_world_size(), _SAVING)
        # Not now: on its way out a framework still uses its models (lightning 2.6, DDPStrategy.teardown).
        atexit.register(_end_process_group)
    sys.exit(0)


def _wait_for_all(key: str, world_size: int, timeout: timedelta) -> None:
    """Wait at the store of the round until all ranks are here.

    `dist.barrier` would do, but it holds on to the tensors of the collective before, see `_end_process_group`.

    Raises:
        DistError: The time is over, or there is no store.
    """
    store = round_store(timeout)
    # A round has a store of its own.
    if store.add(key, 1) == world_size:
        store.set(f"{key}/all", "")
    store.wait([f"{key}/all"], timeout)


def _end_process_group() -> None:
    """End the process group without waiting for gloo's threads with the GIL: no DistributedDataParallel keeps it.

    gloo's thread needs the GIL to free the tensors of its last collective, and ~ProcessGroupGloo waits for that thread.
    The last Python reference to a process group releases the GIL for that (IntrusivePtrNoGilDestructor), but a Reducer
    that owns it last does not (~Reducer, seen in torch 2.13): where the thread gets no processor until then, the worker
    hangs at its end.
    """
    for each in gc.get_objects():
        # isinstance would ask proxy objects for their class.
        if issubclass(type(each), DistributedDataParallel):
            # The logger owns the reducer, too.
            each.logger = each.reducer = each.process_group = None
    if dist.is_initialized():
        dist.destroy_process_group()
