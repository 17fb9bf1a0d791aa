"""`launch`: an elastic agent from a Python program, as torch's ``elastic_launch`` (torch/distributed/launcher/api.py).

srun starts the program on every node of the job; each calls `launch` with the same function, and gets the results of
the workers on its own node. The agent is a process of its own, so that the program keeps its signal handlers, its
logging and its environment, and workers start as warm as from the command line.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from slurm_elastic import typed_json
from slurm_elastic.agent.forkserver.linux import set_parent_death_signal
from slurm_elastic.errors import ExitCode, SlurmElasticError, UsageError
from slurm_elastic.ownership import pickled, unpickle
from slurm_elastic.rundir import RunDir, publish_file

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

__all__ = ["LaunchConfig", "LaunchError", "launch"]

_FUNCTION = "function.pkl"
_DIRECTORY = "SLURM_ELASTIC_LAUNCH_DIR"
"""The directory of a call of `launch` on its node. Not an argument: agents of a run have the same ones."""
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that Slurm sends to the program and that are for the agent. A terminal sends SIGINT to both."""
_MEANINGS = {
    ExitCode.FAILED: "the workers failed for good; the agent has printed the root cause",
    ExitCode.USAGE: "wrong configuration; the agent has printed what is wrong",
    ExitCode.LEFT: "this node left the run on notice; exit with this code, so that the job is requeued",
    ExitCode.FENCED: "another incarnation of this run has superseded this one",
}


