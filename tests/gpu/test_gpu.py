"""Agents, fork server and workers on GPUs."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.gpu.running import AGENT, TORCHRUN
from tests.gpu.worker import RESTARTS
from tests.local.agents import ROOT

FRAMEWORKS = ("torch", "numpy", "accelerate", "datasets", "transformers", "lightning", "torchdata", "triton")


def bare(uuid: str) -> str:
    """A UUID without what nvidia-smi puts before it, as torch has it (torch/csrc/cuda/Module.cpp, 2.13)."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-")


def forked(training) -> bool:
    """Return True if the workers were forked; else they started cold, and the agent has said why."""
    return "cold" not in training.agent.err


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_agent_and_its_fork_server_open_no_device(train, framework):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    training = train("devices", 1, f"--preload={framework}")
    (seen,) = workers = training.seen()
    assert forked(training), training.agent.err
    assert not seen["initialized"], "CUDA was initialized before the script"
    assert training.others_with_devices(workers) == {}
    training.finish()


def test_a_module_that_asks_for_gpus_at_its_import_keeps_none_open(train, tmp_path):
    (tmp_path / "asks.py").write_text("import torch\nFOUND = torch.cuda.is_available(), torch.cuda.device_count()\n")
    training = train("devices", 1, "--preload=asks", PYTHONPATH=f"{tmp_path}:{ROOT}")
    (seen,) = workers = training.seen()
    assert forked(training), training.agent.err
    asked = [True, seen["count"]], False, 64.0**3
    assert (seen["asked"], seen["initialized"], seen["product"]) == asked, training.agent.err
    assert training.others_with_devices(workers) == {}
    training.finish()


def test_a_module_that_uses_a_gpu_at_its_import_is_left_to_the_workers(train, tmp_path):
    (tmp_path / "uses.py").write_text("import torch\nONE = torch.ones(1, device='cuda')\n")
    training = train("devices", 1, "--preload=uses", PYTHONPATH=f"{tmp_path}:{ROOT}")
    (seen,) = workers = training.seen()
    assert forked(training), training.agent.err
    assert (seen["initialized"], seen["product"]) == (False, 64.0**3), training.agent.err
    assert "each worker imports uses itself: importing it" in training.agent.err
    assert training.others_with_devices(workers) == {}
    training.finish()


def test_each_worker_has_the_device_of_its_local_rank(train, devices):
    training = train("devices", len(devices))
    workers = training.seen()
    assert [record["uuid"] for record in workers] == [bare(uuid) for uuid in devices]
    assert {record["count"] for record in workers} == {len(devices)}
    assert {record["product"] for record in workers} == {64.0**3}
    training.finish()


@pytest.mark.parametrize("workers", ["gpu", "auto"])
def test_there_is_one_worker_for_each_gpu_that_slurm_has_bound(train, machine, workers):
    """Slurm gives a step the GPUs of CUDA_VISIBLE_DEVICES; here the last one, by its UUID."""
    last = machine[-1].device
    training = train("devices", 1, f"--nproc-per-node={workers}", CUDA_VISIBLE_DEVICES=last, SLURM_GPUS_ON_NODE="1")
    (seen,) = found = training.seen()
    assert (seen["visible"], seen["uuid"], seen["count"]) == (last, bare(last), 1)
    assert training.others_with_devices(found) == {}
    training.finish()


@pytest.mark.skipif(shutil.which("numactl") is None, reason="there is no numactl")
def test_a_forked_worker_has_the_cpus_near_its_gpu(train, devices):
    cpus = []
    for start in ("cold", "warm"):
        training = train("devices", len(devices), "--numa-binding=node", f"--start={start}")
        workers = training.seen()
        assert training.others_with_devices(workers) == {}
        cpus.append([record["cpus"] for record in workers])
        training.finish()
        training.forget()
    assert cpus[0] == cpus[1]


