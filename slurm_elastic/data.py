"""Samples and batches of a training whose number of ranks changes: an epoch is dealt to the ranks that there are.

The batch size is that of the whole group, so a step trains on the same samples at any world size. docs/howto/data.md
has an example.
"""

from __future__ import annotations

import math
import operator
import os
import sys
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

__all__ = ["BatchPlan", "ElasticSampler", "batch_plan"]


class ElasticSampler(Sampler[list[int]]):
    """Deals the samples of an epoch to the ranks, one list of indices per step: a batch sampler for a DataLoader.

    The order of an epoch depends on seed and epoch alone. A step takes the next `batch_size` indices of it, divided
    among the ranks. Every index comes exactly once in an epoch, whatever happens to the world size in the middle of
    it. All ranks take the same number of steps; in the last one a rank may get fewer indices than the others. A rank
    that would get none gets one for which its `weight` is 0, as no collate function takes an empty list.

    `step` moves the position, not iteration: a loader may have drawn batches that are never trained on.

    Attributes:
        size: number of samples.
        epoch: the present one, from 0.
        consumed: samples of it that the group has trained on.
        rank, world_size: of this process.
        weighted: True if something has read `weight`.
    """

    def __init__(
        self,
        size: int | Sized,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        seed: int | None = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Deal from the beginning of the first epoch; `load_state_dict` goes on elsewhere.

        Args:
            size: the data set, or its number of samples, at least 1.
            batch_size: an older name of `global_batch_size`.
            global_batch_size: samples per step of the whole group, at least 1.
            seed: of the shuffle; None for the data set's own order.
            rank: this one's; that of the process group, else of the environment, unless given.
            world_size: the number of ranks, likewise.

        Raises:
            TypeError: the data set has no length, or there is not one batch size.
            ValueError: a number is too small.
        """
        own_rank, own_world_size = own_place()
        if isinstance(size, Sized):
            size = len(size)
        elif not hasattr(size, "__index__"):
            raise TypeError(
                f"{type(size).__name__} has no length: ElasticSampler(data_set_or_number, global_batch_size=...) deals"
                " samples by number; give a data stream to ElasticState.batches without a sampler"
            )
        if (batch_size is None) == (global_batch_size is None):
            raise TypeError("ElasticSampler needs global_batch_size=: the samples of a step, all ranks together")
        size, batch_size = operator.index(size), operator.index(global_batch_size or batch_size or 0)
        self.size, self.batch_size, self.seed, self.weighted = size, batch_size, seed, False
        self.rank = own_rank if rank is None else rank
        self.world_size = own_world_size if world_size is None else world_size
        self.epoch = self.consumed = 0
        self._order: torch.Tensor | None = None
        if size < 1 or batch_size < 1:
            raise ValueError(f"{size} samples in steps of {batch_size}: give at least 1 of both")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of a world of {self.world_size}: ranks are 0 to {self.world_size - 1}")

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's indices of each step that is left of the epoch."""
        # The position is copied: it moves while a loader prefetches. The order stays for `step`.
        if self.seed is None:
            order = torch.arange(self.size)
        else:
            order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        self._order = order
        for first in range(self.consumed, self.size, self.batch_size):
            step = order[first : first + self.batch_size]
            yield step[min(self.rank, len(step) - 1) :: self.world_size].tolist()

    def __len__(self) -> int:
        """Return the steps of a whole epoch, at any world size; frameworks count to it from the step they resume at."""
        return math.ceil(self.size / self.batch_size)

    @property
    def step_size(self) -> int:
        """Samples of the whole group in the step at the present position."""
        return min(self.batch_size, self.size - self.consumed)

    @property
    def share(self) -> int:
        """This rank's samples in that step that count: as many as its list has, or 0."""
        return len(range(self.rank, self.step_size, self.world_size))

    @property
    def weight(self) -> float:
        """The factor for the *sum* of this rank's losses in that step, before backward.

        DistributedDataParallel and FSDP divide the sum of all gradients by the world size; with this factor the result
        is the gradient of the mean over the samples of the whole group, also where ranks have different numbers.
        """
        self.weighted = True
        return self.world_size / self.step_size if self.share else 0.0

    def step(self) -> None:
        """Note that the group has trained on the step at the present position; all ranks call it equally often."""
        if self.consumed >= self.size:
            raise ValueError(f"epoch {self.epoch} has no step left: call next_epoch, or iterate over epochs()")
        # Not imported here: from its import on the agent expects calls of `should_stop`.
        trainer = sys.modules.get("slurm_elastic.trainer")
        if trainer is not None and self._order is not None:
            step = self._order[self.consumed : self.consumed + self.step_size]
            trainer.record_samples(self.epoch, step[self.rank :: self.world_size])
        self.consumed += self.step_size

    def next_epoch(self) -> None:
        """Go to the beginning of the next epoch."""
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, unless it is the present one; frameworks call it before each epoch."""
        if epoch != self.epoch:
            self.epoch, self.consumed = epoch, 0

    def epochs(self, number: int) -> Iterator[int]:
        """Yield the present epoch and those after it, while they are less than `number`, and move to each."""
        while self.epoch < number:
            yield self.epoch
            self.next_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the group, the same on all ranks: part of a checkpoint."""
        return {"size": self.size, "seed": self.seed, "epoch": self.epoch, "consumed": self.consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at the position of a checkpoint, with its seed.

        Raises:
            ValueError: it is of a data set of another size, so that positions mean other samples.
        """
        if state["size"] != self.size:
            raise ValueError(
                f"the checkpoint is of a data set with {state['size']} samples, this one has {self.size}: resume with "
                "the same data, or begin anew without the sampler's state"
            )
        self.seed, self.epoch, self.consumed = state["seed"], state["epoch"], state["consumed"]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The division of one optimizer step among the whole group.

    Attributes:
        global_batch: samples of a step, all ranks together.
        micro_batch: samples that a rank takes at once.
        accumulation: how many times it does so before the optimizer steps.
        world_size: ranks.
    """

    global_batch: int
    micro_batch: int
    accumulation: int
    world_size: int

    @property
    def per_rank(self) -> int:
        """Samples of a step on each rank."""
        return self.micro_batch * self.accumulation


def batch_plan(global_batch: int, micro_batch: int, *, world_size: int | None = None) -> BatchPlan:
    """Divide a batch that stays the same among the ranks that there are, by accumulating more or fewer gradients.

    Args:
        global_batch: samples of an optimizer step, all ranks together.
        micro_batch: samples that a rank takes at once.
        world_size: that of the process group, else of the environment, unless given.

    Raises:
        ValueError: it does not divide; the message says which world sizes and which batches do.
    """
    ranks = own_place()[1] if world_size is None else world_size
    if min(global_batch, micro_batch, ranks) < 1:
        raise ValueError(
            f"global_batch {global_batch}, micro_batch {micro_batch}, {ranks} ranks: give at least 1 of each"
        )
    accumulation, rest = divmod(global_batch, micro_batch * ranks)
    if rest:
        together = micro_batch * ranks
        batches = " or ".join(str(batch) for batch in (global_batch - rest, global_batch - rest + together) if batch)
        units, odd = divmod(global_batch, micro_batch)
        sizes = [] if odd else [size for size in range(1, units + 1) if units % size == 0]
        worlds = f"; world sizes that fit are {', '.join(map(str, sizes))}" if sizes else ""
        raise ValueError(
            f"global_batch {global_batch} is no multiple of {ranks} ranks times micro_batch {micro_batch}: give "
            f"{batches}{worlds}"
        )
    return BatchPlan(global_batch, micro_batch, accumulation, ranks)


def own_place() -> tuple[int, int]:
    """Rank and world size of this process."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
