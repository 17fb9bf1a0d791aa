"""A training script without torch whose ranks go step by step together, and stop where the trainer API says.

``steps.<rank>`` gets a line for every step: round, step, rank, monotonic time; ``pid.<rank>`` names the process.
Ranks wait for each other after every step by files, as in a collective. A step takes the seconds in the file
``pace``; with ``0.01`` there, a rank that has read it makes ``in-0.01.<rank>``.

Arguments: ``on-signal`` makes the ranks take no part, but save and end well on SIGUSR1;
``on-term`` makes them end well on SIGTERM; ``slow-to-save`` makes a checkpoint take five minutes; ``snapshots`` makes
them take a snapshot after every step, and no checkpoint; then, if there is a file ``poison``, they fail after step 6 of
round 0, and after they have resumed until the round in the file; ``disk`` has snapshots written to ``checkpoints``;
``own`` gives each rank a state of its own in them.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

RANK, WORLD, ROUND = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "SLURM_ELASTIC_ROUND"))
CHECKPOINT = Path("checkpoint")
told = []


def write(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.{RANK}")
    part.write_text(text)
    part.rename(path)


def meet(step: int) -> bool:
    """Wait until all ranks are at this step; whether it is the last one, which rank 0 decides for all of them."""
    last = step if RANK == "0" and Path("finish").exists() else 0
    write(Path(f"at.{ROUND}.{RANK}"), f"{step} {last}")
    for rank in range(int(WORLD)):
        path = Path(f"at.{ROUND}.{rank}")
        while not told and (not path.exists() or int(path.read_text().split()[0]) < step):
            time.sleep(0.001)
    return not told and int(Path(f"at.{ROUND}.0").read_text().split()[1]) == step


def save(step: int) -> None:
    if "slow-to-save" in sys.argv:
        time.sleep(300)
    if RANK == "0":
        write(CHECKPOINT, str(step))


def main() -> int:
    if "on-signal" in sys.argv:
        signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
    if "on-term" in sys.argv:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    write(Path(f"pid.{RANK}"), str(os.getpid()))
    asks = "on-signal" not in sys.argv
    if asks:
        from slurm_elastic import trainer
    snapshots = "snapshots" in sys.argv
    own: dict[str, object] = {"per_rank": {"rank": RANK}} if "own" in sys.argv else {}
    step = int(CHECKPOINT.read_text()) if CHECKPOINT.exists() else 0
    if snapshots:
        from slurm_elastic import snapshot

        if "disk" in sys.argv:
            snapshot.to_disk("checkpoints", every=0)
        step = snapshot.load(step=step, **{name: [] for name in own})
        step = step[0] if own else step
    print(f"resumed at {step}", flush=True)
    poisoned = int(Path("poison").read_text()) if Path("poison").exists() else -1
    if 0 < int(ROUND) <= poisoned:
        return 1
    with Path(f"steps.{RANK}").open("a", buffering=1) as log:
        finished = False
        while not finished:
            pace = Path("pace").read_text()
            Path(f"in-{pace}.{RANK}").touch()
            time.sleep(float(pace))
            step += 1
            finished = meet(step)
            log.write(f"{ROUND} {step} {RANK} {time.monotonic():.4f}\n")
            if snapshots:
                snapshot.save(step, step=step, **own)
                if step == 6 and int(ROUND) == 0 <= poisoned:
                    return 1
            if asks and not finished and (stop := trainer.should_stop(step)):
                if not snapshots:
                    save(step)
                meet(step + 1)
                print(f"stops after {step}: {stop.reason}", flush=True)
                return 0
            if told:
                save(step)
                return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
