"""The losses of a run against those of a training that nothing disturbed, as exact_digits.py writes them down."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path


def wrong_losses(run: Path, undisturbed: Path) -> list[str]:
    """What is wrong with the losses of a run; prints what was compared.

    Args:
        run: the directory of its records.
        undisturbed: that of the other training.
    """
    found, right = _losses(run), {step: loss for step, (loss,) in _losses(undisturbed).items()}
    last = max(found, default=0)
    print(f"losses: {len(found)} steps, the last is {last}; without mishaps {len(right)}")
    wrong = [f"step {step} of {last} was not taken" for step in range(1, last + 1) if step not in found]
    if last != max(right, default=0):
        wrong.append(f"the last step is {last}, without mishaps {max(right, default=0)}")
    wrong += [
        f"step {step} had the loss {sorted(losses)}, without mishaps {right.get(step)}"
        for step, losses in sorted(found.items())
        if losses != {right.get(step)}
    ]
    return wrong[:10]


def _losses(directory: Path) -> dict[int, set[int]]:
    """The losses that ranks have written down, by step; a step may have been taken more than once."""
    found: dict[int, set[int]] = {}
    for path in directory.glob("losses.rank*.jsonl"):
        for line in path.read_text().splitlines():
            # One that was cut short by the death of its rank.
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                found.setdefault(entry["step"], set()).add(entry["loss"])
    return found
