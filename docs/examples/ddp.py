"""Train a small convolutional network on synthetic images with DistributedDataParallel: a script for torchrun.

elastic_ddp.py beside it is the same one, made elastic; `diff` shows the lines.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_data() -> TensorDataset:
    """Images with a bright stripe, whose row is their label."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(8, (480,), generator=generator)
    images = torch.randn(480, 1, 8, 8, generator=generator)
    images[torch.arange(480), 0, labels] += 1
    return TensorDataset(images, labels)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 8 * 8, 8))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("out"), help="directory that all nodes see")
    parser.add_argument("--step-time", type=float, default=0.0, metavar="SECONDS", help="pause after every step")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group()
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)

    data = make_data()
    model = DistributedDataParallel(make_model().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.8)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64 // dist.get_world_size(), sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(args.step_time)
        scheduler.step()
        if dist.get_rank() == 0:
            images, labels = data.tensors
            with torch.no_grad():
                loss = cross_entropy(model.module(images.to(device)), labels.to(device))
            print(f"epoch {epoch}: loss {loss.item():.6f}", flush=True)

    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), args.out / "model.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
