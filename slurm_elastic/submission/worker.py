"""``python -m slurm_elastic.submission.worker``: a worker of a submitted function.

The payload is a pickle in the job's folder, as with submitit. Both belong to the user who submitted it, and nothing of
it comes from a socket or from the run's records.

During the slow imports, which functions here make, this only records the signal for a planned end: there is nothing to
save then, and ending by the signal would be a failure.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from pathlib import Path

    from submitit.core import utils

    from slurm_elastic.submission.payload import Checkpointing


def main() -> None:
    """Load the function that the command line names, call it, and write its result where submitit's Job looks for it.

    The command line has the folder of the executor, which may contain ``%j``, and the first name of the payload's file.
    """
    signals: list[int] = []
    signal.signal(signal.SIGHUP, lambda number, _frame: signals.append(number))
    # The warning before the time limit, which under proctrack/linuxproc Slurm sends to every process of the job, is for
    # the agent. Not SIG_IGN: programs that the function starts would inherit it (execve(2)).
    signal.signal(signal.SIGUSR2, lambda _number, _frame: None)
    from submitit.core import utils
    from torch.distributed.elastic.multiprocessing.errors import record

    from slurm_elastic.submission.payload import SIGNAL, Checkpointing, is_checkpointable, job_id_of

    folder, uid = sys.argv[1:]
    job_id, rank = job_id_of(os.environ["SLURM_ELASTIC_RUN_ID"]), int(os.environ["RANK"])
    os.environ.update(SUBMITIT_EXECUTOR="elastic", SUBMITIT_FOLDER=folder)
    paths = utils.JobPaths(folder, job_id=job_id, task_id=rank)
    first = utils.JobPaths.get_first_id_independent_folder(folder) / f"{uid}.pkl"
    submission = _load(paths.submitted_pickle, first)
    checkpointing = Checkpointing(submission, paths) if is_checkpointable(submission.function) else None
    signal.signal(SIGNAL, checkpointing.handle if checkpointing is not None else signal.SIG_DFL)
    for number in signals:
        if checkpointing is not None:
            sys.exit(0)
        # The function has no `checkpoint()`: let the signal have its default action now.
        signal.raise_signal(number)
    record(_run)(submission, paths, checkpointing)


def _load(submitted: Path, first: Path) -> utils.DelayedSubmission:
    """Load the payload. Its file has its first name until the submitting process has renamed it."""
    from slurm_elastic.ownership import unpickle
    from slurm_elastic.rundir import list_names

    for path in (submitted, first, submitted):
        # Asked of the file server: this node may have cached that it is not there.
        if path.name in list_names(path.parent):
            break
    else:
        _fail(f"{submitted} is not there; give the executor a folder on a disk that all nodes share")
    try:
        submission: utils.DelayedSubmission = unpickle(path)
    except FileNotFoundError:
        # It was renamed meanwhile.
        submission = unpickle(submitted)
    except PermissionError as error:
        _fail(f"the function is not loaded: {error.filename}: {error.strerror}; submit it from a folder of your own")
    except (ImportError, AttributeError) as error:
        _fail(
            f"the function cannot be loaded here: {error}; put its module's directory in PYTHONPATH, or submit from "
            "that directory"
        )
    return submission


def _fail(why: str) -> NoReturn:
    print(f"{os.environ['SLURM_ELASTIC_NODE']}: {why}", file=sys.stderr)
    sys.exit(1)


def _run(submission: utils.DelayedSubmission, paths: utils.JobPaths, checkpointing: Checkpointing | None) -> None:
    from slurm_elastic.rundir import publish_file
    from slurm_elastic.submission.payload import SIGNAL, trainer, write_ranks

    result = submission.result()
    if checkpointing is not None:
        signal.signal(SIGNAL, signal.SIG_IGN)
    if (own := trainer()) is None or own.stopped() is None:
        publish_file(paths.result_pickle, _pickled(("success", result)))
        if paths.task_id == 0:
            write_ranks(paths, int(os.environ["WORLD_SIZE"]))
    elif checkpointing is not None:
        checkpointing.save()


def _pickled(outcome: tuple[str, Any]) -> bytes:
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(outcome))
    except Exception as error:
        raise TypeError(f"what the function returned cannot be pickled: {error}") from error


if __name__ == "__main__":
    main()
