"""Train a small convolutional network to read digits, which it draws itself, at any number of processes.

It runs unchanged in each of these ways, stops at any moment and goes on where its last checkpoint was
taken, also with another number of processes:

    python digits.py
    torchrun --nproc-per-node 2 digits.py
    sbatch elastic.sbatch digits.py

slurm_elastic.data makes the number of processes free to change. The batch size is that of the whole group, so every
step trains on the same samples however many ranks share them. The checkpoint holds the position inside the epoch, so
what is left of the epoch is dealt anew to the ranks that are there. Each rank weights its loss by the samples that it
has, so that the gradient is the mean over the whole batch even when ranks have different numbers of samples, or none.

Under slurm-elastic the script also asks after every step whether to stop, so that a preemption, a time limit or a node
that joins costs no step.

The checkpoint directory has to be visible to every node that rank 0 may run on.
"""

import argparse
import io
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from slurm_elastic import trainer
from slurm_elastic.data import ElasticSampler

GLYPHS = """
    .###. ..#.. .###. ##### ...#. ##### ..##. ##### .###. .###.
    #...# .##.. #...# ...#. ..##. #.... .#... ....# #...# #...#
    #..## ..#.. ....# ..#.. .#.#. ####. #.... ...#. #...# #...#
    #.#.# ..#.. ...#. ...#. #..#. ....# ####. ..#.. .###. .####
    ##..# ..#.. ..#.. ....# ##### ....# #...# .#... #...# ....#
    #...# ..#.. .#... #...# ...#. #...# #...# .#... #...# ...#.
    .###. .###. ##### .###. ...#. .###. .###. .#... .###. .##..
"""


class Recorder:
    """Appends the ids this rank is about to train on to PREFIX.rank<N>.jsonl; count_samples.py reads them.

    A killed run has recorded steps that its last checkpoint does not contain, and the next start takes them again.
    So every start has an id of its own, the same on all ranks, and says at which step it resumed: a step counts
    only as recorded by the last start that resumed before it, and only up to the last checkpoint. A step is
    recorded before it is taken, so none can get into a checkpoint unrecorded.
    """

    def __init__(self, prefix: str, resumed_at: int, dataset_size: int, device: torch.device) -> None:
        start = torch.tensor(random.SystemRandom().getrandbits(62), device=device)
        dist.broadcast(start, src=0)
        self.start = int(start)
        path = Path(f"{prefix}.rank{dist.get_rank()}.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a", buffering=1)
        self.file.write("\n")  # a line that the last start could not finish ends here
        self.write(resumed_at=resumed_at, world_size=dist.get_world_size(), dataset_size=dataset_size)

    def write(self, **fields: Any) -> None:
        self.file.write(json.dumps({"start": self.start, **fields}) + "\n")


def join_group() -> torch.device:
    """Join the process group that the launcher describes, or make one of one process; return the own device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Training and test set of noisy digits; an item is image, label and the id of the sample in its set."""
    pixels = torch.tensor([[pixel == "#" for pixel in row] for row in GLYPHS.split()], dtype=torch.float32)
    glyphs = pixels.reshape(7, 10, 5).transpose(0, 1)
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (1797,), generator=draw)
    tops, lefts = torch.randint(2, labels.shape, generator=draw), torch.randint(4, labels.shape, generator=draw)
    images = 0.3 * torch.randn(len(labels), 1, 8, 8, generator=draw)
    for image, label, top, left in zip(images, labels, tops, lefts, strict=True):
        image[0, top : top + 7, left : left + 5] += glyphs[label]
    train, test = TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])
    return tuple(TensorDataset(*part.tensors, torch.arange(len(part))) for part in (train, test))


