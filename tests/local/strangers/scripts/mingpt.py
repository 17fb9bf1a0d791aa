"""In the shape of pytorch/examples' minGPT-ddp/main.py: hydra reads the settings, a Trainer has them as dataclasses."""

import os
import sys
import time
from dataclasses import dataclass

import hydra
import torch
from omegaconf import DictConfig
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class TrainerConfig:
    max_epochs: int
    batch_size: int
    snapshot_path: str
    save_every: int
    pause: float


class Trainer:
    def __init__(self, config, model, optimizer, data):
        self.config, self.optimizer = config, optimizer
        self.rank = int(os.environ["RANK"])
        sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=config.batch_size, sampler=sampler)
        self.epochs_run = 0
        try:
            snapshot = torch.load(config.snapshot_path)
        except FileNotFoundError:
            print("Snapshot not found. Training model from scratch")
        else:
            model.load_state_dict(snapshot["model_state"])
            optimizer.load_state_dict(snapshot["optimizer_state"])
            self.epochs_run = snapshot["finished_epoch"]
        self.model = DDP(model)

    def train(self):
        for epoch in range(self.epochs_run, self.config.max_epochs):
            self.loader.sampler.set_epoch(epoch)
            for x, y in self.loader:
                loss = torch.nn.functional.cross_entropy(self.model(x), y)
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                self.optimizer.step()
            time.sleep(self.config.pause)
            if self.rank == 0:
                print(f"step {epoch}: loss {loss.item():.4f}", flush=True)
                if epoch % self.config.save_every == 0:
                    snapshot = {
                        "model_state": self.model.module.state_dict(),
                        "optimizer_state": self.optimizer.state_dict(),
                        "finished_epoch": epoch + 1,
                    }
                    torch.save(snapshot, self.config.snapshot_path + ".new")
                    os.replace(self.config.snapshot_path + ".new", self.config.snapshot_path)


@hydra.main(version_base=None, config_path=".", config_name="gpt2_train_cfg")
def main(cfg: DictConfig):
    init_process_group(backend="gloo")
    torch.manual_seed(0)
    if os.environ["RANK"] == "0":
        print(sys.argv)
    model = torch.nn.Sequential(torch.nn.Embedding(32, 16), torch.nn.Linear(16, 32))
    data = TensorDataset(torch.arange(256) % 32, (torch.arange(256) + 1) % 32)
    optimizer = torch.optim.AdamW(model.parameters(), **cfg["optimizer_config"])
    trainer = Trainer(TrainerConfig(**cfg["trainer_config"]), model, optimizer, data)
    trainer.train()
    destroy_process_group()


if __name__ == "__main__":
    main()
