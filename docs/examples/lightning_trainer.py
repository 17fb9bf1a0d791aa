"""Train some layers by the Trainer of Lightning, at any number of ranks.

    torchrun --nproc-per-node 2 lightning_trainer.py
    sbatch elastic.sbatch lightning_trainer.py

Every step has the same samples, whatever the number of ranks is. The directory of checkpoints has to be visible to all
nodes.
"""

import argparse
import os
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from slurm_elastic import trainer
from slurm_elastic.data import ElasticSampler
from slurm_elastic.integrations.lightning import ElasticCallback, elastic_world, last_checkpoint

SAMPLES, WIDTH = 240, 16


class Layers(LightningModule):
    """Learns the sum of its inputs."""

    def __init__(self, sampler: ElasticSampler) -> None:
        super().__init__()
        self.sampler = sampler
        self.layers = torch.nn.Sequential(torch.nn.Linear(WIDTH, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        loss = mse_loss(self.layers(inputs), targets, reduction="sum") * self.sampler.weight
        trainer.report(self.global_step + 1, loss=loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def parse_arguments() -> argparse.Namespace:
    run_dir = os.environ.get("SLURM_ELASTIC_RUN_DIR")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=24, help="samples per step of the whole group")
    parser.add_argument("--checkpoint-dir", type=Path, default=Path(run_dir or ".", "checkpoints"))
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, WIDTH)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    sampler = ElasticSampler(SAMPLES, args.batch_size)
    checkpoints = ModelCheckpoint(args.checkpoint_dir, every_n_train_steps=args.checkpoint_every, save_last=True)
    training = Trainer(
        **elastic_world(), accelerator="auto", max_epochs=args.epochs, use_distributed_sampler=False, logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[ElasticCallback(sampler), checkpoints],
    )  # fmt: skip
    newest = last_checkpoint(args.checkpoint_dir)
    training.fit(Layers(sampler), DataLoader(data, batch_sampler=sampler), ckpt_path=newest)


if __name__ == "__main__":
    main()
