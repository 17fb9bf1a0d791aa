"""A training for tests: a step is one all-reduce of the whole group, and leaves a line in the file of its rank.

    steps.py [--steps N] [--fail RANK [--fail-times N]] [--alone] [--asks [--stop-file FILE]] [WORD ...]

Everything is in the current directory: `steps/rank_<N>.jsonl` with one object per step, `step`, the checkpoint, and
`enough`, a file whose appearance ends the training. Times are of one machine, which all nodes of a test cluster share.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

CHECKPOINT, ENOUGH, STEPS = Path("step"), Path("enough"), Path("steps")
CHECKPOINT_EVERY = 4
FAIL_AHEAD = 2.0
"""Seconds by which a worker that is told to fail does so before the others miss it, which then fail, too."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=0, help="end after this step; else when there is `enough`")
    parser.add_argument("--step-time", type=float, default=0.05)
    parser.add_argument("--fail", type=int, help="this rank fails in its third step since it started")
    parser.add_argument("--fail-times", type=int, default=1000, help="only so many times in the whole run")
    parser.add_argument(
        "--alone", action="store_true", help="no group: every worker takes its own steps, without torch"
    )
    parser.add_argument("--asks", action="store_true", help="ask before each step whether to save and stop")
    parser.add_argument("--stop-file", type=Path, help="with --asks: stop only when there is this file")
    parser.add_argument("words", nargs="*", help="written down with every step")
    return parser.parse_args()


class Diary:
    """What this worker did, a line each."""

    def __init__(self, words: list[str]) -> None:
        STEPS.mkdir(exist_ok=True)
        self._file = (STEPS / f"rank_{os.environ['RANK']}.jsonl").open("a", buffering=1)
        self._same = {
            "rank": int(os.environ["RANK"]),
            "world": int(os.environ["WORLD_SIZE"]),
            "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
            "round": int(os.environ.get("SLURM_ELASTIC_ROUND", -1)),
            "reason": os.environ.get("SLURM_ELASTIC_REASON"),
            # Slurm's own name for the node, which torchrun's workers see too.
            "node": os.environ.get("SLURMD_NODENAME"),
            "pid": os.getpid(),
            "words": words,
        }

    def write(self, **fields: Any) -> None:
        times = {"time": time.time(), "monotonic": time.monotonic()}
        self._file.write(json.dumps({**self._same, **times, **fields}) + "\n")


class Group:
    """All workers of the round; they agree on when it is enough."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        dist.init_process_group("gloo")

    def resume(self) -> int:
        step = self._torch.tensor(_saved() if self._dist.get_rank() == 0 else 0)
        self._dist.broadcast(step, src=0)
        return int(step)

    def step(self, enough: bool) -> bool:
        said = self._torch.tensor([1.0, float(enough)])
        self._dist.all_reduce(said)
        assert said[0] == self._dist.get_world_size()
        return bool(said[1])

    def leave(self) -> None:
        self._dist.barrier()
        self._dist.destroy_process_group()


class Alone:
    """One worker without a group."""

    def resume(self) -> int:
        return _saved()

    def step(self, enough: bool) -> bool:
        return enough

    def leave(self) -> None:
        pass


def _saved() -> int:
    return int(CHECKPOINT.read_text()) if CHECKPOINT.exists() else 0


def save(step: int) -> None:
    temporary = CHECKPOINT.with_suffix(".tmp")
    temporary.write_text(str(step))
    temporary.replace(CHECKPOINT)


def main() -> None:
    args = parse_arguments()
    diary = Diary(args.words)

    def end(signum: int, frame: FrameType | None) -> None:
        diary.write(signal=signal.Signals(signum).name)
        sys.exit(0)

    if args.asks:
        from slurm_elastic import trainer
    else:
        signal.signal(signal.SIGTERM, end)
    group = Alone() if args.alone else Group()
    rank = int(os.environ["RANK"])
    first = step = group.resume()
    fails = args.fail is not None and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < args.fail_times
    # Rank 0 may have saved the last step already: before another rank has started, or in a round that has ended since.
    enough = 0 < args.steps <= first
    while not enough:
        step += 1
        if fails and step == first + 3:
            if rank == args.fail:
                raise RuntimeError(f"rank {rank} fails as it was told to")
            time.sleep(FAIL_AHEAD)
        enough = group.step(step == args.steps or (not args.steps and ENOUGH.exists()))
        diary.write(step=step)
        stop = trainer.should_stop(step) if args.asks else None
        if rank == 0 and (enough or stop or step % CHECKPOINT_EVERY == 0):
            save(step)
        if stop:
            diary.write(stop=stop.reason, seconds=stop.seconds_left)
            while args.stop_file and not args.stop_file.exists():
                time.sleep(0.05)
            break
        if not enough:
            time.sleep(args.step_time)
    group.leave()


if __name__ == "__main__":
    main()
