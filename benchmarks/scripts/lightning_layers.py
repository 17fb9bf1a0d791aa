"""Some layers by the Trainer of Lightning.

    lightning_layers.py [--steps N] [--elastic] [--num-nodes N] [--mib N]

Everything is in the current directory: checkpoints in `out`, and `steps`. With `--elastic` it has the lines that
docs/howto/frameworks.md names; without, it is as users write it for torchrun. `--mib` adds so much of a weight that is
not trained.
"""

import argparse
import os
import time

import marks
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

marks.mark(reached="imported", at=time.time())


class Layers(LightningModule):
    """A few layers and a loss."""

    def __init__(self, mib):
        super().__init__()
        if mib:
            self.wide = torch.nn.Parameter(torch.zeros(mib, 1 << 18), requires_grad=False)
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.layers.parameters())


class Marks(Callback):
    """Writes steps down, and makes them last as long as others'."""

    def on_train_start(self, trainer, pl_module):
        marks.mark(reached="ready", at=time.time(), resumed=trainer.global_step)

    def on_train_batch_end(self, trainer, *arguments):
        time.sleep(0.05)
        marks.mark(step=time.time(), number=trainer.global_step)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100000)
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument("--num-nodes", type=int, default=int(os.environ["GROUP_WORLD_SIZE"]))
    parser.add_argument("--mib", type=int, default=0)
    options = parser.parse_args()
    data = TensorDataset(torch.randn(6000, 16, generator=torch.Generator().manual_seed(0)), torch.zeros(6000, 1))
    loader, callbacks, newest = DataLoader(data, batch_size=4, shuffle=True), [Marks()], "last"
    if options.elastic:
        from slurm_elastic.data import ElasticSampler
        from slurm_elastic.integrations.lightning import ElasticCallback, last_checkpoint

        sampler = ElasticSampler(len(data), batch_size=12)
        loader, callbacks = DataLoader(data, batch_sampler=sampler), [Marks(), ElasticCallback(sampler)]
        newest = last_checkpoint("out")
    model = Layers(options.mib)
    marks.mark(reached="model", at=time.time())
    trainer = Trainer(
        max_steps=options.steps, accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=options.num_nodes, strategy="ddp", use_distributed_sampler=not options.elastic, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[*callbacks, ModelCheckpoint("out", every_n_train_steps=20, save_last=True)],
    )  # fmt: skip
    trainer.fit(model, loader, ckpt_path=newest)


if __name__ == "__main__":
    main()
