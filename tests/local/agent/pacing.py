"""A DDP training by gloo on CPUs, with a data loader and checkpoints, that ends when there is a file ``finish``.

In a step each rank reads a batch for 5 ms and computes for 3 ms, or for the milliseconds of CPU time that the first
argument says; the rank that the file ``slow`` names computes for 30 ms more. Rank 0 writes a checkpoint after every
40th step, and all ranks read it when they start.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from slurm_elastic import trainer

CHECKPOINT = Path("model.pt")


class Rows(Dataset[torch.Tensor]):
    """Rows that take their time."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.005 / 4)
        return torch.full((200,), index % 7 / 7)


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def main() -> None:
    milliseconds = float(sys.argv[1]) if len(sys.argv) > 1 else 3.0
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(4))))
    big = torch.zeros(4_000_000)
    step = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT)
        step, big = saved["step"], saved["big"]
    for batch in trainer.loading(DataLoader(Rows(), batch_size=4)):
        loss = model(batch).square().mean()
        compute(milliseconds / 1000)
        if Path("slow").exists() and Path("slow").read_text() == str(rank):
            compute(0.03)
        loss.backward()
        step += 1
        if step % 40 == 0 and rank == 0:
            part = CHECKPOINT.with_name("model.part")
            torch.save({"step": step, "big": big}, part)
            part.rename(CHECKPOINT)
            trainer.report_checkpoint(step)
        last = torch.tensor(float(Path("finish").exists()))
        dist.all_reduce(last)
        if trainer.should_stop(step) or last:
            break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
