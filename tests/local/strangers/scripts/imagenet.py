"""In the shape of pytorch/examples' imagenet/main.py --dummy: loaders in processes, a `--resume` that may miss."""

import argparse
import os
import shutil
import sys
import time

import torch
from torch import nn
from torch.utils.data import Dataset

parser = argparse.ArgumentParser(description="PyTorch ImageNet Training")
parser.add_argument("data", nargs="?", default="imagenet")
parser.add_argument("-a", "--arch", default="resnet18")
parser.add_argument("-j", "--workers", default=1, type=int)
parser.add_argument("--epochs", default=3, type=int)
parser.add_argument("--start-epoch", default=0, type=int)
parser.add_argument("-b", "--batch-size", default=8, type=int)
parser.add_argument("-p", "--print-freq", default=10, type=int)
parser.add_argument("--resume", default="", type=str)
parser.add_argument("--dist-url", default="env://", type=str)
parser.add_argument("--dist-backend", default="gloo", type=str)
parser.add_argument("--seed", default=None, type=int)
parser.add_argument("--dummy", action="store_true")
parser.add_argument("--pause", default=0.0, type=float)
best_acc1 = 0.0


class FakeData(Dataset):
    def __init__(self, size, classes):
        self.size, self.classes = size, classes

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 16, 16, generator=generator), index % self.classes


def main():
    global best_acc1
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    args.rank = int(os.environ["RANK"])
    torch.distributed.init_process_group(args.dist_backend, init_method=args.dist_url)
    if args.rank == 0:
        print(sys.argv)
        print("=> Dummy data is used!" if args.dummy else "")
        print(f"=> creating model '{args.arch}'")
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14 * 14, 10))
    model = nn.parallel.DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)
    if args.resume:
        if os.path.isfile(args.resume):
            checkpoint = torch.load(args.resume)
            args.start_epoch, best_acc1 = checkpoint["epoch"], checkpoint["best_acc1"]
            model.load_state_dict(checkpoint["state_dict"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            print(f"=> loaded checkpoint '{args.resume}' (epoch {args.start_epoch})")
        else:
            print(f"=> no checkpoint found at '{args.resume}'")
    train_dataset, val_dataset = FakeData(96, 10), FakeData(16, 10)
    train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset)
    train_loader = torch.utils.data.DataLoader(
        train_dataset, batch_size=args.batch_size, num_workers=args.workers, sampler=train_sampler
    )
    val_loader = torch.utils.data.DataLoader(val_dataset, batch_size=args.batch_size)
    for epoch in range(args.start_epoch, args.epochs):
        train_sampler.set_epoch(epoch)
        model.train()
        for images, target in train_loader:
            loss = criterion(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if args.rank == 0:
            print(f"step {epoch}: loss {loss.item():.4f}", flush=True)
        time.sleep(args.pause)
        model.eval()
        with torch.no_grad():
            hits = torch.tensor([sum((model(x).argmax(1) == y).sum() for x, y in val_loader)], dtype=torch.float32)
        torch.distributed.all_reduce(hits)
        is_best, best_acc1 = float(hits) > best_acc1, max(float(hits), best_acc1)
        if args.rank == 0:
            state = {
                "epoch": epoch + 1,
                "arch": args.arch,
                "state_dict": model.state_dict(),
                "best_acc1": best_acc1,
                "optimizer": optimizer.state_dict(),
            }
            torch.save(state, "new.pth.tar")
            os.replace("new.pth.tar", "checkpoint.pth.tar")
            if is_best:
                shutil.copyfile("checkpoint.pth.tar", "model_best.pth.tar")


if __name__ == "__main__":
    main()
