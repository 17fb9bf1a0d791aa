"""A training whose state is wide: 256 MiB on each of four nodes, in steps of 50 ms and what a snapshot takes.

    wide.py ddp|fsdp2 [--snapshots] [--to-disk]

With ddp all ranks have all of the state, with fsdp2 each has its shards. Most of it is not trained, so that two cores
have time for four nodes. With `--snapshots` there is a snapshot after every step, and with `--to-disk` agents that end
leave the newest one there. What each worker does is written to `steps`.
"""

import argparse
import time

import marks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from slurm_elastic import snapshot

marks.mark(reached="imported", at=time.time())

MIB, NODES, WIDTH = 256, 4, 64


class Table(nn.Module):
    def __init__(self, mib: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(mib, 1 << 18), requires_grad=False)


class Model(nn.Module):
    def __init__(self, mib: int) -> None:
        super().__init__()
        self.table, self.head = Table(mib), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(inputs)


def make_model(kind: str) -> nn.Module:
    if kind == "ddp":
        # All ranks begin with the same zeros, or with the snapshot: nothing to send.
        return DistributedDataParallel(Model(MIB), init_sync=False)
    with torch.device("meta"):
        model = Model(MIB * NODES)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.table, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["ddp", "fsdp2"])
    parser.add_argument("--snapshots", action="store_true")
    parser.add_argument("--to-disk", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = make_model(options.kind)
    optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)
    marks.mark(reached="model", at=time.time())
    step = 0
    if options.to_disk:
        snapshot.to_disk("checkpoints", every=600)
    if options.snapshots:
        step = snapshot.load(model=model, optimizer=optimizer, step=step)
    marks.mark(reached="ready", at=time.time(), resumed=step)
    while True:
        time.sleep(0.05)
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        # The snapshot belongs to the time of the next step: without it this one would be as early.
        marks.mark(step=time.time(), number=step)
        if options.snapshots:
            snapshot.save(step, model=model, optimizer=optimizer, step=step)


if __name__ == "__main__":
    main()
