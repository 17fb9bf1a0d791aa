"""Trains some layers that are sharded, by the Trainer of Lightning.

    sharded_lightning.py shards|gathers [EXIT_AT]

With `gathers` rank 0 alone is given the state. Rank 1 of the first round exits after step EXIT_AT.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from slurm_elastic.data import ElasticSampler
from slurm_elastic.integrations.lightning import ElasticCallback, elastic_world, last_checkpoint

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(1, 32), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(32, 1)
        )

    def configure_model(self) -> None:
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.layers(batch[0] / 48).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}]


class Steps(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if RANK == 0:
            told = {"round": int(os.environ["SLURM_ELASTIC_ROUND"]), "world": WORLD, "step": trainer.global_step}
            print(json.dumps(told), flush=True)
        if sys.argv[2:] == [str(trainer.global_step)] and RANK == 1 and os.environ["SLURM_ELASTIC_ROUND"] == "0":
            os._exit(9)
        time.sleep(0.02)


seed_everything(7)
strategy = ModelParallelStrategy(WORLD, 1, save_distributed_checkpoint=sys.argv[1] == "shards")
sampler = ElasticSampler(48, batch_size=8)
trainer = Trainer(
    **elastic_world(), accelerator="cpu", strategy=strategy, max_steps=int(os.environ.get("STEPS", "12")),
    logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    use_distributed_sampler=False, callbacks=[Steps(), ElasticCallback(sampler)], default_root_dir="out",
)  # fmt: skip
model = Model()
data = TensorDataset(torch.arange(48.0).reshape(-1, 1))
trainer.fit(model, DataLoader(data, batch_sampler=sampler), ckpt_path=last_checkpoint("out"))
weights = [each.full_tensor() for each in model.parameters()]
if RANK == 0:
    digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in weights)).hexdigest()
    print(json.dumps({"sharded": True, "weights": digest}))
