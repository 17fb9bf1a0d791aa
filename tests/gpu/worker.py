"""A training script on GPUs: writes what it finds to ``seen/<round>.<rank>.json``.

    worker.py MODE [--device cuda|cpu]

It runs under torchrun too, whose restarts it takes for rounds.

    devices    a product on the device of the local rank
    pinned     pinned memory, by hand and by a DataLoader with a process of its own
    snapshot   in round 0 rank 0 fails after three steps, each with a snapshot in memory; then it loads the last one
    group      an all-reduce of the whole group, by NCCL, or gloo without CUDA
    hang       in round 0 rank 0 hangs inside a kernel, under a timer of torch's
    restart    in the first rounds rank 0 fails after its first step; times of what a start consists of
    lightning  in round 0 the training fails after step 5; the next round goes on from the memory of the agent
    cost       times of snapshots of half a GiB, and of copies of as much into pinned memory

It ends when there is a file ``finish``; until then its device stays open. The CPU is for the tests of this script.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

BEGUN = time.time()
MODES = ("devices", "pinned", "snapshot", "group", "hang", "restart", "lightning", "cost")
RESTARTS = 5
"""How often a worker of mode restart fails."""
LONG = 1 << 62
"""Cycles of a kernel that does not end: a century."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    import torch

    rank, round_number = int(os.environ["RANK"]), current_round()
    first = round_number == 0
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
    if options.mode == "lightning":
        record |= fitted(options.device, 5 if first else 10)
    if options.mode in ("group", "restart"):
        record["sum"] = group(device)
        record["grouped"] = time.time()
    if options.mode == "cost":
        record["cost"] = cost(device)
    begun = time.time()
    record["product"] = float((ones @ ones).sum().item())
    record["stepped"] = time.time()
    record["step"] = record["stepped"] - begun
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    write(record, rank)
    if rank == 0 and round_number < {"restart": RESTARTS, "snapshot": 1, "lightning": 1}.get(options.mode, 0):
        write({"failed": time.time()}, rank, "failed")
        return 1
    if options.mode == "hang" and first and rank == 0:
        hang(device)
    while not Path("finish").exists():
        time.sleep(0.02)
    return 0


def current_round() -> int:
    """The number of the round; under torchrun, of restarts."""
    return int(os.environ.get("SLURM_ELASTIC_ROUND", os.environ["TORCHELASTIC_RESTART_COUNT"]))


def write(record: dict[str, Any], rank: int, kind: str = "seen") -> None:
    """Write a file that is whole when it is there."""
    folder = Path(kind)
    folder.mkdir(exist_ok=True)
    part = folder / f".{rank}.{os.getpid()}"
    part.write_text(json.dumps(record))
    part.rename(folder / f"{current_round()}.{rank}.json")


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


def fitted(device: str, steps: int) -> dict[str, Any]:
    """Have Lightning train up to a step, by half precision on a GPU; return where it went on, and its state then."""
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

    from slurm_elastic.data import ElasticSampler
    from slurm_elastic.integrations.lightning import ElasticCallback, elastic_world, last_checkpoint

    record: dict[str, Any] = {}

    def state(trainer: Any) -> dict[str, Any]:
        tensors = [*trainer.lightning_module.parameters()]
        tensors += [each["exp_avg"] for each in trainer.optimizers[0].state.values()]
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        return {
            "sums": [float(tensor.detach().double().sum()) for tensor in tensors],
            "kinds": sorted({tensor.device.type for tensor in tensors}),
            "scale": scaler and scaler.get_scale(),
        }

    class Layer(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.1)

    class Stop(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            record["loaded"], record["after loading"] = trainer.global_step, state(trainer)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            # Behind ElasticCallback, which has copied the step before.
            if trainer.global_step == steps:
                record["at the end"] = state(trainer)
                trainer.should_stop = True

    seed_everything(0)
    sampler = ElasticSampler(12 * 8, batch_size=8)
    data = torch.utils.data.DataLoader(torch.rand(12 * 8, 64), batch_sampler=sampler)
    precision = "16-mixed" if device == "cuda" else "32-true"
    trainer = Trainer(
        **elastic_world(), accelerator="gpu" if device == "cuda" else "cpu", precision=precision, max_epochs=1,
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        default_root_dir="out", callbacks=[ElasticCallback(sampler), Stop()],
    )  # fmt: skip
    trainer.fit(Layer(), data, ckpt_path=last_checkpoint("out"))
    return {**record, "files": [str(path) for path in Path().glob("out/**/*.ckpt")]}


def group(device: Any) -> float:
    """Return the sum of 1, 2, ... over the ranks, from an all-reduce."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    value = torch.tensor([float(dist.get_rank() + 1)], device=device)
    dist.all_reduce(value)
    return float(value.item())


def cost(device: Any, tensors: int = 32, mebibytes: int = 16, times: int = 12) -> dict[str, Any]:
    """Return the seconds of each snapshot of that many tensors, and the median of a copy of each into pinned memory."""
    import torch

    from slurm_elastic import snapshot

    weights = {str(index): torch.rand(mebibytes << 18, device=device) for index in range(tensors)}
    buffers = [torch.empty(mebibytes << 18, pin_memory=device.type == "cuda") for _ in weights]
    found: dict[str, list[float]] = {"snapshot": [], "pinned": []}
    for step in range(times):
        # The state grows once, as an optimizer's does.
        state = weights if step else {"0": weights["0"]}
        begun = time.perf_counter()
        snapshot.save(step, weights=state)
        saved = time.perf_counter()
        for buffer, tensor in zip(buffers, weights.values(), strict=True):
            buffer.copy_(tensor, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        found["snapshot"].append(saved - begun)
        found["pinned"].append(time.perf_counter() - saved)
    return {
        "mebibytes": tensors * mebibytes,
        "snapshots": [round(seconds, 3) for seconds in found["snapshot"]],
        "pinned": round(statistics.median(found["pinned"]), 3),
    }


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
