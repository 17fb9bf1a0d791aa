"""Frameworks save and stop where they are told to, and go on there in another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.local import frameworks

CHECKOUT = Path(__file__).parents[2]
ENVIRONMENT = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "OMP_NUM_THREADS"), "1")
ENVIRONMENT |= {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
ENVIRONMENT["TORCHELASTIC_RUN_ID"] = "7"

TOLD = """
import json, os, sys
from slurm_elastic import trainer

trainer.should_stop = lambda step: "preempted" if step == int(sys.argv[1]) else None
trainer.report_checkpoint = lambda step: print(json.dumps({"checkpointed": step}), flush=True)
"""

LIGHTNING = """
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset
from slurm_elastic.data import ElasticSampler
from slurm_elastic.integrations.lightning import ElasticCallback, elastic_world

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        print(json.dumps({"epoch": self.current_epoch, "samples": batch[0].flatten().int().tolist()}), flush=True)
        return self.layer(batch[0]).sum()
    def validation_step(self, batch, batch_idx):
        print(json.dumps({"validated": self.current_epoch}), flush=True)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

sampler = ElasticSampler(21, batch_size=4)
data = TensorDataset(torch.arange(21.0).reshape(-1, 1))
fit = Trainer(
    **{**elastic_world(), **json.loads(sys.argv[2])}, accelerator="cpu", max_epochs=3, min_epochs=2, logger=False,
    enable_progress_bar=False, enable_model_summary=False,
    callbacks=[ElasticCallback(sampler), ModelCheckpoint("out", save_last=True)],
)
fit.fit(Model(), DataLoader(data, batch_sampler=sampler), DataLoader(data, batch_size=21), ckpt_path="last")
print(json.dumps({"ended": fit.global_step}))
"""

TRANSFORMERS = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from slurm_elastic.integrations.transformers import ElasticCallback, batch_arguments, last_checkpoint

class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        print(json.dumps({"sample": index}), flush=True)
        return {"input_ids": torch.full((4,), index), "labels": torch.full((4,), index)}

model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=8, n_embd=8, n_layer=1, n_head=1))
arguments = TrainingArguments(
    "out", **batch_arguments(global_batch=8, **json.loads(sys.argv[2])), num_train_epochs=2, save_strategy="epoch",
    use_cpu=True, report_to="none", disable_tqdm=True,
)
trainer_ = Trainer(model, arguments, train_dataset=Texts(), callbacks=[ElasticCallback()])
trainer_.train(resume_from_checkpoint=last_checkpoint("out"))
print(json.dumps({"ended": trainer_.state.global_step}))
"""


ACCELERATE = """
import pathlib, torch
from accelerate import Accelerator
from slurm_elastic.data import ElasticSampler, batch_plan

plan = batch_plan(global_batch=8, **json.loads(sys.argv[2]))
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=plan.accumulation)
data = torch.utils.data.TensorDataset(torch.arange(40.0).reshape(-1, 1))
sampler = ElasticSampler(len(data), batch_size=plan.micro_batch * accelerator.num_processes)
torch.manual_seed(0)
layer = torch.nn.Linear(1, 1)
model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.001))
accelerator.register_for_checkpointing(sampler)
if pathlib.Path("out").exists():
    accelerator.load_state("out")
    accelerator.step = 0
steps = 0
for epoch in sampler.epochs(2):
    for (inputs,) in torch.utils.data.DataLoader(data, batch_sampler=sampler):
        print(json.dumps({"samples": inputs.flatten().int().tolist()}), flush=True)
        with accelerator.accumulate(model):
            accelerator.backward((model(inputs) / 40 - 1).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        sampler.step()
        if not accelerator.sync_gradients:
            continue
        steps += 1
        if trainer.should_stop(steps):
            accelerator.save_state("out")
            sys.exit()
print(json.dumps({"ended": steps, "weight": layer.weight.item()}))
"""


def run(
    script: str, directory: Path, stop: int, environ: dict[str, str] | None = None, **arguments: Any
) -> tuple[list[dict[str, Any]], str]:
    """Run a script that is told to stop after a step; the objects that it printed, and what it said."""
    command = [str(frameworks.PYTHON), "-c", TOLD + script, str(stop), json.dumps(arguments)]
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(CHECKOUT), **(environ or {})}
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=120)
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    return [{"exit": done.returncode}, *said], done.stderr


def values(said: list[dict[str, Any]], key: str) -> list[Any]:
    return [each[key] for each in said if key in each]


@pytest.fixture(autouse=True)
def _frameworks() -> None:
    frameworks.require()


