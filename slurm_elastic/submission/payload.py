"""The payload of a submission: the function or script that the workers run, and its files in the executor's folder."""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import signal
import socket
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import cloudpickle
from submitit.core import core, utils

from slurm_elastic import typed_json
from slurm_elastic.agent.option_values import require_entry_point
from slurm_elastic.control.worker_side import is_superseded
from slurm_elastic.errors import UsageError
from slurm_elastic.ownership import pickled
from slurm_elastic.rundir import publish_file, read_file

_WORKER_MODULE = "slurm_elastic.submission.worker"
"""The module that workers of a function run by `python -m`, with the job's folder and the uid of the payload."""


@dataclass(frozen=True, slots=True)
class Script:
    """A training script and its arguments. A call runs it in this process."""

    path: str
    arguments: tuple[str, ...] = ()

    def require_exists(self) -> None:
        """Check the script on this machine; the nodes see the same file if it is on a shared disk.

        Raises:
            UsageError: The script does not exist or cannot be read, or an argument is no string.
        """
        for argument in self.arguments:
            if not isinstance(argument, str):
                raise UsageError(f"argument {argument!r} of {self.path} is no text; give strings, as on a command line")
        options = argparse.Namespace(module=False, no_python=False, run_path=False, training_script=self.path)
        require_entry_point(options, socket.gethostname())

    def __call__(self) -> None:
        """Run the script in this process, as `python train.py` would."""
        before = sys.argv, sys.path[:]
        sys.argv = [self.path, *self.arguments]
        sys.path.insert(0, str(Path(self.path).resolve().parent))
        try:
            runpy.run_path(self.path, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise RuntimeError(f"{self.path} ended with {end.code}") from end
        finally:
            sys.argv, sys.path[:] = before


class Payload:
    """A payload on disk. Its file is named by the uid until `keep_for` gives it the name of the job.

    Args:
        folder: Folder of the executor; may contain ``%j``.
        max_gb: Maximum size of a pickle in GB.

    Attributes:
        agent_options: Options that the agents need for this payload.
        words: What the workers run: the end of the agent's command line.

    Raises:
        UsageError: The function or an argument cannot be pickled, or the pickle is too large; or the script is missing.
    """

    def __init__(self, delayed: utils.DelayedSubmission, folder: Path, uid: str, max_gb: float) -> None:
        base = writable_folder(folder)
        self.agent_options: tuple[str, ...] = ()
        if isinstance(delayed.function, Script):
            delayed.function.require_exists()
            self.words = (delayed.function.path, *delayed.function.arguments)
            self._file = base / f"{uid}.json"
            self._file.write_text(json.dumps(asdict(delayed.function)))
        else:
            self.words = ("-m", _WORKER_MODULE, str(folder), uid)
            self._file = base / f"{uid}.pkl"
            require_importable(delayed.function)
            if is_checkpointable(delayed.function):
                self.agent_options = (f"--worker-signal={SIGNAL.name}",)
            _dump(delayed, self._file, max_gb)

    def keep_for(self, job: core.Job[object]) -> None:
        """Rename the file to the name that submitit's job expects."""
        job.paths.folder.mkdir(parents=True, exist_ok=True)
        self._file.rename(job.paths.submitted_pickle.with_suffix(self._file.suffix))

    def discard(self) -> None:
        """Remove the file."""
        self._file.unlink(missing_ok=True)


def writable_folder(folder: Path) -> Path:
    """Make the part of the folder's path that contains no job id, and return it.

    Raises:
        UsageError: The folder cannot be made or written to.
    """
    base = Path(utils.JobPaths.get_first_id_independent_folder(folder))
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"folder {base} cannot be made: {error.strerror}; give one that you can write to") from None
    if not os.access(base, os.W_OK | os.X_OK):
        raise UsageError(f"folder {base} cannot be written to by this user; give another, on a disk that nodes share")
    return base


def script_file(paths: utils.JobPaths) -> Path:
    """Return the file of a submitted script, which stands in the place of a function's pickle."""
    return Path(paths.submitted_pickle).with_suffix(".json")


