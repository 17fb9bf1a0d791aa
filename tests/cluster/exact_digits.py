"""A training with a snapshot after every step whose losses are the same at any number of ranks, to the last bit.

Each rank adds up the gradients of its samples as whole numbers, and whole numbers have the same sum in any order. So
every step has the loss that it has in a training that nothing disturbs: run this by plain python for that one. The
ranks write the losses down, `losses.rank<N>.jsonl` in the current directory; everything else is as in timed_digits.py.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import timed_digits
import torch
from timed_digits import digits, dist, trainer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from slurm_elastic import snapshot
from slurm_elastic.data import ElasticSampler

_SCALE = 2.0**40
"""Of gradients and losses as whole numbers: those of a whole batch stay below 2**63."""
_HISTORY = 1 << 20
"""Numbers in the state besides the model's, 8 MiB: agents that keep memory that they should give back show it."""


def make_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def add_up(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> int:
    """Set the gradients to the mean over the samples of all ranks, and return the sum of their losses, scaled."""
    parameters = list(model.parameters())
    total = torch.zeros(2 + sum(each.numel() for each in parameters), dtype=torch.int64)
    for image, label in zip(images, labels, strict=True):
        # One by one: kernels add up a batch in an order that depends on its size.
        loss = cross_entropy(model(image[None]), label[None])
        gradients = torch.autograd.grad(loss, parameters)
        values = torch.cat([loss.detach().reshape(1), *(each.flatten() for each in gradients)]).double()
        total[1:] += (values * _SCALE).round().long()
        total[0] += 1
    dist.all_reduce(total)
    mean = (total[2:].double() / (_SCALE * int(total[0]))).float()
    for parameter, gradient in zip(parameters, mean.split([each.numel() for each in parameters]), strict=True):
        parameter.grad = gradient.view_as(parameter)
    return int(total[1])


def train(args: argparse.Namespace, device: torch.device) -> None:
    train_set, test_set = digits.load_data()
    torch.manual_seed(args.seed)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    sampler = ElasticSampler(len(train_set), args.batch_size, seed=args.seed)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "sampler": sampler}
    snapshot.to_disk(args.checkpoint_dir / "snapshots", every=20)
    start: dict[str, Any] = {"progress": {"step": 0}, "history": torch.zeros(_HISTORY, dtype=torch.float64)}
    progress, history, ranks = digits.load_checkpoint(lambda: snapshot.load(**state, **start, per_rank=[]))
    step = progress["step"]
    # What the ranks had of their own is that of the same step and of all of them.
    assert [each["step"] for each in ranks] == [step] * len(ranks), ranks
    assert [each["rank"] for each in ranks] == [*range(len(ranks))], ranks
    assert bool(ranks) == (step > 0) or not os.environ.get("SLURM_ELASTIC_ROUND")
    digits.say(f"starts at step {step} with world size {dist.get_world_size()}")
    recorder = digits.Recorder(args.record, step, len(train_set), device)
    losses = Path(f"losses.rank{dist.get_rank()}.jsonl").open("a", buffering=1)  # noqa: SIM115
    losses.write("\n")  # A line that was cut short ends here.

    for _ in sampler.epochs(args.epochs):
        for images, labels, ids in DataLoader(train_set, batch_sampler=sampler):
            recorder.write(epoch=sampler.epoch, step=step + 1, samples=ids.tolist()[: sampler.share])
            loss = add_up(model, images[: sampler.share], labels[: sampler.share])
            optimizer.step()
            step += 1
            losses.write(json.dumps({"step": step, "loss": loss}) + "\n")
            history[step % _HISTORY] = loss / _SCALE
            sampler.step()
            digits.time.sleep(args.step_time)
            own = {"step": step, "rank": dist.get_rank()}
            snapshot.save(step, **state, progress={"step": step}, history=history, per_rank=own)
            if stop := trainer.should_stop(step):
                digits.say(f"stops after step {step}: {stop.reason}")
                return
    done = {"model": model.state_dict(), "sampler": sampler.state_dict(), "step": step}
    digits.save_checkpoint(args.checkpoint_dir / "checkpoint.pt", done)
    digits.say(f"finished after {step} steps: test accuracy {digits.test_accuracy(model, test_set, device):.2%}")


def main() -> None:
    digits.train = train
    # So that timed_digits.py writes down when the state is there.
    digits.load_checkpoint = lambda load: load()
    if "SLURM_ELASTIC_ROUND" in os.environ:
        timed_digits.main()
    else:
        digits.main()


if __name__ == "__main__":
    main()
