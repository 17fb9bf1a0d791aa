"""A training script on GPUs: writes what it finds to ``seen/<round>.<rank>.json``.

    worker.py MODE [--device cuda|cpu]

    devices    a product on the device of the local rank
    pinned     pinned memory, by hand and by a DataLoader with a process of its own
    snapshot   in round 0 rank 0 fails after three steps, each with a snapshot in memory; then it loads the last one
    group      an all-reduce of the whole group, by NCCL, or gloo without CUDA
    hang       in round 0 rank 0 hangs inside a kernel, under a timer of torch's
    restart    in round 0 rank 0 fails after its first step; times of the start and of the first step

It ends when there is a file ``finish``; until then its device stays open. The CPU is for the tests of this script.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

BEGUN = time.time()
LONG = 1 << 62
"""Cycles of a kernel that does not end: a century."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("devices", "pinned", "snapshot", "group", "hang", "restart"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    import torch

    rank, first = int(os.environ["RANK"]), os.environ["SLURM_ELASTIC_ROUND"] == "0"
    device = torch.device(options.device, int(os.environ["LOCAL_RANK"]) if options.device == "cuda" else None)
    record: dict[str, Any] = {
        "pid": os.getpid(),
        "begun": BEGUN,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "cpus": sorted(os.sched_getaffinity(0)),
        "asked": getattr(sys.modules.get("asks"), "FOUND", None),
        "initialized": torch.cuda.is_initialized(),
        "imported": time.time(),
    }
    ones = torch.ones(64, 64, device=device)
    if options.device == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.synchronize()
        record["count"] = torch.cuda.device_count()
        record["uuid"] = str(torch.cuda.get_device_properties(device).uuid)
    record["context"] = time.time()
    if options.mode == "pinned":
        record["pinned"] = pinned(device)
    if options.mode == "snapshot":
        record |= trained(device, 3 if first else 0)
    if options.mode == "group":
        record["sum"] = group(device)
    record["product"] = float((ones @ ones).sum().item())
    record["stepped"] = time.time()
    write(record, rank)
    if options.mode in ("restart", "snapshot") and first and rank == 0:
        write({"failed": time.time()}, rank, "failed")
        return 1
    if options.mode == "hang" and first and rank == 0:
        hang(device)
    while not Path("finish").exists():
        time.sleep(0.02)
    return 0


def write(record: dict[str, Any], rank: int, kind: str = "seen") -> None:
    """Write a file that is whole when it is there."""
    folder = Path(kind)
    folder.mkdir(exist_ok=True)
    part = folder / f".{rank}.{os.getpid()}"
    part.write_text(json.dumps(record))
    part.rename(folder / f"{os.environ['SLURM_ELASTIC_ROUND']}.{rank}.json")


def pinned(device: Any) -> dict[str, Any]:
    """Copy pinned memory to the device and back, and let a DataLoader pin what a process of its own has made."""
    import torch

    pin = device.type == "cuda"
    host = torch.arange(1 << 20, dtype=torch.float32, pin_memory=pin)
    back = host.to(device, non_blocking=True).cpu()
    loader = torch.utils.data.DataLoader(torch.arange(64.0), batch_size=16, num_workers=1, pin_memory=pin)
    batches = [batch.to(device, non_blocking=True) for batch in loader]
    return {
        "by_hand": host.is_pinned(),
        "same": bool(torch.equal(host, back)),
        "loader": float(sum(batch.sum().item() for batch in batches)),
    }


def trained(device: Any, steps: int) -> dict[str, Any]:
    """Load the newest snapshot, and take some steps with one each; return what was loaded, and what is there then."""
    import torch

    from slurm_elastic import snapshot

    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, device=device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    progress = snapshot.load(model=model, optimizer=optimizer, progress={"step": 0})
    found = {"loaded": progress["step"], "loaded weights": float(model.weight.detach().double().sum())}
    for _ in range(steps):
        model(torch.ones(8, 64, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        progress["step"] += 1
        snapshot.save(progress["step"], model=model, optimizer=optimizer, progress=progress)
    moments = [value["exp_avg"] for value in optimizer.state.values()]
    kinds = sorted({tensor.device.type for tensor in (*model.parameters(), *moments)})
    return {**found, "weights": float(model.weight.detach().double().sum()), "kinds": kinds}


def group(device: Any) -> float:
    """Return the sum of 1, 2, ... over the ranks, from an all-reduce."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    value = torch.tensor([float(dist.get_rank() + 1)], device=device)
    dist.all_reduce(value)
    total = float(value.item())
    dist.destroy_process_group()
    return total


def hang(device: Any) -> None:
    """Wait under a timer for a kernel that does not end."""
    import torch
    from torch.distributed.elastic import timer

    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with timer.expires(after=1.0, scope="kernel"):
        if device.type == "cuda":
            torch.cuda._sleep(LONG)
            torch.cuda.synchronize()
        else:
            time.sleep(3600)


if __name__ == "__main__":
    sys.exit(main())
