"""Trainings by frameworks under torchrun tuned by hand and under slurm-elastic: recovery, start, files, memory.

    python -m benchmarks.frameworks [--json FILE] [--repetitions 3] [--frameworks transformers,lightning]
                                    [--only killed,start,node,files,memory]

The scripts are `benchmarks/scripts`, as users write them: no line of them is for slurm-elastic. `killed` and
`start` run on a real Slurm cluster of four nodes on this machine, one worker per node; the other parts run 8 workers of
one node. The launchers take turns. Needs root, for the cluster, and the frameworks' environment of .ci/setup.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.history import Recovery, Worker, read
from benchmarks.job import Job, directory_of_user, installed_package, require_root, running_cluster, wait
from benchmarks.launch import end, memory
from benchmarks.launchers import FRAMEWORKS_PYTHON, Launcher
from benchmarks.options import add_parts, make_parser
from benchmarks.scenarios import Scenario
from benchmarks.tables import Bar, Results, Table, longest, median, seconds
from tests.cluster.testbed import Cluster, Settings

_TRAININGS = {"transformers": "transformers_gpt2.py", "lightning": "lightning_layers.py"}
_LAUNCHERS = (Launcher.TUNED, Launcher.OURS)
_WORKERS = 8
_LIMIT = 240.0
"""Seconds after which something counts as never."""
_SETTLE = 30.0
"""Seconds of training before the kill: the state that a long training is in."""
_MOST = {"first run": 1.0, "second run": 0.7, "requeued": 0.5}
"""Of torchrun's time to the first step, by kind of start."""
_LONG = 400
"""Steps, of 50 ms and more, of a first run: imports are learned by its end."""

_Starts = dict[tuple[str, str, Launcher], list[float | None]]
"""Seconds by framework, kind of start and launcher."""


def main() -> int:
    """Measure, show and judge."""
    parser = make_parser("frameworks", repetitions=3)
    add_parts(parser, *_TRAININGS, option="--frameworks")
    add_parts(parser, "killed", "start", "node", "files", "memory")
    options = parser.parse_args()
    require_root()
    if not FRAMEWORKS_PYTHON.exists():
        print(f"{FRAMEWORKS_PYTHON} is missing: run .ci/setup first", file=sys.stderr)
        return 2
    results = Results.of("frameworks")
    parts: dict[str, Callable[[Results, Path, argparse.Namespace], None]] = {
        "killed": _killed, "start": _start, "node": _node, "files": _files, "memory": _memory
    }  # fmt: skip
    with installed_package() as package:
        for name in options.only:
            parts[name](results, package, options)
            results.keep(options.json)
    return results.finish(options.json)


def _turns(options: argparse.Namespace) -> Iterator[tuple[int, str, Launcher]]:
    for number in range(options.repetitions):
        for framework in options.frameworks:
            for launcher in _LAUNCHERS:
                yield number, framework, launcher


# One of four nodes is killed.


def _killed(results: Results, package: Path, options: argparse.Namespace) -> None:
    found: dict[tuple[str, Launcher], list[Recovery | None]] = defaultdict(list)
    with running_cluster(Settings("frameworks")) as cluster:
        for number, framework, launcher in _turns(options):
            with Job(cluster, launcher, package, _TRAININGS[framework], python=FRAMEWORKS_PYTHON) as job:
                job.train(Scenario.KILLED.nodes_before, _SETTLE, _LIMIT)
                _, one = Scenario.KILLED.recover(cluster, job, _LIMIT)
            found[framework, launcher].append(one)
            print(f"{number + 1}: {framework}, {launcher.value}: {one}", flush=True)
    table = Table(
        "One of four nodes is killed: seconds without a training step, and what for",
        ["training", "launcher", "gap", "longest", "until workers start", "imports", "own work", "steps lost"],
        note=f"Medians of {options.repetitions}. Until workers start: from the kill until the last new process began. "
        "Imports: until the last of them has imported its framework. Own work: building the model, reading the "
        "checkpoint, the first step. Checkpoints every 20 steps.",
    )
    gaps: dict[tuple[str, Launcher], float | None] = {}
    for (framework, launcher), runs in found.items():
        parts = {
            part: [None if one is None else float(getattr(one, part)) for one in runs]
            for part in ("gap", "table", "imports", "own", "lost")
        }
        gap, *split, lost = map(median, parts.values())
        gaps[framework, launcher] = gap
        cells = [seconds(value) for value in (gap, longest(parts["gap"]), *split)]
        table.rows.append([framework, launcher.value, *cells, "?" if lost is None else f"{lost:.0f}"])
    results.add(table)
    for framework in options.frameworks:
        part = _share(gaps[framework, Launcher.OURS], gaps[framework, Launcher.TUNED])
        results.bars.append(Bar.at_most(f"{framework}: gap at most 1/10 of torchrun's", part, 0.1, "times"))