class LaunchError(SlurmElasticError):
    """The agent of this node ended without having finished the run.

    Where workers of this node failed, it is torch's ChildFailedError, too.

    Attributes:
        exit_code: Exit code of the agent, see the reference.
        failures: torch's ProcessFailure of each worker of this node that failed, by rank.
    """

    def __init__(self, status: int) -> None:
        self.failures: dict[int, ProcessFailure] = {}
        is_ours = status in ExitCode.__members__.values()
        self.exit_code = ExitCode(status) if is_ours else ExitCode.FAILED
        super().__init__(_MEANINGS[self.exit_code] if is_ours else f"the agent ended with {status}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """Settings of an agent. Slurm's environment gives what is None.

    Attributes:
        min_nodes: A round needs at least this many nodes; None for 1.
        max_nodes: A round has at most this many nodes; None for the default of ``--nnodes``.
        workers_per_node: Workers on this node; None for one per GPU that the job has on it, else 1.
        max_restarts: Number of worker failures that the run survives.
        run_id: Jobs with the same run id and run directory are one run; None as `agent --run-id` by default.
        run_dir: Directory on a file system that all nodes share; None for the directory in which sbatch was called.
        start: ``warm`` to fork workers from a process that has imported torch, ``cold`` for a fresh Python each.
        preload: Modules that a warm start imports besides torch.
        hang_timeout: Seconds after which a worker that takes no step is killed, or ``auto``; None for never.
        agent_arguments: Further options as on the command line of the agent, such as ``--interface=ib0``.
    """

    min_nodes: int | None = None
    max_nodes: int | None = None
    workers_per_node: int | None = None
    max_restarts: int = 0
    run_id: str | None = None
    run_dir: str | Path | None = None
    start: Literal["warm", "cold"] = "warm"
    preload: tuple[str, ...] = ()
    hang_timeout: float | Literal["auto"] | None = None
    agent_arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.min_nodes is not None and self.max_nodes is None:
            raise UsageError(f"min_nodes={self.min_nodes} without a maximum; give max_nodes, too")

    def arguments(self) -> tuple[str, ...]:
        """Return these settings as options of ``slurm-elastic agent``."""
        values = {
            "--nnodes": None if self.max_nodes is None else f"{self.min_nodes or 1}:{self.max_nodes}",
            "--nproc-per-node": self.workers_per_node,
            "--max-restarts": self.max_restarts or None,
            "--run-id": self.run_id,
            "--run-dir": self.run_dir,
            "--start": self.start,
            "--preload": ",".join(self.preload) or None,
            "--hang-timeout": self.hang_timeout,
        }
        options = (f"{name}={value}" for name, value in values.items() if value is not None)
        return (*options, *self.agent_arguments)


def launch(function: Callable[..., Any], *arguments: Any, config: LaunchConfig | None = None) -> dict[int, Any]:
    """Run a function in the workers of an elastic run until the run is finished.

    Call this in the main thread: signals to this process go on to the agent.

    Args:
        function: Called in every worker of every round; like a training script it resumes from the newest checkpoint.
        arguments: Arguments of the function. Both are pickled by cloudpickle.
        config: Settings of the agent; None for those that Slurm gives.

    Returns:
        The results of the workers on this node in the last round, by rank; empty if this node was a spare then.

    Raises:
        UsageError: The function, an argument or the configuration is wrong; nothing was started.
        LaunchError: The run is not finished, or failed.
    """
    directory = Path(tempfile.mkdtemp(prefix="slurm-elastic-launch-"))
    try:
        name = getattr(function, "__qualname__", repr(function))
        (directory / _FUNCTION).write_bytes(pickled((function, arguments), name))
        options = (config or LaunchConfig()).arguments()
        command = [sys.executable, "-m", "slurm_elastic", "agent", *options, "-m", __name__, *sys.argv]
        environ, first = {**os.environ, _DIRECTORY: str(directory)}, _end_with_parent(os.getpid())
        with subprocess.Popen(command, env=environ, preexec_fn=first) as agent, _forwarding(agent):
            status = agent.wait()
        if status != ExitCode.FINISHED:
            raise _error(status, directory, name)
        try:
            return {rank: unpickle(path) for rank, path in _newest(directory, "result").items()}
        except PermissionError as error:
            raise UsageError(f"the results are not read: {error.filename}: {error.strerror}") from None
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _end_with_parent(parent: int) -> Callable[[], None]:
    """Return what the agent executes first: it gets SIGTERM if this process ends before it."""

    def request() -> None:
        set_parent_death_signal(signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)

    return request


@contextmanager
def _forwarding(agent: subprocess.Popen[bytes]) -> Iterator[None]:
    """Send signals to the agent that this process gets; SIGINT has no effect here, as the agent ends on it."""

    def forward(number: int, frame: FrameType | None) -> None:
        agent.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _newest(directory: Path, suffix: str) -> dict[int, Path]:
    """Return the files that workers have written in the newest round with any, by rank."""
    files: dict[int, dict[int, Path]] = {}
    for path in directory.glob(f"*.{suffix}"):
        round_, rank = path.stem.split(".")
        files.setdefault(int(round_), {})[int(rank)] = path
    return dict(sorted(files[max(files)].items())) if files else {}


def _error(status: int, directory: Path, name: str) -> LaunchError:
    failures = _failures(directory) if status == ExitCode.FAILED else {}
    if not failures:
        return LaunchError(status)
    # A program whose workers do not fail needs no torch.
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    class WorkersFailedError(LaunchError, ChildFailedError):
        def __init__(self) -> None:
            Exception.__init__(self, _MEANINGS[ExitCode.FAILED])
            self.exit_code, self.name, self.failures = ExitCode.FAILED, name, failures

    return WorkersFailedError()


def _failures(directory: Path) -> dict[int, ProcessFailure]:
    """Return the workers of this node that failed in the newest round: those with an error file, and the root cause."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from slurm_elastic.submission.job_states import read_status

    failures = {}
    for rank, path in _newest(directory, "start").items():
        start = typed_json.loads(path.read_bytes())
        root = read_status(RunDir.for_run(Path(start["run_dir"]).parent.parent, start["run_id"])).failure
        is_root = root is not None and root.rank == rank
        if is_root or Path(start["error_file"]).is_file():
            exit_code = root.exit_code if root is not None and is_root else 1
            failures[rank] = ProcessFailure(start["local_rank"], start["pid"], exit_code, start["error_file"])
    return failures


def _work(directory: Path) -> None:
    """Call the function in a worker, and write its result where the program on this node finds it."""
    import cloudpickle
    from torch.distributed.elastic.multiprocessing.errors import record

    environ = os.environ
    start = {
        "local_rank": int(environ["LOCAL_RANK"]),
        "pid": os.getpid(),
        "error_file": environ.get("TORCHELASTIC_ERROR_FILE", ""),
        "run_dir": environ["SLURM_ELASTIC_RUN_DIR"],
        "run_id": environ["SLURM_ELASTIC_RUN_ID"],
    }
    name = f"{environ['SLURM_ELASTIC_ROUND']}.{environ['RANK']}"
    publish_file(directory / f"{name}.start", json.dumps(start).encode())

    try:
        function, arguments = unpickle(directory / _FUNCTION)
    except OSError as error:
        # Such as a directory that another user has made again where a cleaner of TMPDIR took it away.
        sys.exit(
            f"slurm-elastic: error: the function is not read: {error.filename}: {error.strerror}; call launch again"
        )
    result = cloudpickle.dumps(record(function)(*arguments))
    publish_file(directory / f"{name}.result", result)


if __name__ == "__main__":
    _work(Path(os.environ[_DIRECTORY]))