def test_pinned_memory_in_a_forked_worker(train):
    training = train("pinned", 1)
    (seen,) = training.seen()
    assert forked(training), training.agent.err
    assert seen["pinned"] == {"by_hand": True, "same": True, "loader": sum(range(64))}
    training.finish()


@pytest.mark.parametrize("start", ["warm", "cold"])
def test_nccl_reduces_over_all_gpus(train, devices, start):
    training = train("group", len(devices), f"--start={start}")
    assert {record["sum"] for record in training.seen()} == {float(sum(range(1, len(devices) + 1)))}
    training.finish()


def test_a_snapshot_of_tensors_on_the_gpu_outlives_a_worker(train):
    training = train("snapshot", 1, "--max-restarts=1")
    (before,), (after,) = training.seen(), training.seen(1)
    assert (before["loaded"], after["loaded"]) == (0, 3)
    assert after["loaded weights"] == before["weights"]
    assert after["kinds"] == ["cuda"]
    training.finish()


def test_lightning_by_half_precision_goes_on_from_memory(train):
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed")
    training = train("lightning", 1, "--max-restarts=1")
    (before,), (after,) = training.seen(), training.seen(1)
    assert (before["loaded"], after["loaded"]) == (0, 5)
    assert after["after loading"] == before["at the end"]
    assert after["after loading"]["kinds"] == ["cuda"]
    assert after["files"] == []
    training.finish()


def test_a_worker_that_hangs_in_a_kernel_is_killed_and_the_run_goes_on(train):
    training = train("hang", 1, "--max-restarts=1")
    (before,) = training.seen()
    (after,) = training.seen(1)
    assert after["pid"] != before["pid"]
    # The device is free again: the killed worker's kernel has ended with it.
    assert after["product"] == 64.0**3
    (stacks,) = training.allocation.run_dir.glob("logs/round_0000/*/rank_00/stacks.txt")
    assert f"process {before['pid']}," in stacks.read_text()
    training.finish()


def test_each_mig_instance_is_a_device(train, machine):
    instances = [instance for gpu in machine for instance in gpu.instances]
    if not instances:
        pytest.skip("no GPU of this machine is partitioned by MIG")
    # A process sees one instance only (NVIDIA, MIG User Guide, "CUDA Visible Devices").
    for instance in instances:
        training = train("devices", 1, CUDA_VISIBLE_DEVICES=instance)
        (seen,) = training.seen()
        assert (seen["visible"], seen["count"]) == (instance, 1)
        training.finish()
        training.forget()


@pytest.fixture
def open_device() -> Iterator[Callable[[], None]]:
    """Have another process open the first device until the test has ended."""
    opens = "import sys, torch; torch.ones(1, device='cuda'); print(flush=True); sys.stdin.read()"
    with ExitStack() as stack:

        def start() -> None:
            command = [sys.executable, "-c", opens]
            process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert process.stdout.readline() == b"\n"

        yield start


def test_the_times_of_starts_and_restarts_with_those_of_context_and_group(train, devices, report, open_device):
    """Workers fail five times; what follows is measured, context and group apart, and the same under torchrun.

    Once more while another process has the device open, as torchrun's agent does: a context costs less then.
    """
    starts = ("first start", AGENT), ("second start", AGENT), ("torchrun", TORCHRUN), ("device open", AGENT)
    for name, launcher in starts:
        if name == "device open":
            open_device()
        training = train("restart", len(devices), f"--max-restarts={RESTARTS}", launcher=launcher)
        report[f"start: {name}"], report[f"restart: {name}"] = training.start(), training.restarts()
        assert launcher == TORCHRUN or forked(training), training.agent.err
        training.finish()
        training.forget()
    assert 0 < report["restart: second start"]["CUDA context"] < report["restart: second start"]["whole"]


def test_the_cost_of_a_snapshot(train, report):
    training = train("cost", 1)
    (seen,) = training.seen()
    report["snapshot"] = seen["cost"]
    training.finish()