@pytest.mark.nightly
def test_lightning_trains_on_every_sample_of_every_epoch_once_through_a_stop(tmp_path: Path) -> None:
    first, stderr = run(LIGHTNING, tmp_path, stop=9)
    assert values(first, "exit") == [0], stderr
    # That of ModelCheckpoint after the first epoch, and its own.
    assert values(first, "checkpointed") == [6, 9]
    assert values(first, "ended") == [], "what follows the training is for the round that finishes it"
    assert values(first, "validated")[-1] == 0, "nothing is validated once it is told to stop"
    second, stderr = run(LIGHTNING, tmp_path, stop=-1)
    assert values(second, "ended") == [18], stderr
    seen = Counter((each["epoch"], sample) for each in [*first, *second] for sample in each.get("samples", ()))
    assert seen == Counter((epoch, sample) for epoch in range(3) for sample in range(21))


def test_lightning_does_not_train_alone_on_each_node(tmp_path: Path) -> None:
    said, stderr = run(LIGHTNING, tmp_path, -1, {"WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}, num_nodes=1)
    assert values(said, "exit") == [1]
    assert "ValueError: devices=1 and num_nodes=1 make 1 ranks, this round has 2: " in stderr


@pytest.mark.nightly
def test_accelerate_goes_on_with_another_division_of_its_batch(tmp_path: Path) -> None:
    undisturbed, stderr = run(ACCELERATE, tmp_path, stop=-1, micro_batch=4)
    assert values(undisturbed, "ended") == [10], stderr
    first, stderr = run(ACCELERATE, tmp_path, stop=3, micro_batch=4)
    assert values(first, "exit") == [0], stderr
    second, stderr = run(ACCELERATE, tmp_path, stop=-1, micro_batch=2)
    assert values(second, "ended") == [7], stderr
    seen = Counter(sample for samples in values([*first, *second], "samples") for sample in samples)
    assert seen == Counter([*range(40)] * 2)
    assert values(second, "weight") == pytest.approx(values(undisturbed, "weight"), abs=1e-6)


@pytest.mark.nightly
def test_transformers_goes_on_in_the_middle_of_an_epoch_with_another_division_of_its_batch(tmp_path: Path) -> None:
    first, stderr = run(TRANSFORMERS, tmp_path, stop=3, micro_batch=4)
    assert values(first, "exit") == [0], stderr
    assert values(first, "checkpointed") == [3]
    assert values(first, "ended") == []
    # As a lost node leaves one behind.
    (tmp_path / "out" / "checkpoint-9").mkdir()
    second, stderr = run(TRANSFORMERS, tmp_path, stop=-1, micro_batch=8)
    assert values(second, "ended") == [10], stderr
    # The loader skips whole batches without taking their samples.
    trained = values(first, "sample")[:24] + values(second, "sample")
    assert Counter(trained) == Counter([*range(40)] * 2)


MEMORY = """
import hashlib, pathlib, torch
from slurm_elastic import snapshot

def save(step, **state):
    torch.save(state, "new")
    os.replace("new", "memory")

def load(**state):
    found = torch.load("memory") if pathlib.Path("memory").exists() else state
    return tuple(found[name] for name in state)

snapshot.save, snapshot.load, trainer.is_managed = save, load, lambda: True
"""

KILLED_TRANSFORMERS = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from slurm_elastic.integrations.transformers import ElasticCallback, last_checkpoint

class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return {"input_ids": torch.full((4,), index), "labels": torch.full((4,), index)}

class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print(json.dumps({"step": state.global_step}), flush=True)
        if state.global_step == int(sys.argv[1]):
            os._exit(9)

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=8, n_embd=8, n_layer=1, n_head=1))
arguments = TrainingArguments(
    "out", per_device_train_batch_size=8, num_train_epochs=2, save_strategy="no", logging_steps=2, use_cpu=True,
    report_to="none", disable_tqdm=True,
)
fit = Trainer(model, arguments, train_dataset=Texts(), callbacks=[Kill(), ElasticCallback()])
fit.train(resume_from_checkpoint=last_checkpoint("out"))
weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
logged = [{name: each[name] for name in ("step", "learning_rate") if name in each} for each in fit.state.log_history]
print(json.dumps({"weights": hashlib.sha256(weights).hexdigest(), "logged": logged}))
"""

KILLED_LIGHTNING = """
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset
from slurm_elastic.data import ElasticSampler
from slurm_elastic.integrations.lightning import ElasticCallback, elastic_world, last_checkpoint

class Model(LightningModule):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    def training_step(self, batch, batch_idx):
        return self.layers(batch[0] / 40).square().mean()
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}]

class Kill(Callback):
    def on_train_batch_end(self, fit, model, outputs, batch, batch_idx):
        print(json.dumps({"step": fit.global_step}), flush=True)
        if fit.global_step == int(sys.argv[1]):
            os._exit(9)

