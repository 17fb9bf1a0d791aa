"""In the shape of Lightning's docs: a LightningCLI, its settings in a file, the number of nodes from the launcher."""

import os
import sys
import time

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, TensorDataset


class Layers(LightningModule):
    def __init__(self, width: int = 16, pause: float = 0.0):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
        self.pause = pause

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        if self.global_rank == 0:
            print(f"step {self.global_step}: loss {loss.item():.4f}", flush=True)
        time.sleep(self.pause)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Data(LightningDataModule):
    def train_dataloader(self):
        generator = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.randn(512, 8, generator=generator), torch.zeros(512, 1))
        return DataLoader(data, batch_size=4)


if __name__ == "__main__":
    if os.environ["RANK"] == "0":
        print(sys.argv)
    world = {"num_nodes": int(os.environ["GROUP_WORLD_SIZE"]), "devices": int(os.environ["LOCAL_WORLD_SIZE"])}
    LightningCLI(Layers, Data, trainer_defaults=world, save_config_kwargs={"overwrite": True})
