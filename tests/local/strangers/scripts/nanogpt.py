"""In the shape of nanoGPT's train.py: settings are globals, `--name=value` replaces them."""

import ast
import math
import os
import sys
import time

import numpy as np
import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

out_dir = "out"
eval_interval = 10
init_from = "scratch"  # 'scratch' or 'resume'
gradient_accumulation_steps = 40
batch_size = 2
block_size = 8
learning_rate = 1e-2
max_iters = 20
pause = 0.0
for argument in sys.argv[1:]:
    name, _, value = argument.removeprefix("--").partition("=")
    if name not in globals():
        raise ValueError(f"Unknown config key: {name}")
    globals()[name] = value if isinstance(globals()[name], str) else ast.literal_eval(value)

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="gloo")
    ddp_rank = int(os.environ["RANK"])
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    master_process = ddp_rank == 0
    assert gradient_accumulation_steps % ddp_world_size == 0
    gradient_accumulation_steps //= ddp_world_size
if master_process:
    os.makedirs(out_dir, exist_ok=True)
    print(sys.argv)
torch.manual_seed(1337 + ddp_rank)
data = np.arange(4096, dtype=np.uint16) % 61


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x, y


class GPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Embedding(64, 16), torch.nn.GELU(), torch.nn.Linear(16, 64))

    def forward(self, x, y):
        return torch.nn.functional.cross_entropy(self.layers(x).view(-1, 64), y.view(-1))


iter_num, best_val_loss = 0, 1e9
model = GPT()
if init_from == "resume":
    print(f"Resuming training from {out_dir}")
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"))
    model.load_state_dict(checkpoint["model"])
    iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
if init_from == "resume":
    optimizer.load_state_dict(checkpoint["optimizer"])
checkpoint = None
model = DDP(model)
raw_model = model.module

X, Y = get_batch()
while True:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * 0.5 * (1 + math.cos(math.pi * min(iter_num / 1000, 1)))
    if iter_num % eval_interval == 0 and master_process and iter_num > 0:
        best_val_loss = min(best_val_loss, float(raw_model(X, Y)))
        checkpoint = {
            "model": raw_model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "iter_num": iter_num,
            "best_val_loss": best_val_loss,
        }
        torch.save(checkpoint, os.path.join(out_dir, "new.pt"))
        os.replace(os.path.join(out_dir, "new.pt"), os.path.join(out_dir, "ckpt.pt"))
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        loss = model(X, Y) / gradient_accumulation_steps
        X, Y = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if master_process:
        print(f"step {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}", flush=True)
    iter_num += 1
    time.sleep(pause)
    if iter_num > max_iters:
        break
if ddp:
    destroy_process_group()
