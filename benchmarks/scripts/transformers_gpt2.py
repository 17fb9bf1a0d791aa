"""A tiny GPT-2 by the Trainer of transformers.

    transformers_gpt2.py [--steps N] [--elastic] [--mib N]

Everything is in the current directory: checkpoints in `out`, and `steps`. With `--elastic` it has the lines that
docs/howto/frameworks.md names; without, it is as users write it for torchrun. `--mib` adds so much of a weight that is
not trained.
"""

import argparse
import time
from pathlib import Path

import marks
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

marks.mark(reached="imported", at=time.time())


class Texts(torch.utils.data.Dataset):
    """Random tokens."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        tokens = torch.randint(0, 256, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Marks(TrainerCallback):
    """Writes steps down, and makes them last as long as others'."""

    def on_train_begin(self, args, state, control, **kwargs):
        marks.mark(reached="ready", at=time.time(), resumed=state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(0.05)
        marks.mark(step=time.time(), number=state.global_step)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100000)
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument("--mib", type=int, default=0)
    options = parser.parse_args()
    batch, callbacks = {"per_device_train_batch_size": 4}, [Marks()]
    if options.elastic:
        from slurm_elastic.integrations.transformers import ElasticCallback, batch_arguments, last_checkpoint

        batch, callbacks = batch_arguments(global_batch=48, micro_batch=4), [Marks(), ElasticCallback()]
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2))
    if options.mib:
        model.wide = torch.nn.Parameter(torch.zeros(options.mib, 1 << 18), requires_grad=False)
    marks.mark(reached="model", at=time.time())
    arguments = TrainingArguments(
        "out", **batch, max_steps=options.steps, save_steps=20, save_total_limit=3, logging_steps=1000,
        use_cpu=True, report_to="none", disable_tqdm=True, seed=1,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Texts(), callbacks=callbacks)
    last = last_checkpoint("out") if options.elastic else get_last_checkpoint("out") if Path("out").is_dir() else None
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
