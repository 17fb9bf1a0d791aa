"""digits.py as it is, that also writes down what takes how long, and trains until it is told that it is enough.

Everything is in the current directory: `times/<round>.<rank>.jsonl`, and `epochs`, a file with the number of epochs
after which the training ends; it has to be written two epochs before, so that all ranks read the same.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

BEGUN = time.monotonic()

import digits  # noqa: E402
from digits import dist, trainer  # noqa: E402

EPOCHS, TIMES = Path("epochs"), Path("times")


class Diary:
    """What this worker did and when, by the monotonic clock that all nodes of a test cluster share."""

    def __init__(self) -> None:
        TIMES.mkdir(exist_ok=True)
        name = f"{int(os.environ['SLURM_ELASTIC_ROUND']):04d}.{os.environ['RANK']}.jsonl"
        self._file = (TIMES / name).open("a", buffering=1)

    def write(self, what: str, at: float | None = None, **fields: Any) -> None:
        self._file.write(json.dumps({"what": what, "at": at or time.monotonic(), **fields}) + "\n")


class Enough:
    """The number of epochs, as the file has it whenever the training compares it with the epochs behind it."""

    def __gt__(self, epoch: int) -> bool:
        return not EPOCHS.exists() or int(EPOCHS.read_text()) > epoch


def main() -> None:
    diary = Diary()
    diary.write("began", BEGUN, pid=os.getpid())
    diary.write("imported")
    join, load, save, ask = digits.join_group, digits.load_checkpoint, digits.save_checkpoint, trainer.should_stop
    parse = digits.parse_arguments

    def parse_arguments() -> argparse.Namespace:
        arguments = parse()
        arguments.epochs = Enough()
        return arguments

    def join_group() -> Any:
        device = join()
        diary.write("met")
        return device

    def load_checkpoint(*arguments: Any) -> Any:
        checkpoint = load(*arguments)
        diary.write("loaded")
        return checkpoint

    def save_checkpoint(*arguments: Any) -> None:
        begin = time.monotonic()
        save(*arguments)
        diary.write("saved", seconds=time.monotonic() - begin)

    def should_stop(step: int) -> Any:
        diary.write("step", step=step)
        stop = ask(step)
        if stop:
            diary.write("told", reason=stop.reason)
        return stop

    digits.parse_arguments, digits.join_group, digits.load_checkpoint = parse_arguments, join_group, load_checkpoint
    digits.save_checkpoint, trainer.should_stop = save_checkpoint, should_stop
    digits.main()
    assert not dist.is_initialized()
    diary.write("ended")


if __name__ == "__main__":
    main()
