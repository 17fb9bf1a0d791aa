"""Trains a model that is sharded by FSDP2 and has dropout, and a second one beside it, for 12 steps."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from slurm_elastic import ElasticSampler, ElasticState

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 1))
average = DistributedDataParallel(nn.Linear(1, 1))
fully_shard(model)
optimizer, other = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.optim.SGD(average.parameters(), lr=1e-2)
data = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
sampler = ElasticSampler(data, global_batch_size=8)
state = ElasticState(model=model, optimizer=optimizer, average=average, other=other, sampler=sampler, checkpoints=None)
for _ in state.epochs(2):
    for samples in state.batches([data[indices] for indices in sampler]):
        predicted = model(samples)
        loss = (predicted - samples.sum(1, keepdim=True)).square().mean()
        state.mean(loss).backward()
        loss_of_other = (average(predicted.detach()) - 1).square().mean()
        loss_of_other.backward()
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {state.steps}: {loss.item()!r} {loss_of_other.item()!r}", flush=True)
        time.sleep(0)
dist.barrier()
dist.destroy_process_group()
