"""Count whether digits.py trained on every sample of every epoch exactly once, through all its restarts.

    python digits.py --record records/digits --checkpoint-dir checkpoints
    python count_samples.py records/digits checkpoints/checkpoint.pt

The records are files PREFIX.rank<N>.jsonl, one per rank, appended to by every start of the run. A step that was taken
after the last checkpoint is lost with its start and taken again by the next one; what counts is what went into the
checkpoint. That is, for each step up to the checkpoint's, what the last start that resumed before this step recorded.
Exit status: 0 when every count is right, 1 when one is not.
"""

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass
class Count:
    """How often the samples of one epoch were trained on."""

    epoch: int
    expected: int  # samples of the epoch that the checkpoint says were consumed
    once: int = 0
    repeated: int = 0

    @property
    def right(self) -> bool:
        return self.once == self.expected and self.repeated == 0

    def __str__(self) -> str:
        missing = self.expected - self.once - self.repeated
        verdict = "exactly once" if self.right else f"WRONG: {missing} missing, {self.repeated} more than once"
        return f"epoch {self.epoch}: {self.once} of {self.expected} samples once, {verdict}"


def read_records(prefix: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The starts in their order, and the steps of all ranks.

    Every start has a rank 0, so the file of rank 0 has all starts.
    """
    starts: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    for path in sorted(prefix.parent.glob(f"{prefix.name}.rank*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:  # empty, or cut short by the death of its rank
                continue
            if "samples" in entry:
                steps.append(entry)
            elif path.name == f"{prefix.name}.rank0.jsonl":
                starts.append(entry)
    return starts, steps


def count_samples(prefix: Path, checkpoint: Path) -> list[Count]:
    """Count per epoch; raises FileNotFoundError without a checkpoint and ValueError without records."""
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    epochs, consumed = saved["sampler"]["epoch"], saved["sampler"]["consumed"]
    starts, steps = read_records(prefix)
    if not starts:
        raise ValueError(f"no records at {prefix}.rank*.jsonl; was digits.py started with --record {prefix}?")

    counting_start: dict[int, int] = {}
    for start in starts:
        counting_start.update(dict.fromkeys(range(start["resumed_at"] + 1, saved["step"] + 1), start["start"]))
    seen: dict[int, Counter[int]] = {}
    for step in steps:
        if counting_start.get(step["step"]) == step["start"]:
            seen.setdefault(step["epoch"], Counter()).update(step["samples"])

    counts = []
    for epoch in range(epochs + 1):
        finished = epoch < epochs
        times = seen.get(epoch, Counter())
        once = sum(1 for n in times.values() if n == 1)
        expected = starts[0]["dataset_size"] if finished else consumed
        counts.append(Count(epoch, expected, once, repeated=len(times) - once))
    return [count for count in counts if count.expected or count.once or count.repeated]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("prefix", type=Path, help="what digits.py was given as --record")
    parser.add_argument("checkpoint", type=Path, help="its checkpoint.pt")
    args = parser.parse_args()
    try:
        counts = count_samples(args.prefix, args.checkpoint)
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(*counts, sep="\n")
    return 0 if all(count.right for count in counts) else 1


if __name__ == "__main__":
    sys.exit(main())
