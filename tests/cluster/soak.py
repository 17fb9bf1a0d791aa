"""Random mishaps to one run on a real cluster, for as long as wanted; at the end every sample must have been used once.

    python3 -m tests.cluster.soak --minutes 60 --seed 7

An array of four trains the digits example while its nodes are preempted, killed, cut off and paused, one or two at a
time. The seed is printed, and names the same mishaps again. Exit code 0 if the run ended by itself, with every sample
of every epoch exactly once and nothing left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.cluster.conftest import CHECKOUT, VENV, remove_shared_directory, shared_directory
from tests.cluster.jobs import Job, Jobs
from tests.cluster.testbed import Cluster, Settings

MISHAPS = ("preempt", "kill", "cut", "pause", "preempt two")
SECONDS_PER_EPOCH = 3.0
"""With four workers on an idle machine of two cores."""


class Soak:
    """One run and what happens to it.

    Args:
        jobs: where it is submitted.
        seed: of the mishaps.
        minutes: how long they go on; the run is made about that long.
    """

    def __init__(self, jobs: Jobs, seed: int, minutes: float) -> None:
        self._jobs, self._cluster, self._rng = jobs, jobs.cluster, random.Random(seed)
        self._epochs = max(2, round(60 * minutes / SECONDS_PER_EPOCH))
        self._until = time.monotonic() + 60 * minutes

    def play(self) -> list[str]:
        """Train, let things happen, and return what is wrong at the end."""
        job = self._submit()
        job.wait_until("no training", lambda: bool(job.tables()) and len(job.tables()[-1]) == 4, 120)
        while time.monotonic() < self._until and not (job.run_dir / "done.json").exists():
            self._happen(self._rng.choice(MISHAPS), job)
            self._wait_for_progress(job)
            time.sleep(self._rng.uniform(0, 10))
        self._cluster.wait_until("the run does not end", lambda: (job.run_dir / "done.json").exists(), 600)
        self._jobs.wait_until_all_ended(120)
        return [*self._samples(job), *(f"left on {node}: {left}" for node, left in self._jobs.processes().items())]

    def _submit(self) -> Job:
        self._jobs.place(CHECKOUT / "sbatch_templates/array.sbatch")
        for name in ("digits.py", "count_samples.py"):
            self._jobs.place(CHECKOUT / "docs/examples" / name)
        training = f"digits.py --epochs {self._epochs} --step-time 0.03 --checkpoint-every 20 --checkpoint-dir ."
        return self._jobs.submit("--array=0-3", "array.sbatch", "--nnodes=1:4", *training.split(), "--record=records")

    def _happen(self, mishap: str, job: Job) -> None:
        nodes = self._rng.sample(self._cluster.settings.node_names, 2)
        seconds = self._rng.uniform(1, 15)
        print(f"{time.strftime('%H:%M:%S')} {mishap} {' '.join(nodes)} {seconds:.1f} s", flush=True)
        match mishap:
            case "preempt" | "preempt two":
                for node in nodes[: 1 if mishap == "preempt" else 2]:
                    self._jobs.take(node, seconds)
            case "kill":
                self._cluster.kill(nodes[0])
                time.sleep(seconds)
                self._cluster.start(nodes[0])
            case "cut":
                self._cluster.cut(nodes[0])
                time.sleep(seconds)
                self._cluster.heal(nodes[0])
            case "pause":
                agents = [p.pid for p in self._cluster.processes(nodes[0]) if " agent " in p.command]
                for number in (signal.SIGSTOP, signal.SIGCONT):
                    for pid in agents:
                        # It may have ended meanwhile.
                        if Path(f"/proc/{pid}").exists():
                            os.kill(pid, number)
                    time.sleep(seconds if number is signal.SIGSTOP else 0)

    def _wait_for_progress(self, job: Job) -> None:
        begin, before = time.monotonic(), _last_step(job)
        done = job.run_dir / "done.json"
        self._cluster.wait_until(
            f"no step after {before}", lambda: _last_step(job) > before or done.exists(), timeout=180
        )
        nodes = ", ".join(job.tables()[-1])
        print(f"{time.strftime('%H:%M:%S')} a step after {time.monotonic() - begin:.1f} s on {nodes}", flush=True)

    def _samples(self, job: Job) -> list[str]:
        command = [str(VENV / "bin/python"), "count_samples.py", "records", "checkpoint.pt"]
        counted = subprocess.run(command, cwd=job.directory, capture_output=True, text=True, check=False)
        lines = counted.stdout.splitlines()
        print(f"{len(lines)} epochs, exit code {counted.returncode}; rounds {len(job.tables())}")
        return [line for line in lines if "exactly once" not in line] + ([counted.stderr] if counted.stderr else [])


def _last_step(job: Job) -> int:
    """The newest step that rank 0 has recorded; a lost step comes again, so this may go back."""
    path = job.directory / "records.rank0.jsonl"
    if not path.exists():
        return 0
    for line in reversed(path.read_text().splitlines()):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if "step" in entry:
            return int(entry["step"])
    return 0


def main() -> int:
    """Run one soak from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="of mishaps (default: 60)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of the mishaps")
    parser.add_argument("--release", default="22.05", choices=["22.05", "24.11"], help="of Slurm")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    cluster = Cluster.up(Settings("soak", 4, "cgroup", False, options.release))
    directory = shared_directory("soak")
    try:
        wrong = Soak(Jobs(cluster, directory, VENV / "bin"), options.seed, options.minutes).play()
    except BaseException:
        print(f"kept: {directory}")
        raise
    finally:
        cluster.down()
    for line in wrong:
        print(line)
    if wrong:
        print(f"seed {options.seed} went wrong; kept: {directory}")
        return 1
    remove_shared_directory(directory)
    print("as it should be")
    return 0


if __name__ == "__main__":
    sys.exit(main())
