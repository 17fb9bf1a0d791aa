"""Some layers in a loop of the script's own, by Lightning Fabric or Accelerate.

    layers_loop.py fabric|accelerate [--elastic]

Everything is in the current directory: checkpoints in `out`, and `steps`. With `--elastic` ElasticState has the loop,
as in docs/howto/frameworks.md; without, the script loads and saves by its framework, as users write it for torchrun.
"""

import argparse
import os
import time
from pathlib import Path

import marks
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

_parser = argparse.ArgumentParser()
_parser.add_argument("kind", choices=["fabric", "accelerate"])
_parser.add_argument("--elastic", action="store_true")
OPTIONS = _parser.parse_args()
if OPTIONS.kind == "fabric":
    from lightning.fabric import Fabric
else:
    from accelerate import Accelerator

marks.mark(reached="imported", at=time.time())

OUT, EVERY = Path("out"), 20


def prepared(layers, optimizer):
    """Return the framework's object, and what it makes of model and optimizer."""
    if OPTIONS.kind == "accelerate":
        accelerator = Accelerator(cpu=True)
        return accelerator, *accelerator.prepare(layers, optimizer)
    places = {"devices": int(os.environ["LOCAL_WORLD_SIZE"]), "num_nodes": int(os.environ["GROUP_WORLD_SIZE"])}
    fabric = Fabric(accelerator="cpu", strategy="ddp", **places)
    fabric.launch()
    return fabric, *fabric.setup(layers, optimizer)


def train_plainly(framework, model, optimizer, data):
    """Load the newest checkpoint of the framework's own, and save one every 20 steps."""
    step = max((int(path.stem) for path in OUT.glob("[0-9]*")), default=0)
    state = {"model": model, "optimizer": optimizer}
    if step and OPTIONS.kind == "fabric":
        framework.load(OUT / f"{step:08d}", state)
    elif step:
        framework.load_state(OUT / f"{step:08d}")
    marks.mark(reached="ready", at=time.time(), resumed=step)
    while True:
        for inputs, targets in DataLoader(data, batch_size=4, shuffle=True):
            loss = mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            framework.backward(loss)
            optimizer.step()
            step += 1
            time.sleep(0.05)
            marks.mark(step=time.time(), number=step)
            if step % EVERY:
                continue
            if OPTIONS.kind == "fabric":
                framework.save(OUT / "new", state)
            else:
                framework.save_state(OUT / "new")
                framework.wait_for_everyone()
            # Whoever is killed meanwhile leaves no half checkpoint.
            if int(os.environ["RANK"]) == 0:
                (OUT / "new").rename(OUT / f"{step:08d}")


def train(framework, model, optimizer, data):
    """The same by ElasticState."""
    from slurm_elastic import ElasticState
    from slurm_elastic.data import ElasticSampler

    sampler = ElasticSampler(data, global_batch_size=12)
    state = ElasticState(
        model=model, optimizer=optimizer, sampler=sampler, checkpoints=OUT, checkpoint_every_steps=EVERY
    )
    marks.mark(reached="ready", at=time.time(), resumed=state.steps)
    for _ in state.epochs(100000):
        for inputs, targets in state.batches(DataLoader(data, batch_sampler=sampler)):
            loss = mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            framework.backward(state.mean(loss))
            optimizer.step()
            time.sleep(0.05)
            marks.mark(step=time.time(), number=state.steps)


def main():
    data = TensorDataset(torch.randn(6000, 16, generator=torch.Generator().manual_seed(0)), torch.zeros(6000, 1))
    layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    marks.mark(reached="model", at=time.time())
    framework, model, optimizer = prepared(layers, torch.optim.AdamW(layers.parameters()))
    (train if OPTIONS.elastic else train_plainly)(framework, model, optimizer, data)


if __name__ == "__main__":
    main()