# From sbatch to the first step.


def _start(results: Results, package: Path, options: argparse.Namespace) -> None:
    """Four nodes with one worker each: a script's very first run, the next one, and a job that Slurm has requeued."""
    found: _Starts = defaultdict(list)
    with running_cluster(Settings("frameworks")) as cluster:
        for number, framework, launcher in _turns(options):
            with _shared_directory(framework) as directory:
                taken = _first_steps(cluster, launcher, package, directory, framework)
            for kind, value in zip(_MOST, taken, strict=True):
                found[framework, kind, launcher].append(value)
            print(f"{number + 1}: {framework}, {launcher.value}: {[seconds(value) for value in taken]}", flush=True)
    table = Table(
        "From sbatch to the first step, four nodes with one worker each (s)",
        ["training", "start", *(launcher.value for launcher in _LAUNCHERS)],
        note=f"Medians of {options.repetitions}. A first run finds no list of imports. Requeued: from the "
        "new start of the batch script; the training goes on from its checkpoint.",
    )
    _compare(results, table, found, options.frameworks)


def _compare(results: Results, table: Table, found: _Starts, frameworks: list[str], workers: str = "") -> None:
    for framework in frameworks:
        for kind, most in _MOST.items():
            theirs, ours = (median(found[framework, kind, launcher]) for launcher in _LAUNCHERS)
            if found[framework, kind, Launcher.OURS]:
                table.rows.append([framework, kind, seconds(theirs), seconds(ours)])
                promise = f"{framework}{workers}, {kind}: first step after at most {most:g} of torchrun's time"
                results.bars.append(Bar.at_most(promise, _share(ours, theirs), most, "times"))
    results.add(table)


@contextlib.contextmanager
def _shared_directory(framework: str) -> Iterator[Path]:
    """A directory of the ordinary user with the training's scripts."""
    directory = directory_of_user(_TRAININGS[framework])
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _first_steps(
    cluster: Cluster, launcher: Launcher, package: Path, directory: Path, framework: str
) -> list[float | None]:
    """The first run, the second and a requeued one, in the same directory."""
    taken: list[float | None] = []
    for _ in range(2):
        _clear(directory)
        begun = time.time()
        job = _submit(cluster, launcher, package, directory, framework, str(begun))
        taken.append(_first_step(directory, begun, 0.0))
        print(f"{framework}, {launcher.value}, run {len(taken)}: {seconds(taken[-1])}", flush=True)
        # Some checkpoints, and time for what a launcher does beside the training.
        wait(lambda: sum(len(worker.steps) >= _LONG for worker in read(directory / "steps")) >= 4, _LIMIT)
        if len(taken) < 2:
            cluster.cancel_all()
    (directory / "begun").unlink()
    now = time.time()
    cluster.command(["scontrol", "requeue", str(job)], user="root")
    wait((directory / "begun").exists, 300.0)
    restarted = float((directory / "begun").read_text())
    taken.append(_first_step(directory, restarted, now))
    cluster.cancel_all()
    return taken


