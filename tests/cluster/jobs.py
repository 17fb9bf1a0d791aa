"""Jobs that train, as a test sees them: submitted as a user submits them, and read by what they leave behind."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.cluster.testbed import Cluster, Process, TestbedError
from tests.cluster.testbed.machine import PATH
from tests.planted_faults import Action, action

CHECKOUT = Path(__file__).parents[2]
TEMPLATE = CHECKOUT / "sbatch_templates/allocation.sbatch"
TRAINING = Path(__file__).with_name("steps.py")

SRUN = "srun --overlap --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0"
"""As in the batch script of an allocation, for steps of a test's own."""

TAKE = """\
#!/bin/bash
#SBATCH --partition=high
#SBATCH --exclusive
#SBATCH --nodes=1
exec sleep "$1"
"""
"""A job for which Slurm preempts another one."""

ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"})


PATIENT = {"PET_RDZV_CONF": "heartbeat_limit=20", "PET_CONSOLE": "full", "OMP_NUM_THREADS": "1"}
"""For all agents of tests: as in the local layer, one that stands still for seconds on a busy machine is not lost,
tests look at every line, and a worker takes one processor, as all nodes share those of one machine."""
DYNAMO = "--preload=torch._dynamo"
"""For scripts with an optimizer or DistributedDataParallel: one import for all workers of a node. Else the first ones
import it, and the fork server does once more when it has learned that, which takes longer than torch each time."""
SILENCE = "--rdzv-conf=heartbeat_limit=3"
"""For agents whose silence matters: the default."""


def on(*nodes: str) -> tuple[str, str]:
    """sbatch's options for these nodes and no others."""
    return f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}"


class Job:
    """One job, and the run that its agents are."""

    def __init__(self, cluster: Cluster, directory: Path, job_id: int) -> None:
        self.cluster, self.directory, self.id = cluster, directory, job_id
        self.run_dir = directory / "elastic-runs" / str(job_id)
        self._read: dict[Path, tuple[list[dict[str, Any]], int]] = {}

    @property
    def output(self) -> str:
        """What the job printed, an array all of its elements."""
        files = [path for path in self.directory.glob("*.out") if re.search(rf"-{self.id}(_\d+)?\.out$", path.name)]
        # The last character may still be being written.
        return "\n".join(path.read_text(errors="replace") for path in sorted(files))

    @property
    def lines(self) -> list[str]:
        """The lines of `output`."""
        return self.output.splitlines()

    def state(self) -> str:
        """As Slurm calls it."""
        return self.cluster.job(self.id)["JobState"]

    def exit_code(self) -> int:
        """Of the batch script."""
        return int(self.cluster.job(self.id)["ExitCode"].split(":")[0])

    def nodes(self) -> list[str]:
        """The job's nodes, in Slurm's order."""
        return self.cluster.nodes_of(self.id)

    def rounds(self) -> list[dict[str, Any]]:
        """The rounds that the leader wrote down, in their order."""
        return [json.loads(path.read_text()) for path in sorted(self.run_dir.glob("rounds/*.json"))]

    def action(self, of_round: int | None = None, *, excluded: bool = False) -> Action:
        """What the run has done with the fault that the test has planted, in one round if it is given."""
        return action(self.rounds(), self.events(), of_round, excluded=excluded)

    def tables(self) -> list[list[str]]:
        """The nodes of every round, in the order of ranks."""
        return [[place["node"] for place in round_["places"]] for round_ in self.rounds()]

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        """The events of all nodes, of one kind if it is given, in the order of their times."""
        found = [event for path in self.run_dir.glob("events/*.jsonl") for event in self._objects(path)]
        return sorted((event for event in found if kind in ("", event["event"])), key=lambda event: event["time"])

    def leader(self) -> str:
        """The node of the run's leader, or of the one that was the last to lead."""
        newest = max(self.run_dir.glob("endpoints/*.json"), key=lambda path: int(path.stem.rpartition(".")[2]))
        return str(json.loads(newest.read_text())["agent"]).split("/")[0]

    def diary(self) -> list[dict[str, Any]]:
        """What the workers of steps.py wrote down, in the order of time."""
        found = [entry for path in self.directory.glob("steps/rank_*.jsonl") for entry in self._objects(path)]
        return sorted(found, key=lambda entry: entry["monotonic"])

    def _objects(self, path: Path) -> list[dict[str, Any]]:
        """The objects in a file of JSON lines, which grows; the last line may still be being written."""
        objects, end = self._read.get(path, ([], 0))
        with path.open("rb") as file:
            file.seek(end)
            text = file.read()
        lines = text[: text.rfind(b"\n") + 1]
        self._read[path] = objects, _ = [*objects, *map(json.loads, lines.splitlines())], end + len(lines)
        return objects

    def steps(self, round_number: int | None = None) -> list[dict[str, Any]]:
        """The steps of all ranks, or those of one round."""
        return [e for e in self.diary() if "step" in e and round_number in (None, e["round"])]

    def trained_on(self, round_number: int) -> list[str]:
        """The nodes whose workers have taken a step in a round, in the order of ranks."""
        return [node for _, node in sorted({(e["rank"], e["node"]) for e in self.steps(round_number)})]

    def wait_until(self, complaint: str, condition: Callable[[], bool], timeout: float = 60.0) -> None:
        """Wait until the condition holds; a job that ends before is an error, and is shown."""
        look_again = 0.0

        def holds() -> bool:
            nonlocal look_again
            if condition():
                return True
            now = time.monotonic()
            if now >= look_again:
                look_again = now + 1.0
                # Both may have come about since the condition was asked.
                assert self.state() not in ENDED or condition(), f"{complaint}, and the job has ended:\n{self.output}"
            return False

        try:
            self.cluster.wait_until(complaint, holds, timeout)
        except TestbedError:
            print(f"job {self.id} printed:\n{self.output}")
            raise

    def wait_for_steps(self, round_number: int, nodes: Iterable[str]) -> None:
        """Wait until each of these nodes has taken a step in the round."""
        wanted = list(nodes)
        self.wait_until(
            f"no steps in round {round_number} on {wanted}", lambda: self.trained_on(round_number) == wanted
        )

    def say_enough(self) -> None:
        """End the training."""
        (self.directory / "enough").touch()

    def finish(self, timeout: float = 60.0) -> None:
        """End the training, and see the job succeed."""
        self.say_enough()
        self.wait_for("COMPLETED", timeout=timeout)

    def cancel(self) -> None:
        """`scancel`."""
        self.cluster.command(["scancel", str(self.id)])

    def wait_for(self, *states: str, timeout: float = 60.0) -> None:
        """Wait until the job is in one of the states; in a final one its processes are gone."""
        try:
            self.cluster.wait_for(self.id, states, timeout)
        except TestbedError:
            print(f"job {self.id} printed:\n{self.output}")
            raise


