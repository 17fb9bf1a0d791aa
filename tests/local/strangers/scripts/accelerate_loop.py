"""In the shape of Accelerate's examples/complete_nlp_example.py: prepare(), save_state() at some steps."""

import argparse
import os
import sys
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpointing_steps", type=int, default=5)
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--pause", type=float, default=0.0)
    args = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    if accelerator.is_main_process:
        print(sys.argv)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(512, 8, generator=generator), torch.zeros(512, 1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
    step, latest = 0, os.path.join(args.output_dir, "latest")
    if os.path.exists(latest):
        with open(latest) as file:
            step = int(file.read())
        accelerator.load_state(os.path.join(args.output_dir, f"step_{step}"))
        accelerator.print(f"Resumed from checkpoint: step_{step}")
    while step < args.steps:
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.print(f"step {step}: loss {loss.item():.4f}", flush=True)
            step += 1
            time.sleep(args.pause)
            if step % args.checkpointing_steps == 0:
                accelerator.save_state(os.path.join(args.output_dir, f"step_{step}"))
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    with open(latest + ".new", "w") as file:
                        file.write(str(step))
                    os.replace(latest + ".new", latest)
            if step >= args.steps:
                break
    accelerator.end_training()


if __name__ == "__main__":
    main()
