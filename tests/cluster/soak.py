"""Random mishaps to one run on a real cluster, for as long as wanted; at the end every sample must have been used once.

    python3 -m tests.cluster.soak --minutes 60 --seed 7
    python3 -m tests.cluster.soak --mishaps preempt --times 20
    python3 -m tests.cluster.soak --snapshots --minutes 10
    python3 -m tests.cluster.soak --replace --neighbour --minutes 30

An array of four trains the digits example while its nodes are preempted, killed, cut off and paused, one or more at a
time. The seed is printed, and names the same mishaps again. With --times each mishap waits until all four train again,
and what it has cost is printed. Exit code 0 if the run ended by itself, with the accuracy that digits.py reaches, every
sample of every epoch exactly once and nothing left behind or leaked, and the report of the run is right: its buckets
are the time that the agents lived, within 1 %, its repeated steps those of the recorded samples, and its page is
without errors in Chromium. With --times a preemption may cost no step and no restart either.

With --snapshots the state is in the agents' memory, with copies on another node. Each step, also one that was taken
again, must have had the loss that it has in a training on one rank that nothing disturbs.

With --replace the run begins as one job on three nodes, and gets lost ones back by --replace-lost.

With --neighbour another ordinary user does on each node, all the time, what tests/local/neighbour.py can.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from tests.cluster.conftest import CHECKOUT, VENV, own_environment, remove_shared_directory, shared_directory
from tests.cluster.gaps import change, formed, has_stepped, summary
from tests.cluster.jobs import Job, Jobs
from tests.cluster.leaks import Leaks
from tests.cluster.losses import wrong_losses
from tests.cluster.neighbours import Neighbours
from tests.cluster.reports import AgentTime, wrong_report
from tests.cluster.testbed import Cluster, Settings
from tests.cluster.testbed.settings import ROOTS
from tests.local.neighbour import IDLE

PREEMPTED = {"preempt": 1, "preempt two": 2, "preempt all": 4}
"""How many nodes are taken at once."""
ACCURACY = 95.0
"""Percent that a training of any length reaches."""
DROPPED = 200
"""Lines on what an agent dropped: one a minute for each of the kinds, at most."""
LOSSES = ("kill", "cut", "pause")
"""Mishaps that are not announced."""
MISHAPS = (*PREEMPTED, *LOSSES)


class Soak:
    """One run and what happens to it.

    Args:
        jobs: where it is submitted.
        seed: of the mishaps.
        mishaps: to choose from.
        minutes: how long they go on.
        times: how many there are, one after the other, instead of `minutes`.
        snapshots: if the training takes a snapshot after every step, instead of checkpoints.
        replace: if the run is one job on three nodes whose lost ones are replaced, instead of an array.
        reports: of another user on each node, who tries to harm the run; None for nobody.
    """

    def __init__(
        self,
        jobs: Jobs,
        seed: int,
        mishaps: tuple[str, ...],
        minutes: float,
        times: int | None,
        *,
        snapshots: bool = False,
        replace: bool = False,
        reports: Path | None = None,
    ) -> None:
        self._reports, self._neighbours = reports, None
        self._snapshots, self._replace = snapshots, replace
        self._nodes = 3 if replace else 4
        self._jobs, self._cluster, self._rng = jobs, jobs.cluster, random.Random(seed)
        self._mishaps, self._seconds, self._times = mishaps, 60 * minutes, times
        self._wrong: list[str] = []
        # Those that say nothing, and those that have just said something.
        strangers = 2 * IDLE * len(jobs.cluster.settings.node_names) if reports is not None else 0
        self._leaks = Leaks(jobs.cluster, strangers)

    def play(self) -> list[str]:
        """Train, let things happen, and return what is wrong at the end."""
        with AgentTime(self._cluster.settings.slurm_conf) as agents:
            job = self._submit()
            job.wait_until("no training", lambda: self._is_whole(job), 120)
            if self._reports is not None:
                self._neighbours = Neighbours(self._jobs, job, self._reports)
                for node in self._cluster.settings.node_names:
                    self._neighbours.start(node)
            if self._times is None:
                self._happen_at_random(job)
            else:
                self._happen_in_turn(job, self._times)
            self._say_enough(job)
            self._cluster.wait_until("the run does not end", (job.run_dir / "done.json").exists, 600)
            # One that takes a node still waits if Slurm has drained that node ("Kill task failed", after a cut).
            self._cluster.command(["scancel", "--jobname=take.sh"], user="root", check=False)
            self._jobs.wait_until_all_ended(120)
        # All ranks have the same work, and all nodes share the processors of this machine.
        self._wrong += [f"named without a cause: {event['text']}" for event in job.events("rank_slow")]
        left = [f"left on {node}: {processes}" for node, processes in self._jobs.processes().items()]
        report = wrong_report(self._jobs, job, agents.lives)
        if self._neighbours is not None:
            did, changed = self._neighbours.end()
            print(f"the neighbour: {dict(did)}")
            self._wrong += [*changed, *_too_much_said(job)]
        losses = wrong_losses(job.directory, _undisturbed(self._jobs, job)) if self._snapshots else []
        return [*self._wrong, *_accuracy(job), *self._samples(job), *losses, *left, *self._leaks.found(), *report]

    def _submit(self) -> Job:
        self._jobs.place(CHECKOUT / "sbatch_templates/array.sbatch")
        for name in ("timed_digits.py", "exact_digits.py"):
            self._jobs.place(Path(__file__).with_name(name))
        for name in ("digits.py", "count_samples.py"):
            self._jobs.place(CHECKOUT / "docs/examples" / name)
        size = "--nodes=3 elastic.sbatch --nnodes=1:3" if self._replace else "--array=0-3 array.sbatch --nnodes=1:4"
        agent = f"{size} --replace-lost=5 --replace-limit=1000" if self._replace else size
        training = "timed_digits.py --checkpoint-every 20"
        if self._snapshots:
            training = "--snapshot-replicas=1 exact_digits.py"
        training += " --step-time 0.03 --checkpoint-dir . --record records"
        return self._jobs.submit(*agent.split(), *training.split())

    def _say_enough(self, job: Job) -> None:
        """End the training two epochs later, so that all ranks learn of it before."""
        self._jobs.write("epochs", str(_last(job, "epoch") + 3))

    def _happen_at_random(self, job: Job) -> None:
        until = time.monotonic() + self._seconds
        while time.monotonic() < until:
            self._happen(self._rng.choice(self._mishaps), job)
            self._wait_for_progress(job)
            self._release()
            time.sleep(self._rng.uniform(0, 10))

    def _happen_in_turn(self, job: Job, times: int) -> None:
        gone, going, coming = [], [], []
        for number in range(1, times + 1):
            mishap, first, begin = self._rng.choice(self._mishaps), len(job.tables()), time.monotonic()
            self._happen(mishap, job)
            self._cluster.wait_until("nothing has happened", lambda first=first: len(job.tables()) > first, 180)
            self._cluster.wait_until("not all are back", lambda: self._is_whole(job), 300)
            changes = [change(job, round_) for round_ in range(first, len(job.tables()))]
            print(f"  {number}: goes: {changes[0]}")
            for later in changes[1:]:
                print(f"  {number}: comes: {later}")
            after = formed(job, len(job.tables()) - 1) - begin
            print(f"  {number}: all train {after:.1f} s after it began", flush=True)
            # Where all nodes go, nobody is left to whom the time until they are back would be a gap.
            (gone if PREEMPTED.get(mishap) == 4 else going).append(changes[0])
            coming += changes[1:]
            if mishap in PREEMPTED:
                self._wrong += [f"{number}: {one}" for one in changes if one.lost or one.charged]
        for what, found in (("goes", going), ("comes", coming)):
            print(f"gap when one {what}: {summary([one.gap for one in found if one.gap is not None])}")
        every = [*gone, *going, *coming]
        lost, charged = sum(one.lost for one in every), sum(one.charged for one in every)
        print(f"{lost} steps lost, {charged} restarts charged", flush=True)

    def _happen(self, mishap: str, job: Job) -> None:
        nodes = self._rng.sample(self._cluster.settings.node_names, 4)
        seconds = self._rng.uniform(1, 15)
        meant = " ".join(nodes[: PREEMPTED.get(mishap, 1)])
        print(f"{time.strftime('%H:%M:%S')} {mishap} {meant} {seconds:.1f} s", flush=True)
        match mishap:
            case "preempt" | "preempt two" | "preempt all":
                for node in nodes[: PREEMPTED[mishap]]:
                    self._jobs.take(node, seconds)
            case "kill":
                self._cluster.kill(nodes[0])
                time.sleep(seconds)
                self._cluster.start(nodes[0])
                if self._neighbours is not None:
                    self._neighbours.start(nodes[0])
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

    def _release(self) -> None:
        """Do what an operator does about elements that Slurm holds, as their nodes have failed for the fifth time."""
        shown = self._cluster.command(["squeue", "--noheader", "--all", "--Format=JobArrayID:30,Reason:40"]).stdout
        for line in shown.splitlines():
            name, reason = line.split(maxsplit=1)
            if reason.strip() == "JobHoldMaxRequeue":
                print(f"{time.strftime('%H:%M:%S')} release {name}", flush=True)
                # It may have been released, or be over, since.
                self._cluster.command(["scontrol", "release", name], user="root", check=False)

    def _wait_for_progress(self, job: Job) -> None:
        begin, before = time.monotonic(), _last(job, "step")
        done = job.run_dir / "done.json"
        self._cluster.wait_until(
            f"no step after {before}", lambda: _last(job, "step") > before or done.exists(), timeout=180
        )
        self._leaks.look()
        nodes = ", ".join(job.tables()[-1])
        print(f"{time.strftime('%H:%M:%S')} a step after {time.monotonic() - begin:.1f} s on {nodes}", flush=True)

    def _is_whole(self, job: Job) -> bool:
        """Whether all have taken a step in the newest round."""
        tables = job.tables()
        return bool(tables) and len(tables[-1]) == self._nodes and has_stepped(job, len(tables) - 1)

    def _samples(self, job: Job) -> list[str]:
        command = [str(VENV / "bin/python"), "count_samples.py", "records", "checkpoint.pt"]
        counted = subprocess.run(command, cwd=job.directory, capture_output=True, text=True, check=False)
        lines = counted.stdout.splitlines()
        print(f"{len(lines)} epochs, exit code {counted.returncode}; rounds {len(job.tables())}")
        return [line for line in lines if "exactly once" not in line] + ([counted.stderr] if counted.stderr else [])


def _undisturbed(jobs: Jobs, job: Job) -> Path:
    """Train as the run did, on one rank, and return the directory of the records."""
    alone = jobs.directory / "undisturbed"
    alone.mkdir()
    epochs = (job.directory / "epochs").read_text()
    options = ["--epochs", epochs, "--checkpoint-dir", ".", "--record", "records"]
    command = [str(VENV / "bin/python"), "../exact_digits.py", *options]
    environ = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": jobs.environ["OMP_NUM_THREADS"]}
    subprocess.run(command, cwd=alone, env=environ, check=True)
    return alone


def _too_much_said(job: Job) -> list[str]:
    """What each agent says of strangers in its whole life is bounded."""
    said: Counter[str] = Counter()
    for path in job.run_dir.glob("agents/*.log"):
        said[path.name] = sum("dropped" in line for line in path.read_text(errors="replace").splitlines())
    print(f"lines on what was dropped, by agent: {dict(said)}")
    return [f"{name} has {lines} lines on what was dropped" for name, lines in said.items() if lines > DROPPED]


def _accuracy(job: Job) -> list[str]:
    """What is wrong with the result that the last round's rank 0 has printed."""
    *_, newest = sorted(job.run_dir.glob("logs/round_*/*/rank_00/stdout.log"))
    said = re.findall(r"^finished after \d+ steps: test accuracy ([\d.]+)%$", newest.read_text(), re.MULTILINE)
    print(f"test accuracy: {said}")
    right = len(said) == 1 and float(said[0]) >= ACCURACY
    return [] if right else [f"test accuracy {said}, not one of {ACCURACY} % or more"]