def require_importable(function: object) -> None:
    """Check that workers can import the function's module, as far as this machine shows it.

    Python looks for modules in the directory of the running script (docs.python.org, sys.path). Workers have the
    directory in which the submission took place instead. So a module beside a script elsewhere is not found.

    Raises:
        UsageError: The module lies beside the script, and workers do not look there.
    """
    name = getattr(function, "__module__", None) or "__main__"
    top = name.partition(".")[0]
    if name == "__main__" or {name, top} & set(cloudpickle.list_registry_pickle_by_value()):
        return
    file = getattr(sys.modules.get(top), "__file__", None)
    if file is None:
        return
    path = Path(file).resolve()
    root = path.parent.parent if path.stem == "__init__" else path.parent
    beside_script, *others = (Path(entry).resolve() for entry in sys.path)
    if root == beside_script and root != Path.cwd() and root not in others:
        raise UsageError(
            f"module {name} lies beside the script, in {root}, where workers do not look; submit from there, or put "
            "that directory in PYTHONPATH"
        )


def job_id_of(run_id: str) -> str:
    """Return the id of the job that a run belongs to; on one machine a process id, to which the run id adds a word."""
    return re.split("[-.]", run_id, maxsplit=1)[0]


def write_ranks(paths: utils.JobPaths, world_size: int) -> None:
    """Record the number of ranks that have results."""
    publish_file(_ranks(paths), json.dumps({"world_size": world_size}).encode())


def read_ranks(paths: utils.JobPaths) -> int | None:
    """Return the number that `write_ranks` has recorded; None before."""
    content = read_file(_ranks(paths))
    return None if content is None else int(typed_json.loads(content)["world_size"])


def _ranks(paths: utils.JobPaths) -> Path:
    return Path(paths.folder) / f"{paths.job_id}_ranks.json"


def _dump(delayed: utils.DelayedSubmission, path: Path, max_gb: float) -> None:
    content = pickled(delayed, getattr(delayed.function, "__qualname__", repr(delayed.function)))
    if (size := len(content) / 2**30) > max_gb:
        raise UsageError(
            f"function and arguments are {size:.2f} GB of pickle; load the data in the function, or raise "
            f"max_pickle_size_gb, which is {max_gb:g}"
        )
    try:
        # Whatever the umask: nodes load no function that others may have written.
        path.touch(0o600)
        path.write_bytes(content)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written: {error.strerror}; give another folder") from None


# Support of ``checkpoint()`` of a submitted callable, which returns the payload of the next start.
#
# submitit calls `checkpoint()` in a signal handler on rank 0 (submitit/core/job_environment.py, 1.5.4), and callables
# rely on that. Here the agent sends the signal when a planned end of the round is announced (--worker-signal), so
# never to a group that a lost node or a failed worker has broken. A function that uses slurm_elastic.trainer learns
# of the stop by `should_stop` instead, and `checkpoint()` is called after the function has returned.
SIGNAL = signal.SIGHUP
"""The signal that agents send to workers. Nothing else sends it: Slurm's warning before the time limit is SIGUSR2,
which reaches workers, too, under proctrack/linuxproc, before it is decided whether the round ends."""


def is_checkpointable(function: object) -> bool:
    """Return True if submitit would call the function's `checkpoint()` (submitit/core/utils.py, 1.5.4)."""
    return any(callable(getattr(function, name, None)) for name in ("__submitit_checkpoint__", "checkpoint"))


class Checkpointing:
    """Replaces the payload of this worker's job by its checkpoint when the round ends as planned."""

    def __init__(self, submission: utils.DelayedSubmission, paths: utils.JobPaths) -> None:
        self._submission, self._paths = submission, paths
        self._pid = os.getpid()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal: save, and exit."""
        # The agent signals the whole process group; a forked process, as of a data loader, has this handler, too.
        if os.getpid() != self._pid or ((own := trainer()) is not None and own.is_managed()):
            return
        code = 0
        try:
            self.save()
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        # The signal has interrupted the function, of which nothing must run any more.
        os._exit(code)

    def save(self) -> None:
        """Replace the payload by the result of `checkpoint()`, on rank 0; None keeps the payload.

        Raises:
            RuntimeError: Another group of workers may be training this run already; the payload stays.
        """
        if self._paths.task_id != 0:
            return
        following = self._submission._checkpoint_function()
        if following is not None:
            following.set_timeout(self._submission._timeout_min, self._submission._timeout_countdown)
            content = cloudpickle.dumps(following)
            # This node may have been paused here while another group of workers went on.
            if is_superseded(os.environ):
                raise RuntimeError("another group of workers has taken over this run; its payload stays")
            publish_file(self._paths.submitted_pickle, content)


def trainer() -> Any:
    """Return `slurm_elastic.trainer`; None if the function has not imported it: from its import on it is in charge."""
    return sys.modules.get("slurm_elastic.trainer")
