"""A job on the test cluster in which agents can be started node by node."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

from benchmarks.history import Worker, read
from benchmarks.launchers import PYTHON, Launcher
from tests.cluster.testbed import Cluster, Settings
from tests.cluster.testbed.processes import Process

WORK = Path("/var/tmp/slurm-elastic-benchmarks")
SCRIPTS = Path(__file__).with_name("scripts")
_CHECKOUT = SCRIPTS.parents[1]


def require_root() -> None:
    """End this program with 2 if root does not run it; SIGTERM lets it take down what it has set up from now on."""
    if os.geteuid() != 0:
        print("needs root for the test cluster: run it with sudo", file=sys.stderr)
        sys.exit(2)
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def running_cluster(settings: Settings) -> Iterator[Cluster]:
    """A test cluster, which goes down at the end."""
    cluster = Cluster.up(settings)
    try:
        yield cluster
    finally:
        cluster.down()


@contextlib.contextmanager
def installed_package() -> Iterator[Path]:
    """A directory with this checkout's package, that every node and user can read; removed at the end."""
    WORK.mkdir(mode=0o755, exist_ok=True)
    target = Path(tempfile.mkdtemp(prefix="package-", dir=WORK))
    target.chmod(0o755)
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    options = ["--no-deps", "--no-build-isolation", f"--target={target}"]
    try:
        subprocess.run([*pip, *options, str(_CHECKOUT)], check=True, umask=0o022)
        yield target
    finally:
        shutil.rmtree(target)


def directory_of_user(*scripts: str) -> Path:
    """A new directory of the ordinary user, with these of `scripts`."""
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=WORK))
    directory.chmod(0o755)
    for script in (*scripts, "marks.py"):
        shutil.copy(SCRIPTS / script, directory)
    shutil.chown(directory, "elastic", "elastic")
    return directory


class Job:
    """All four nodes, with nothing on them until :meth:`start`; ended with everything in it by the with statement."""

    def __init__(
        self,
        cluster: Cluster,
        launcher: Launcher,
        package: Path,
        script: str = "steps.py",
        *arguments: str,
        python: Path = PYTHON,
        options: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Note what will be started.

        Args:
            cluster: four idle nodes.
            launcher: of the agents.
            package: see :func:`installed_package`.
            script: of `scripts`, with its arguments.
            python: of the agents and their workers.
            options: more of the agents.
            variables: of the environment of the agents.
        """
        self.launcher = launcher
        self._cluster = cluster
        self._package, self._python = package, python
        self._variables = variables or {}
        self.directory = directory_of_user(script)
        self._script = [*options, str(self.directory / script), *arguments]
        self._steps: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Job:
        holder = ["--nodes=4", "--exclusive", "--no-kill", "--requeue", "--output=/dev/null", "--wrap=exec sleep 3600"]
        self._id = self._cluster.submit(holder, cwd=self.directory)
        self._cluster.wait_for(self._id, "RUNNING")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._cluster.restore()
        for step in self._steps:
            step.kill()
            step.wait()
        if error is None:
            shutil.rmtree(self.directory)
        else:
            print(f"kept: {self.directory}", flush=True)

    def start(self, nodes: Sequence[str]) -> None:
        """Start an agent on each of these nodes."""
        run_id = f"benchmark-{self._id}"
        agent = self.launcher.agent(run_id, self.directory, *self._script, python=self._python)
        step = [
            *("srun", f"--jobid={self._id}", f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}"),
            *(f"--ntasks={len(nodes)}", "--ntasks-per-node=1", "--overlap", "--cpu-bind=none"),
            *("--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--export=ALL"),
        ]
        env = {**self.launcher.environment, **self._variables}
        if self.launcher is Launcher.OURS:
            env["PYTHONPATH"] = str(self._package)
        with (self.directory / f"agents-{len(self._steps)}.out").open("w") as output:
            self._steps.append(
                self._cluster.popen([*step, *agent], cwd=self.directory, env=env, stdout=output, stderr=output)
            )

    def requeue(self) -> None:
        """Have Slurm requeue the job, and wait until it runs again, with nothing on its nodes."""
        self._cluster.command(["scontrol", "requeue", str(self._id)])

        def runs_again() -> bool:
            job = self._cluster.job(self._id)
            return (job["Restarts"], job["JobState"]) == ("1", "RUNNING")

        self._cluster.wait_until("the job does not run again", runs_again)
        for step in self._steps:
            step.wait()

    def workers(self) -> list[Worker]:
        """What the workers have written so far."""
        return read(self.directory / "steps")

    def agent_on(self, node: str) -> Process:
        """The agent's process on a node, the oldest if it has forked others."""
        found = [
            process
            for process in self._cluster.processes(node)
            if self.launcher.program in process.command and not process.command.startswith("srun")
        ]
        return min(found, key=lambda process: process.inner_pid)

    def train(self, nodes: Sequence[str], settle: float, limit: float = 180.0) -> None:
        """Start an agent on each of these nodes, and let them train together for `settle` seconds.

        Raises:
            RuntimeError: they never did 20 steps within `limit` seconds.
        """
        self.start(nodes)

        def training() -> bool:
            return sum(len(worker.steps) >= 20 for worker in self.workers() if worker.world == len(nodes)) >= len(nodes)

        if not wait(training, limit):
            raise RuntimeError(f"{self.launcher.value}: {len(nodes)} nodes do not train after {limit:.0f} s")
        time.sleep(settle)


def wait(condition: Callable[[], bool], limit: float, pause: float = 0.2) -> bool:
    """Wait until `condition` holds; False if it does not within `limit` seconds."""
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True
