"""Train a small transformer that is sharded among all ranks (FSDP2), at any number of them.

    torchrun --nproc-per-node 2 fsdp.py
    sbatch elastic.sbatch fsdp.py
    sbatch elastic.sbatch --snapshot-replicas=1 fsdp.py --snapshots

torch.distributed.checkpoint writes each rank's shards and reads what a rank of another world needs of them, so a run of
four nodes goes on with three, and with four again. A checkpoint is a directory that gets its name when all ranks have
written their part. The directory of checkpoints has to be visible to all nodes.

With --snapshots the agents hold the state of each step in memory, and a copy of each shard on another node: a lost node
costs a few steps. They also write the checkpoints, and the script writes only the last one.
"""

import argparse
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from slurm_elastic import snapshot, trainer
from slurm_elastic.data import ElasticSampler

VOCABULARY, LENGTH, WIDTH = 64, 16, 32


class Model(nn.Module):
    """Predicts the next token of each text, and returns the sum of its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True)
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=tokens.device)
        hidden = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def make_data() -> TensorDataset:
    """Texts in which each token is the one before it plus a step that is the text's own."""
    first, step = torch.meshgrid(torch.arange(VOCABULARY), torch.arange(1, 9), indexing="ij")
    return TensorDataset((first.reshape(-1, 1) + step.reshape(-1, 1) * torch.arange(LENGTH + 1)) % VOCABULARY)


def make_model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = Model().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def newest(directory: Path) -> Path | None:
    """Return the newest checkpoint, as rank 0 sees it: a node may have cached an older directory."""
    found: list[Path | None] = [max(directory.glob("step_*"), default=None)]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def save(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]) -> None:
    """Write a checkpoint; every rank calls this after the same step."""
    final = directory / f"step_{progress['step']:08d}"
    # A name of its own for every round: a group that was cut off from the others may be writing still.
    temporary = directory / f".{final.name}.round{os.environ.get('SLURM_ELASTIC_ROUND', 0)}"
    if dist.get_rank() == 0:
        temporary.mkdir(parents=True, exist_ok=True)
        (temporary / "progress.json").write_text(json.dumps(progress))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    # Ends on all ranks when the metadata is there, after all shards.
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=temporary)
    if dist.get_rank() == 0:
        if not trainer.can_publish_checkpoint():
            raise RuntimeError("another group of workers has taken over this run; its checkpoint stays")
        if not final.exists():
            temporary.rename(final)
        for old in sorted(directory.glob("step_*"))[:-2]:
            shutil.rmtree(old)
        trainer.report_checkpoint(progress["step"])


def load(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Read what this rank needs of a checkpoint of any world size."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    progress: dict[str, Any] = json.loads((checkpoint / "progress.json").read_text())
    return progress


def train(args: argparse.Namespace, device: torch.device) -> None:
    data = make_data()
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sampler = ElasticSampler(len(data), args.batch_size)
    step = 0
    # By state_dict and load_state_dict of FSDP2 and torch: each rank has its shards.
    state = {"model": model, "optimizer": optimizer, "sampler": sampler}
    if args.snapshots:
        snapshot.to_disk(args.checkpoint_dir / "snapshots", every=args.disk_every)
        step = snapshot.load(**state, step=0)
    elif (checkpoint := newest(args.checkpoint_dir)) is not None:
        progress = load(checkpoint, model, optimizer)
        step = progress["step"]
        sampler.load_state_dict(progress["sampler"])
    if dist.get_rank() == 0:
        print(f"step {step}: begins with world size {dist.get_world_size()}", flush=True)

    for epoch in sampler.epochs(args.epochs):
        loss = None
        for (tokens,) in DataLoader(data, batch_sampler=sampler):
            loss = model(tokens.to(device))
            # FSDP divides the sum of all gradients by the world size; with the weight it is the mean per token.
            (loss * sampler.weight / LENGTH).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            trainer.report(step, loss=loss.detach() * sampler.weight / LENGTH)
            sampler.step()
            time.sleep(args.step_time)
            if args.snapshots:
                snapshot.save(step, **state, step=step)
            stop = trainer.should_stop(step)
            if not args.snapshots and (stop or step % args.checkpoint_every == 0):
                save(args.checkpoint_dir, model, optimizer, {"step": step, "sampler": sampler.state_dict()})
            if stop:
                return
        # After a snapshot of the last step of an epoch, none of its steps is left.
        if dist.get_rank() == 0 and loss is not None:
            print(f"epoch {epoch}: step {step}, loss {loss.item() / len(tokens) / LENGTH:.4f}", flush=True)
    save(args.checkpoint_dir, model, optimizer, {"step": step, "sampler": sampler.state_dict()})


def parse_arguments() -> argparse.Namespace:
    run_dir = os.environ.get("SLURM_ELASTIC_RUN_DIR")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=24, help="samples per step of the whole group")
    parser.add_argument("--checkpoint-dir", type=Path, default=Path(run_dir or ".", "checkpoints"))
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--snapshots", action="store_true", help="hold the state of each step in memory")
    parser.add_argument("--disk-every", type=float, default=600, metavar="SECONDS", help="with --snapshots")
    parser.add_argument("--step-time", type=float, default=0.0, metavar="SECONDS", help="pause after every step")
    return parser.parse_args()


@record
def main() -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(parse_arguments(), device)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