def _submit(cluster: Cluster, launcher: Launcher, package: Path, directory: Path, framework: str, run_id: str) -> int:
    script = str(directory / _TRAININGS[framework])
    agent = launcher.agent(run_id, directory, script, python=FRAMEWORKS_PYTHON, nodes="4")
    if launcher is not Launcher.OURS:
        # It is where the agents meet.
        agent = [word.replace("n1:29400", "$(hostname):29400") for word in agent]
    else:
        # As a user starts it: the run is the job.
        agent = [word for word in agent if not word.startswith("--rdzv-id")]
    words = " ".join(word if "$(" in word else shlex.quote(word) for word in agent)
    wrapped = (
        "date +%s.%N >.begun && mv .begun begun; "
        f"srun --nodes=4 --ntasks=4 --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none {words}"
    )
    env = {"OMP_NUM_THREADS": "1", **launcher.environment}
    if launcher is Launcher.OURS:
        env["PYTHONPATH"] = str(package)
    options = ["--nodes=4", "--exclusive", "--no-kill", "--requeue", "--output=job.out", "--open-mode=append"]
    return cluster.submit([*options, "--wrap", wrapped], cwd=directory, env=env)


def _first_step(directory: Path, begun: float, since: float) -> float | None:
    """Seconds until all four workers that were started after `since` have done their first step."""

    def first() -> list[float]:
        workers: list[Worker] = [each for each in read(directory / "steps") if each.started > since and each.steps]
        return sorted(each.steps[0] for each in workers)

    return first()[3] - begun if wait(lambda: len(first()) >= 4, _LIMIT) else None


# Eight workers of one node.


def _node(results: Results, package: Path, options: argparse.Namespace) -> None:
    """From the launcher's start to the first step of 8 workers: a first run, and the next one."""
    found: _Starts = defaultdict(list)
    for number, framework, launcher in _turns(options):
        with _shared_directory(framework) as directory:
            for kind in ("first run", "second run"):
                with _launched(launcher, package, directory, framework) as process:
                    taken = _trained(directory, process, steps=1 if kind == "second run" else _LONG)
                found[framework, kind, launcher].append(taken)
                print(f"{number + 1}: {framework}, {launcher.value}, {kind}: {seconds(taken)}", flush=True)
    table = Table(
        f"From the launcher's start to the first step of {_WORKERS} workers on one node (s)",
        ["training", "start", *(launcher.value for launcher in _LAUNCHERS)],
        note=f"Medians of {options.repetitions}.",
    )
    _compare(results, table, found, options.frameworks, f", {_WORKERS} workers")


def _memory(results: Results, package: Path, options: argparse.Namespace) -> None:
    """What 8 workers that train take up, with their launcher, in a second run."""
    found: dict[tuple[str, Launcher], list[float | None]] = defaultdict(list)
    for _, framework, launcher in _turns(options):
        with _shared_directory(framework) as directory:
            for second in (False, True):
                with _launched(launcher, package, directory, framework) as process:
                    taken = _trained(directory, process, steps=40 if second else _LONG)
                    if second:
                        found[framework, launcher].append(None if taken is None else memory(process.pid))
    table = Table(
        f"Memory of {_WORKERS} workers that train and their launcher (PSS, MiB)",
        ["training", *(launcher.value for launcher in _LAUNCHERS)],
        note=f"What they share counts once. Medians of {options.repetitions}.",
    )
    for framework in options.frameworks:
        theirs, ours = (median(found[framework, launcher]) for launcher in _LAUNCHERS)
        table.rows.append([framework, *("?" if value is None else f"{value:.0f}" for value in (theirs, ours))])
        promise = f"{framework}: memory of {_WORKERS} workers at most 0.3 of torchrun's"
        results.bars.append(Bar.at_most(promise, _share(ours, theirs), 0.3, "times"))
    results.add(table)