class Jobs:
    """Submits jobs in a directory that all nodes see, as the ordinary user."""

    def __init__(self, cluster: Cluster, directory: Path, environment: Path) -> None:
        self.cluster, self.directory = cluster, directory
        # All nodes share the few cores of one machine, where threads that spin stand in each other's way.
        self.environ = {"PATH": f"{environment}:{PATH}", "OMP_NUM_THREADS": "1"}
        for source, name in ((TRAINING, "train.py"), (TEMPLATE, "elastic.sbatch")):
            self.place(source, name)
        self.write("take.sh", TAKE)

    def place(self, source: Path, name: str = "") -> Path:
        """Copy a file into the directory; the checkout may lie where the ordinary user cannot read."""
        target = self.directory / (name or source.name)
        shutil.copyfile(source, target)
        target.chmod(0o644)
        return target

    def write(self, name: str, text: str) -> Path:
        """Write a file of the user's, which is whole when it is there."""
        path, part = self.directory / name, self.directory / f".{name}.part"
        part.write_text(text)
        part.chmod(0o644)
        return part.replace(path)

    def submit(self, *argv: str, cwd: Path | None = None, environ: dict[str, str] | None = None) -> Job:
        """`sbatch ARGV`, by default in the directory."""
        directory = cwd or self.directory
        job_id = self.cluster.submit(argv, directory, env={**self.environ, **(environ or {})})
        return Job(self.cluster, directory, job_id)

    def ask(self, *words: object, check: bool = True, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """`slurm-elastic WORDS`, in the directory."""
        argv = ["slurm-elastic", *map(str, words)]
        return self.cluster.command(argv, cwd=self.directory, env=self.environ, check=check, timeout=timeout)

    def take(self, node: str = "", seconds: float | None = None, *options: str) -> Job:
        """Have Slurm preempt whoever uses this node, or some node, for so long or until the new job is cancelled."""
        where = [f"--nodelist={node}"] if node else []
        if self.cluster.settings.accounting:
            where.append("--qos=high")
        return self.submit(*where, *options, "take.sh", "infinity" if seconds is None else f"{seconds:.1f}")

    def processes(self) -> dict[str, list[Process]]:
        """All processes of the ordinary user, by the node that has some."""
        found = {node: self.cluster.processes(node) for node in self.cluster.settings.node_names}
        return {node: processes for node, processes in found.items() if processes}

    def elements(self, array: Job) -> list[tuple[str, str]]:
        """State and node of every element of an array, in their order."""
        records = self.cluster.command(["scontrol", "--oneliner", "show", "job", str(array.id)]).stdout.splitlines()
        found = [dict(word.split("=", 1) for word in record.split() if "=" in word) for record in records]
        return [
            (fields["JobState"], fields.get("NodeList", ""))
            for fields in sorted(found, key=lambda fields: int(fields["ArrayTaskId"]))
        ]

    def wait_until_all_ended(self, timeout: float = 60.0) -> None:
        """Wait until Slurm has finished all jobs."""
        self.cluster.wait_until("jobs do not end", lambda: not self.running(), timeout)

    def running(self) -> str:
        """What Slurm has not finished, one line per job."""
        return self.cluster.command(["squeue", "--noheader", "--all"]).stdout

    def going_on(self) -> str:
        """As `running`, without the jobs that have ended and whose nodes are being cleaned."""
        states = "PENDING,RUNNING,SUSPENDED,CONFIGURING"
        return self.cluster.command(["squeue", "--noheader", "--all", f"--states={states}"]).stdout
