"""A worker of a submitted function, after the imports.

The payload is a pickle in the job's folder, as with submitit. Both belong to the user who submitted it, and nothing of
it comes from a socket or from the run's records.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle
from submitit.core import utils
from torch.distributed.elastic.multiprocessing.errors import record

from slurm_elastic.rundir import list_names, publish_file
from slurm_elastic.submission.payload import (
    SIGNAL,
    Checkpointing,
    is_checkpointable,
    is_stopping,
    job_id_of,
    write_ranks,
)
from slurm_elastic.unpickling import unpickle


def run_function(folder: str, uid: str, signals: Sequence[int]) -> None:
    """Load the function, call it, and write its result to the file in which submitit's Job looks for it.

    Args:
        folder: Folder of the executor; may contain ``%j``.
        uid: First name of the payload's file.
        signals: Signals that have come since the start of this process.
    """
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
    _run(submission, paths, checkpointing)


def _load(submitted: Path, first: Path) -> utils.DelayedSubmission:
    """Load the payload. Its file has its first name until the submitting process has renamed it."""
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


@record
def _run(submission: utils.DelayedSubmission, paths: utils.JobPaths, checkpointing: Checkpointing | None) -> None:
    result = submission.result()
    if checkpointing is not None:
        signal.signal(SIGNAL, signal.SIG_IGN)
    if not is_stopping():
        publish_file(paths.result_pickle, _pickled(("success", result)))
        if paths.task_id == 0:
            write_ranks(paths, int(os.environ["WORLD_SIZE"]))
    elif checkpointing is not None:
        checkpointing.save()


def _pickled(outcome: tuple[str, Any]) -> bytes:
    try:
        return bytes(cloudpickle.dumps(outcome))
    except Exception as error:
        raise TypeError(f"what the function returned cannot be pickled: {error}") from error