def _files(results: Results, package: Path, options: argparse.Namespace) -> None:
    """Calls that take a path, from the launcher's start to the end of a training of one step, in a second run."""
    table = Table(
        f"File-system calls of {_WORKERS} workers and their launcher, from start to the end of one step",
        ["training", *(launcher.value for launcher in _LAUNCHERS), "times fewer"],
        note="strace --seccomp-bpf -f -c -e trace=file: calls that take a path, which a shared file system has to "
        "answer. Once each, in a second run.",
    )
    for framework in ("torch", *options.frameworks):
        counts = []
        for launcher in _LAUNCHERS:
            with _shared_directory("transformers" if framework == "torch" else framework) as directory:
                if framework == "torch":
                    (directory / _TRAININGS["transformers"]).write_text(_TORCH_ONLY)
                with _launched(launcher, package, directory, framework, "--steps", str(_LONG)) as process:
                    _wait_trained(process, directory, framework)
                _clear(directory)
                trace = directory / "trace"
                with _launched(launcher, package, directory, framework, "--steps", "1", trace=trace) as process:
                    _wait_trained(process, directory, framework)
                counts.append(_calls(trace))
        theirs, ours = counts
        table.rows.append([framework, f"{theirs:,}", f"{ours:,}", f"{theirs / ours:.1f}"])
        results.bars.append(Bar.at_least(f"{framework}: 7 times fewer file-system calls", theirs / ours, 7))
    results.add(table)


_TORCH_ONLY = """\
import torch
import torch.distributed

torch.distributed.init_process_group("gloo")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def _clear(directory: Path) -> None:
    for name in ("steps", "out"):
        shutil.rmtree(directory / name, ignore_errors=True)


def _wait_trained(process: subprocess.Popen[bytes], directory: Path, framework: str) -> None:
    """Wait for the end of a training of 8 workers; end this program if not all of them have trained.

    The exit code does not tell: a worker of torchrun may abort after its last step (SIGABRT, seen with torch 2.13).
    """
    process.wait(3 * _LIMIT)
    if framework != "torch" and sum(bool(worker.steps) for worker in read(directory / "steps")) < _WORKERS:
        sys.exit((directory / "output").read_text(errors="replace")[-2000:])


def _calls(trace: Path) -> int:
    """The total of strace's table: its last line is `100.00 <seconds> <usecs/call> <calls> [<errors>] total`."""
    return int(trace.read_text().splitlines()[-1].split()[3])


@contextlib.contextmanager
def _launched(
    launcher: Launcher, package: Path, directory: Path, framework: str, *arguments: str, trace: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """8 workers of one node, without Slurm."""
    module = "slurm_elastic agent" if launcher is Launcher.OURS else "torch.distributed.run"
    script = _TRAININGS.get(framework, _TRAININGS["transformers"])
    options = ["--standalone", f"--nproc-per-node={_WORKERS}"]
    command = [str(FRAMEWORKS_PYTHON), "-m", *module.split(), *options, script, *arguments]
    if trace is not None:
        # All other calls run at full speed.
        command = ["strace", "--seccomp-bpf", "-f", "-c", "-e", "trace=file", "-o", str(trace), *command]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **launcher.environment, "PYTHONPATH": str(package)}
    with (directory / "output").open("wb") as output:
        process = subprocess.Popen(command, cwd=directory, env=env, stdout=output, stderr=output)
        try:
            yield process
        finally:
            end(process)


def _trained(directory: Path, process: subprocess.Popen[bytes], steps: int) -> float | None:
    """Seconds from now until the last of the newest 8 workers has taken its first step; they are left to take more."""
    begun = time.time()

    def new() -> list[Worker]:
        return [worker for worker in read(directory / "steps") if worker.started > begun - 1 and worker.steps]

    def enough() -> bool:
        return process.poll() is not None or sum(len(worker.steps) >= steps for worker in new()) >= _WORKERS

    if not wait(enough, _LIMIT) or len(new()) < _WORKERS:
        return None
    return max(worker.steps[0] for worker in new()) - begun


def _share(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None


if __name__ == "__main__":
    sys.exit(main())