seed_everything(7)
sampler = ElasticSampler(40, batch_size=8)
data = TensorDataset(torch.arange(40.0).reshape(-1, 1))
fit = Trainer(
    **elastic_world(), accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[Kill(), ElasticCallback(sampler)], enable_checkpointing=False,
    default_root_dir="out",
)
model = Model()
fit.fit(model, DataLoader(data, batch_sampler=sampler), ckpt_path=last_checkpoint("out"))
weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
print(json.dumps({"weights": hashlib.sha256(weights).hexdigest(), "logged": fit.optimizers[0].param_groups[0]["lr"]}))
"""


@pytest.mark.nightly
@pytest.mark.parametrize("script", [KILLED_TRANSFORMERS, KILLED_LIGHTNING], ids=["transformers", "lightning"])
def test_a_killed_worker_costs_one_step_and_no_bit_without_any_checkpoint(tmp_path: Path, script: str) -> None:
    (tmp_path / "undisturbed").mkdir()
    undisturbed, stderr = run(MEMORY + script, tmp_path / "undisturbed", stop=-1)
    assert values(undisturbed, "exit") == [0], stderr
    first, stderr = run(MEMORY + script, tmp_path, stop=7)
    assert values(first, "exit") == [9], stderr
    second, stderr = run(MEMORY + script, tmp_path, stop=-1)
    assert values(second, "step") == [7, 8, 9, 10], stderr
    assert [values(second, key) for key in ("weights", "logged")] == [
        values(undisturbed, key) for key in ("weights", "logged")
    ]
    assert [*tmp_path.glob("out/*")] == []


@pytest.mark.nightly
def test_lightning_writes_files_before_it_has_read_the_checkpoint_in_memory(tmp_path: Path) -> None:
    first, stderr = run(MEMORY + KILLED_LIGHTNING, tmp_path, stop=7)
    assert values(first, "exit") == [9], stderr
    saves = "fit.strategy.checkpoint_io.save_checkpoint({}, 'early.ckpt')"
    early = f"def on_fit_start(self, fit, model):\n        {saves}\n    def on_train_batch_end("
    script = KILLED_LIGHTNING.replace("def on_train_batch_end(", early)
    second, stderr = run(MEMORY + script, tmp_path, stop=-1)
    assert values(second, "step") == [7, 8, 9, 10], stderr
    assert (tmp_path / "early.ckpt").exists()


@pytest.mark.nightly
def test_lightning_says_what_keeps_its_checkpoints_out_of_memory(tmp_path: Path) -> None:
    keeps = "fit.lightning_module.on_save_checkpoint = lambda checkpoint: checkpoint.update(mine=pathlib.Path('here'))"
    in_the_way = f"def on_train_start(self, fit, model):\n        {keeps}\n    def on_train_batch_end("
    script = KILLED_LIGHTNING.replace("def on_train_batch_end(", in_the_way)
    said, stderr = run(MEMORY + script, tmp_path, stop=-1)
    assert values(said, "step") == [*range(1, 11)], stderr
    assert stderr.count("no snapshots are taken, a lost node costs the steps since the last checkpoint: ") == 1, stderr
    assert not (tmp_path / "memory").exists()


OBSTACLES = """
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import TrainingArguments
from slurm_elastic.integrations import transformers

arguments = TrainingArguments("out", use_cpu=True, auto_find_batch_size=True)
if json.loads(sys.argv[2]):
    # Accelerate 1.15 has FSDP for accelerators alone: to it, the CPU is one.
    assert arguments.device.type == "cpu"
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**json.loads(sys.argv[2])))
else:
    Accelerator(cpu=True)
print(json.dumps({"obstacle": transformers._obstacle(arguments, torch.nn.Linear(1, 1))}))
"""


@pytest.mark.nightly
def test_what_keeps_a_state_of_transformers_out_of_memory_is_named(tmp_path: Path) -> None:
    for expected, arguments in (
        ("auto_find_batch_size is set", {}),
        ("auto_find_batch_size is set", {"fsdp_version": 2}),
        ("FSDP1 has no names for its shards; fsdp_config={'version': 2} has", {"fsdp_version": 1}),
    ):
        said, stderr = run(OBSTACLES, tmp_path, stop=-1, **arguments)
        assert values(said, "obstacle") == [expected], stderr


ENDS = """
import atexit
import os
import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, its functions have the process group as a default, and keep it
from slurm_elastic.elastic_state import end_worker

def gloo_threads():
    names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
    return sum("gloo" in name for name in names)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
before = gloo_threads()
atexit.register(lambda: print(before, gloo_threads()))
try:
    end_worker()
finally:
    model._get_ddp_logging_data()  # as lightning does on its way out
"""


def test_a_worker_that_ends_has_no_thread_of_gloo_left(tmp_path: Path) -> None:
    # A DistributedDataParallel that owned the process group longer would wait for its threads with the GIL.
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(CHECKOUT)}
    ended = subprocess.run([sys.executable, "-c", ENDS], cwd=tmp_path, env=env, capture_output=True, text=True)
    before, after = map(int, ended.stdout.split())
    # Two with torch 2.11, three with later ones.
    assert (before > 0, after, ended.returncode) == (True, 0, 0), ended.stderr
