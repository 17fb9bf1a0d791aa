"""Holds 12 MiB of each rank's own, and checks that what it goes on from was saved by all ranks after one step."""

import argparse
import time

import torch
import torch.distributed as dist

from slurm_elastic import snapshot, trainer

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
options = parser.parse_args()
dist.init_process_group("gloo")
step, states = snapshot.load(step=0, per_rank=[])
wrong = [rank for rank, state in enumerate(states) if not state["noise"].eq(step).all()]
print(f"begins after step {step}, with parts of {len(states)} ranks, wrong ones: {wrong}", flush=True)
noise = torch.zeros(3 << 20)
while step < options.steps:
    step += 1
    dist.all_reduce(torch.zeros(1))
    time.sleep(0.1)
    noise.fill_(step)
    snapshot.save(step, step=step, per_rank={"noise": noise})
    if dist.get_rank() == 0:
        print(f"took step {step}", flush=True)
    if trainer.should_stop(step):
        break
dist.barrier()
dist.destroy_process_group()
