"""Train the network of digits.py so that a lost node costs one step at most: a snapshot in memory after every step.

    sbatch elastic.sbatch snapshot_digits.py

digits.py has to lie beside this file: data and model are its own. The agents write snapshots to disk every ten minutes
and before they leave, because memory lasts only as long as an agent of the run lives. What is trained is saved at the
end.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import digits
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from slurm_elastic import snapshot, trainer
from slurm_elastic.data import ElasticSampler


def train(args: argparse.Namespace, device: torch.device) -> None:
    train_set, test_set = digits.load_data()
    torch.manual_seed(args.seed)
    model = digits.make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    sampler = ElasticSampler(len(train_set), args.batch_size, seed=args.seed)
    progress = {"step": 0}

    snapshot.to_disk(args.checkpoint_dir / "snapshots")
    # The state in memory, if agents hold one; else that of the newest checkpoint; else everything stays as it is.
    progress = snapshot.load(model=model, optimizer=optimizer, sampler=sampler, progress=progress)
    digits.say(f"starts at step {progress['step']} with world size {dist.get_world_size()}")
    recorder = digits.Recorder(args.record, progress["step"], len(train_set), device) if args.record else None
    parallel = DistributedDataParallel(model)

    for epoch in sampler.epochs(args.epochs):
        for images, labels, ids in DataLoader(train_set, batch_sampler=sampler):
            if recorder:
                recorder.write(epoch=epoch, step=progress["step"] + 1, samples=ids.tolist()[: sampler.share])
            loss = cross_entropy(parallel(images.to(device)), labels.to(device), reduction="sum")
            optimizer.zero_grad()
            (loss * sampler.weight).backward()
            optimizer.step()
            progress["step"] += 1
            sampler.step()
            time.sleep(args.step_time)
            snapshot.save(progress["step"], model=model, optimizer=optimizer, sampler=sampler, progress=progress)
            if stop := trainer.should_stop(progress["step"]):
                digits.say(f"stops after step {progress['step']}: {stop.reason}")
                return
        accuracy = digits.test_accuracy(model, test_set, device)
        digits.say(f"epoch {epoch}: world size {dist.get_world_size()}, test accuracy {accuracy:.2%}")

    state: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    path: Path = args.checkpoint_dir / "checkpoint.pt"
    digits.save_checkpoint(path, {**state, "sampler": sampler.state_dict(), **progress})


@record
def main() -> None:
    args = digits.parse_arguments()
    device = digits.join_group()
    train(args, device)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