def make_model() -> nn.Module:
    # No batch normalization: it would make the result depend on how a batch is divided among the ranks.
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write on rank 0, so that a reader finds the whole old checkpoint or the whole new one at any moment."""
    if dist.get_rank() != 0:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # A file of its own for every round: a group that was cut off from the others may be writing still.
    temporary = path.with_suffix(f".round{os.environ.get('SLURM_ELASTIC_ROUND', 0)}.tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    if not trainer.can_publish_checkpoint():
        raise RuntimeError("another group of workers has taken over this run; its checkpoint stays")
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    os.fsync(directory)  # without it a power failure may undo the renaming
    os.close(directory)


def load_checkpoint(path: Path, device: torch.device) -> dict[str, Any] | None:
    """Read on rank 0 and send to all, so that no rank resumes from an older file that its node has cached."""
    content = bytearray(path.read_bytes() if dist.get_rank() == 0 and path.exists() else b"")
    size = torch.tensor(len(content), device=device)
    dist.broadcast(size, src=0)
    if size == 0:
        return None
    content = content or bytearray(int(size))
    octets = torch.frombuffer(content, dtype=torch.uint8)
    received = octets.to(device)
    dist.broadcast(received, src=0)
    octets.copy_(received)
    checkpoint: dict[str, Any] = torch.load(io.BytesIO(content), map_location=device, weights_only=True)
    return checkpoint


@torch.no_grad()
def test_accuracy(model: nn.Module, test_set: TensorDataset, device: torch.device) -> float:
    """Share of the test set that is classified rightly; every rank tests its part and all get the same answer."""
    images, labels, _ = test_set[dist.get_rank() :: dist.get_world_size()]
    right = (model(images.to(device)).argmax(dim=1) == labels.to(device)).sum()
    dist.all_reduce(right)
    return int(right) / len(test_set)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, test_set = load_data()
    torch.manual_seed(args.seed)
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    sampler = ElasticSampler(len(train_set), args.batch_size, seed=args.seed)
    step = 0  # optimizer steps since the very start
    epoch_loss = 0.0  # over the samples of this epoch that the group has trained on

    checkpoint_path = args.checkpoint_dir / "checkpoint.pt"
    checkpoint = load_checkpoint(checkpoint_path, device)
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        sampler.load_state_dict(checkpoint["sampler"])
        step, epoch_loss = checkpoint["step"], checkpoint["epoch_loss"]
    beginning = f"resumed at epoch {sampler.epoch} step {step}" if checkpoint else "fresh start"
    of_round = f", round {os.environ['SLURM_ELASTIC_ROUND']}" if "SLURM_ELASTIC_ROUND" in os.environ else ""
    say(f"{beginning} with world size {world_size}{of_round}")
    recorder = Recorder(args.record, step, len(train_set), device) if args.record else None
    parallel = DistributedDataParallel(model)
    loss_sum = torch.zeros((), device=device)  # of this rank, not yet part of epoch_loss

    def collect_loss() -> float:
        dist.all_reduce(loss_sum)
        collected = loss_sum.item()
        loss_sum.zero_()
        return collected

    def save() -> None:
        """Every rank has to call this after the same step."""
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "sampler": sampler.state_dict()}
        save_checkpoint(checkpoint_path, {**state, "step": step, "epoch_loss": epoch_loss})
        if rank == 0:
            trainer.report_checkpoint(step)

    for epoch in sampler.epochs(args.epochs):
        for images, labels, ids in DataLoader(train_set, batch_sampler=sampler):
            if recorder:
                recorder.write(epoch=epoch, step=step + 1, samples=ids.tolist()[: sampler.share])
            loss = cross_entropy(parallel(images.to(device)), labels.to(device), reduction="sum")
            optimizer.zero_grad()
            (loss * sampler.weight).backward()
            optimizer.step()
            loss_sum += loss.detach() * bool(sampler.share)
            step += 1
            trainer.report(step, loss=loss.detach() * sampler.weight)
            sampler.step()
            time.sleep(args.step_time)
            stop = trainer.should_stop(step)
            if stop or step % args.checkpoint_every == 0:
                epoch_loss += collect_loss()
                save()
            if stop:
                say(f"saved step {step} and stops: {stop.reason}")
                return

        epoch_loss += collect_loss()
        accuracy = test_accuracy(model, test_set, device)
        say(
            f"epoch {epoch}: world size {world_size}, loss {epoch_loss / sampler.consumed:.4f}, "
            f"test accuracy {accuracy:.2%}, samples {sampler.consumed}"
        )
        epoch_loss = 0.0

    save()
    say(f"finished after {step} steps: test accuracy {test_accuracy(model, test_set, device):.2%}")


def parse_arguments() -> argparse.Namespace:
    def positive(text: str) -> int:
        if int(text) < 1:
            raise ValueError
        return int(text)

    run_dir = os.environ.get("SLURM_ELASTIC_RUN_DIR")
    checkpoints = Path(run_dir, "checkpoints") if run_dir else Path("digits-checkpoints")
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--epochs", type=positive, default=10, help="in all, earlier starts included")
    parser.add_argument("--batch-size", type=positive, default=32, help="samples per step of the whole group")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of a fresh start; a checkpoint keeps its own")
    parser.add_argument("--checkpoint-dir", type=Path, default=checkpoints, help="must be visible to all nodes")
    parser.add_argument("--checkpoint-every", type=positive, default=50, metavar="STEPS", help="and at the end")
    parser.add_argument("--step-time", type=float, default=0.0, metavar="SECONDS", help="pause after every step")
    parser.add_argument("--record", metavar="PREFIX", help="append the ids trained on to PREFIX.rank<N>.jsonl")
    return parser.parse_args()


@record  # hands the traceback of a failure to the launcher, which reports the first one
def main() -> None:
    args = parse_arguments()
    device = join_group()
    train(args, device)
    dist.barrier()  # nobody leaves before rank 0 has written the last checkpoint
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
