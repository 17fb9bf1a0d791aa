"""A training in plain PyTorch, on ranks whose number changes, with a mistake that the command line names.

Mistakes: no-resume, in-place, named-early, forgets-place, slow-save, fails-on-stop, publishes-late; none for a script
that is right. With endless it trains for ever.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from slurm_elastic import trainer
from slurm_elastic.data import ElasticSampler

MISTAKE = (sys.argv[1:] or ["none"])[0]
CHECKPOINT = Path("checkpoint.pt")


def newest() -> Path:
    directories = sorted(Path().glob("step_*"), key=lambda each: int(each.name.removeprefix("step_")))
    return directories[-1] / "weights.pt" if directories else CHECKPOINT


def save(state: dict[str, object]) -> None:
    if dist.get_rank() != 0:
        return
    if MISTAKE == "in-place":
        torch.save(state, CHECKPOINT)
    elif MISTAKE == "named-early":
        directory = Path(f"step_{state['step']}")
        directory.mkdir()
        torch.save(state, directory / "weights.pt")
        (directory / "complete.txt").touch()
    else:
        temporary = CHECKPOINT.with_suffix(f".{os.environ['SLURM_ELASTIC_ROUND']}")
        torch.save(state, temporary)
        if MISTAKE != "publishes-late" and not trainer.can_publish_checkpoint():
            raise RuntimeError("another group has taken over")
        temporary.replace(CHECKPOINT)
    trainer.report_checkpoint(int(str(state["step"])))


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = torch.randn(240, 4)
    weights = torch.zeros(4)
    sampler = ElasticSampler(len(data), batch_size=8)
    step = 0
    if newest().exists() and MISTAKE != "no-resume":
        state = torch.load(newest())
        weights, step = state["weights"], state["step"]
        if MISTAKE != "forgets-place":
            sampler.load_state_dict(state["sampler"])
    for _ in sampler.epochs(10**9 if MISTAKE == "endless" else 3):
        for numbers in sampler:
            batch = data[numbers[: sampler.share]]
            error = batch @ weights - batch.sum(dim=1)
            gradient = batch.T @ error
            both = torch.cat([gradient, (error @ error).reshape(1)])
            dist.all_reduce(both)
            weights -= 0.05 * both[:4] / sampler.step_size
            sampler.step()
            step += 1
            if dist.get_rank() == 0:
                trainer.report(step, loss=both[4] / sampler.batch_size)
            stop = trainer.should_stop(step)
            if stop or step % 10 == 0:
                if stop and MISTAKE == "slow-save":
                    time.sleep(30)
                save({"weights": weights, "step": step, "sampler": sampler.state_dict()})
            if stop:
                dist.barrier()
                sys.exit(1 if MISTAKE == "fails-on-stop" and dist.get_rank() == 1 else 0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
