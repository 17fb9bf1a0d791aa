"""Trains a tiny Llama that is sharded by FSDP2, by the Trainer of Transformers.

    sharded_transformers.py fsdp2|load [EXIT_AT]

`fsdp2` has Trainer shard it, `load` shards it when it is loaded. Rank 1 of the first round exits after step EXIT_AT.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig

from slurm_elastic.integrations.transformers import ElasticCallback, batch_arguments, last_checkpoint

KIND = sys.argv[1]
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.full((4,), index % 64), "labels": torch.full((4,), index % 64)}


class Steps(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if RANK == 0:
            told = {"round": int(os.environ["SLURM_ELASTIC_ROUND"]), "world": WORLD, "step": state.global_step}
            print(json.dumps(told), flush=True)
        if sys.argv[2:] == [str(state.global_step)] and RANK == 1 and os.environ["SLURM_ELASTIC_ROUND"] == "0":
            os._exit(9)
        time.sleep(0.02)


arguments = TrainingArguments(
    "out", **batch_arguments(global_batch=12, micro_batch=2), max_steps=int(os.environ.get("STEPS", "12")),
    save_strategy="no", logging_steps=3, use_cpu=True, report_to="none", disable_tqdm=True, seed=1,
    fsdp=KIND == "fsdp2",
)  # fmt: skip
config = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, attention_dropout=0.1,
)  # fmt: skip
torch.manual_seed(0)
model = LlamaForCausalLM(config)
assert arguments.device.type == "cpu", "Accelerate joins the process group here"
if KIND == "load":
    place = f"model-{os.environ['SLURM_ELASTIC_ROUND']}"
    model.save_pretrained(place)
    dist.barrier()
    model = LlamaForCausalLM.from_pretrained(place, distributed_config=DistributedConfig(fsdp_size=WORLD))
else:
    # Accelerate 1.15 has FSDP for accelerators alone: to it, the CPU is one.
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
trainer = Trainer(model, arguments, train_dataset=Texts(), callbacks=[Steps(), ElasticCallback()])
trainer.train(resume_from_checkpoint=last_checkpoint("out"))
weights = [each.full_tensor() for each in trainer.model.parameters()]
if RANK == 0:
    digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in weights)).hexdigest()
    print(json.dumps({"sharded": hasattr(next(trainer.model.parameters()), "device_mesh"), "weights": digest}))
dist.barrier()