def _last(job: Job, what: str) -> int:
    """The newest step or epoch that rank 0 has recorded; a lost step comes again, so this may go back."""
    path = job.directory / "records.rank0.jsonl"
    if not path.exists():
        return 0
    for line in reversed(path.read_text().splitlines()):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if what in entry:
            return int(entry[what])
    return 0


def _mishaps(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in MISHAPS:
            raise argparse.ArgumentTypeError(f"there is no mishap {name!r}, but {', '.join(MISHAPS)}")
    return names


def main() -> int:
    """Run one soak from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="of mishaps at random (default: 60)")
    parser.add_argument("--times", type=int, help="so many mishaps, each after the one before is over")
    parser.add_argument("--mishaps", type=_mishaps, help="some of: " + ",".join(MISHAPS))
    parser.add_argument("--snapshots", action="store_true", help="instead of checkpoints; compare all losses")
    parser.add_argument("--replace", action="store_true", help="one job whose lost nodes are replaced")
    parser.add_argument("--neighbour", action="store_true", help="another user tries to harm the run")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of the mishaps")
    parser.add_argument("--release", default="22.05", choices=[*ROOTS], help="of Slurm")
    parser.add_argument("--proctrack", default="cgroup", choices=["cgroup", "linuxproc"], help="of Slurm")
    parser.add_argument("--name", default="soak", help="of the test cluster (default: soak)")
    options = parser.parse_args()
    if shutil.which("chromium") is None:
        parser.error("the report is opened in Chromium at the end; apt-get install chromium")
    print(f"seed {options.seed}", flush=True)
    cluster = Cluster.up(Settings(options.name, 4, options.proctrack, False, options.release))
    directory = shared_directory("soak")
    reports = shared_directory("soak-reports") if options.neighbour else None
    if reports is not None:
        reports.chmod(0o777)
    try:
        with own_environment() as programs:
            jobs = Jobs(cluster, directory, programs)
            # Who preempts a node of a job takes the whole job.
            mishaps = options.mishaps or (LOSSES if options.replace else MISHAPS)
            what = options.seed, mishaps, options.minutes, options.times
            wrong = Soak(jobs, *what, snapshots=options.snapshots, replace=options.replace, reports=reports).play()
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
    if reports is not None:
        remove_shared_directory(reports)
    print("as it should be")
    return 0


if __name__ == "__main__":
    sys.exit(main())
