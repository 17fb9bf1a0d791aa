"""Train a tiny GPT-2 by the Trainer of Transformers, at any number of ranks.

    torchrun --nproc-per-node 2 transformers_trainer.py
    sbatch elastic.sbatch transformers_trainer.py

Every step has the same texts, whatever the number of ranks is. The directory of checkpoints has to be visible to all
nodes.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from slurm_elastic import trainer
from slurm_elastic.integrations.transformers import ElasticCallback, batch_arguments, last_checkpoint

TEXTS, LENGTH, VOCABULARY = 192, 16, 256


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Texts in which each token is the one before it plus the first one."""

    def __len__(self) -> int:
        return TEXTS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = index * torch.arange(1, LENGTH + 1) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


class RecordingTrainer(Trainer):
    """Tells a rehearsal which texts it trains on; a Trainer does without it."""

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        trainer.record_samples(int(self.state.epoch or 0), inputs["input_ids"][:, 0].tolist())
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        return loss


def parse_arguments() -> argparse.Namespace:
    run_dir = os.environ.get("SLURM_ELASTIC_RUN_DIR")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=24, help="texts per step of the whole group")
    parser.add_argument("--checkpoint-dir", type=Path, default=Path(run_dir or ".", "checkpoints"))
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0,
                   embd_pdrop=0.0, attn_pdrop=0.0)
    )  # fmt: skip
    arguments = TrainingArguments(
        str(args.checkpoint_dir), **batch_arguments(args.batch_size, micro_batch=4), num_train_epochs=args.epochs,
        save_steps=args.checkpoint_every, save_total_limit=2, logging_steps=1, use_cpu=not torch.cuda.is_available(),
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    training = RecordingTrainer(model, arguments, train_dataset=Texts(), callbacks=[ElasticCallback()])
    training.train(resume_from_checkpoint=last_checkpoint(args.checkpoint_dir))


if __name__ == "__main__":
    main()
