"""What a snapshot in memory costs a training, beside a checkpoint on disk.

    python -m benchmarks.snapshot [--json FILE]

The time for which a training of 256 MiB is blocked: by one copy of the same bytes into memory that is there already,
by snapshot.save, and by torch.save, torch.distributed.checkpoint's save and async_save into a directory of TMPDIR; of
state that all ranks have, and of sharded state (DTensor), of which the process has all shards. And the times of a step
of docs/examples/digits.py and of the snapshot after it. One process and the memory of one agent; no
Slurm and no network.
"""

from __future__ import annotations

import itertools
import os
import runpy
import secrets
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict_saver as dcp
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from benchmarks.options import make_parser
from benchmarks.tables import Bar, Results, Table
from slurm_elastic import snapshot
from slurm_elastic.data import ElasticSampler
from slurm_elastic.snapshot.agent_side import AgentMemory
from slurm_elastic.snapshot.lineage import ALONE
from slurm_elastic.snapshot.transfer import Settings

_ROOT = Path(__file__).parents[1]
_TENSORS, _MIB = 64, 4
"""Tensors of the state, and the size of each."""
_TIMES = 15
_STEPS = 500


def main() -> int:
    """Measure and show."""
    options = make_parser("snapshot").parse_args()
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
    # As workers that share a machine; threads that wait for each other measure what else runs on it.
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    results = Results.of("snapshot")
    with tempfile.TemporaryDirectory() as directory:
        memory = AgentMemory(Path(directory), Settings(secrets.token_bytes(32), "benchmark", "", "node", "127.0.0.1"))
        os.environ |= memory.begin(0, "", ALONE) | {"LOCAL_RANK": "0", "SLURM_ELASTIC_ROUND": "0"}
        # The steps of both are of one round, and only grow.
        plain = {f"layer{index}": torch.rand(_MIB << 18) for index in range(_TENSORS)}
        _block(results, Path(directory), "Training", plain, first_step=1)
        mesh = init_device_mesh("cpu", (1,))
        sharded = {name: DTensor.from_local(tensor, mesh, [Shard(0)]) for name, tensor in plain.items()}
        _block(results, Path(directory), "Sharded training", sharded, first_step=500)
        _digits(results, first_step=1000)
        memory.close()
    dist.destroy_process_group()
    return results.finish(options.json)


def _block(results: Results, directory: Path, what: str, state: Mapping[str, torch.Tensor], first_step: int) -> None:
    state = dict(state)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    paths = iter(range(1_000_000))

    def copy() -> None:
        for name, tensor in state.items():
            target[name].copy_(tensor)

    def async_save() -> Callable[[], object]:
        future = dcp.async_save(state, checkpoint_id=str(directory / f"{next(paths)}"))
        assert isinstance(future, Future)
        return future.result

    ways: dict[str, Callable[[], Callable[[], object] | None]] = {
        "one copy (memcpy)": copy,
        "snapshot.save": lambda: snapshot.save(next(steps), model=state),
        "dcp.async_save": async_save,
        "dcp.save": lambda: dcp.save(state, checkpoint_id=str(directory / f"{next(paths)}")) and None,
        "torch.save": lambda: torch.save(state, directory / f"{next(paths)}"),
    }
    steps = itertools.count(first_step)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(3):
        # The memory of three snapshots is reserved, and touched.
        ways["snapshot.save"]()
    for turn in range(_TIMES):
        for name, way in ways.items():
            if turn >= 3 and name not in ("one copy (memcpy)", "snapshot.save"):
                continue
            begin = time.perf_counter()
            wait = way()
            taken[name].append(time.perf_counter() - begin)
            if wait is not None:
                wait()
            for path in directory.glob("[0-9]*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    size = _TENSORS * _MIB
    medians = {name: statistics.median(times) for name, times in taken.items()}
    base = medians["one copy (memcpy)"]
    table = Table(
        f"{what} of {size} MiB is blocked (s)",
        ["by", "median", "slowest", "times one copy"],
        note=f"The first two {_TIMES} times in turns, the others 3 times, into {tempfile.gettempdir()}.",
    )
    for name, times in taken.items():
        table.rows.append([name, f"{medians[name]:.3f}", f"{max(times):.3f}", f"{medians[name] / base:.2f}"])
    results.add(table)
    ratio = medians["snapshot.save"] / base
    text = f"{what.lower()} is blocked at most 1.3 times as long as by one copy"
    results.bars.append(Bar.at_most(text, ratio, 1.3, "times"))


def _digits(results: Results, first_step: int) -> None:
    digits = runpy.run_path(str(_ROOT / "docs/examples/digits.py"))
    train_set, _ = digits["load_data"]()
    torch.manual_seed(0)
    model = digits["make_model"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = ElasticSampler(len(train_set), 32, seed=0)
    progress = {"step": first_step}

    steps: list[float] = []
    saves: list[float] = []
    for _ in sampler.epochs(_STEPS):
        begin = time.perf_counter()
        for images, labels, _ids in DataLoader(train_set, batch_sampler=sampler):
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            progress["step"] += 1
            sampler.step()
            between = time.perf_counter()
            snapshot.save(progress["step"], model=model, optimizer=optimizer, sampler=sampler, progress=progress)
            steps.append(between - begin)
            begin = time.perf_counter()
            saves.append(begin - between)
        if len(steps) >= _STEPS:
            break
    table = Table(
        "Steps of docs/examples/digits.py with a snapshot after each, one process (ms)",
        ["", "median", "slowest"],
        note=f"{len(steps)} steps; without the all-reduce of several processes.",
    )
    for name, times in (("the step", steps), ("its snapshot", saves)):
        table.rows.append([name, f"{1000 * statistics.median(times):.3f}", f"{1000 * max(times):.3f}"])
    results.add(table)
    cost = 100 * statistics.median(saves) / statistics.median(steps)
    results.bars.append(Bar.at_most("a snapshot after every step costs under 5 % of the time", cost, 5.0, "%"))


if __name__ == "__main__":
    raise SystemExit(main())
