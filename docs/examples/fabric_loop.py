"""Train some layers by Lightning Fabric, at any number of ranks; a lost node costs one step at most.

    torchrun --nproc-per-node 2 fabric_loop.py
    sbatch elastic.sbatch fabric_loop.py

Every step has the same samples, whatever the number of ranks is. The directory of checkpoints has to be visible to all
nodes; that of the run is.
"""

import argparse

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from slurm_elastic import ElasticState
from slurm_elastic.data import ElasticSampler
from slurm_elastic.integrations.fabric import elastic_fabric

SAMPLES, WIDTH = 240, 16


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=24, help="samples per step of the whole group")
    parser.add_argument("--checkpoint-dir", help="default: that of the run; none without slurm_elastic")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    fabric = elastic_fabric(accelerator="auto")
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, WIDTH)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    sampler = ElasticSampler(data, global_batch_size=args.batch_size)
    # Not for setup_dataloaders(): the sampler divides among the ranks.
    loader = DataLoader(data, batch_sampler=sampler)
    layers = torch.nn.Sequential(torch.nn.Linear(WIDTH, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    model, optimizer = fabric.setup(layers, torch.optim.AdamW(layers.parameters(), lr=1e-2))
    state = ElasticState(
        model=model, optimizer=optimizer, sampler=sampler,
        checkpoints=args.checkpoint_dir, checkpoint_every_steps=args.checkpoint_every,
    )  # fmt: skip
    for _ in state.epochs(args.epochs):
        for samples, targets in state.batches(loader):
            loss = mse_loss(model(samples.to(fabric.device)), targets.to(fabric.device))
            optimizer.zero_grad()
            fabric.backward(state.mean(loss))
            optimizer.step()
            state.report(loss=loss)


if __name__ == "__main__":
    main()
