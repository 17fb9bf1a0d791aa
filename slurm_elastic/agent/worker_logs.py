"""The logs of workers: a directory for every rank of every round, which no later round touches."""

from __future__ import annotations

import os
import re
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std, to_map

from slurm_elastic.errors import UsageError
from slurm_elastic.ownership import NEW_DIRECTORY, require_own
from slurm_elastic.rundir import RunDir, RunDirError

__all__ = ["RoundLogsSpecs", "local_ranks", "streams"]

_CONSOLE = ""
"""torch's word for a stream that is not redirected."""
_STREAMS = re.compile(r"[0-3]|[0-9]{1,4}:[0-3](,[0-9]{1,4}:[0-3])*")


def streams(option: str, text: str) -> Std | dict[int, Std]:
    """Return the meaning of ``--tee`` or ``--redirects``: ``3``, or ``0:3,1:1`` by local rank.

    torch's own ``Std.from_str`` takes local ranks of one digit only (elastic/multiprocessing/api.py, 2.13).

    Raises:
        UsageError: it is malformed.
    """
    if not _STREAMS.fullmatch(text):
        raise UsageError(
            f"{option} {text!r} is neither 0, 1 (stdout), 2 (stderr), 3 (both) nor a list by local rank such as 0:3,1:1"
        )
    if ":" not in text:
        return Std(int(text))
    pairs = (item.split(":") for item in text.split(","))
    return {int(rank): Std(int(value)) for rank, value in pairs}


def local_ranks(text: str) -> set[int] | None:
    """Return the meaning of ``--local-ranks-filter``, None if it names none.

    Raises:
        UsageError: it is malformed.
    """
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4})*", text):
        raise UsageError(f"--local-ranks-filter {text!r} is not a list of local ranks such as 0,1")
    return {int(rank) for rank in text.split(",")}


class RoundLogsSpecs(LogsSpecs):
    """Lays the logs out as ``logs/round_0003/<node>/rank_05/{stdout,stderr}.log,error.json``.

    torch's DefaultLogsSpecs counts attempts by failures and removes the directory of an attempt before it is used
    again; a round without a failure would remove what the round before it wrote.

    Args:
        logs: whose layout is used; None for no files at all, as with ``--log-dir /dev/null``.
        redirects: streams that go to the files only.
        tee: streams that go to the files and to the console.
        local_ranks_filter: the only local ranks that show on the console; None for all.
    """

    def __init__(
        self,
        logs: RunDir | None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        super().__init__(str(logs.path) if logs else os.devnull, redirects, tee, local_ranks_filter)
        self._logs = logs
        # For torch these are private names of its class.
        self._to_files, self._to_both, self._shown = redirects, tee, local_ranks_filter

    @property
    def root_log_dir(self) -> str:
        """The directory above those of the rounds, for torch's messages."""
        return str(self._logs.path) if self._logs else os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the directories of a round and name the files.

        Args:
            envs: environment of every local rank, with RANK, WORLD_SIZE, SLURM_ELASTIC_ROUND and
                SLURM_ELASTIC_NODE; TORCHELASTIC_ERROR_FILE is added.

        Raises:
            RunDirError: a directory cannot be made.
        """
        if self._logs is None:
            return _nowhere(envs)
        directories = {local_rank: self._directory(self._logs, env) for local_rank, env in envs.items()}
        tee = to_map(self._to_both, len(envs))
        redirects = to_map(self._to_files, len(envs))
        dest = LogsDest()
        for local_rank, directory in directories.items():
            # torch tees by following the file that a stream is redirected to.
            filed = redirects[local_rank] | tee[local_rank]
            shown = not self._shown or local_rank in self._shown
            elsewhere = _CONSOLE if shown else os.devnull
            out, err, error = (str(directory / name) for name in ("stdout.log", "stderr.log", "error.json"))
            dest.stdouts[local_rank] = out if Std.OUT in filed else elsewhere
            dest.stderrs[local_rank] = err if Std.ERR in filed else elsewhere
            if shown and Std.OUT in tee[local_rank]:
                dest.tee_stdouts[local_rank] = out
            if shown and Std.ERR in tee[local_rank]:
                dest.tee_stderrs[local_rank] = err
            dest.error_files[local_rank] = envs[local_rank]["TORCHELASTIC_ERROR_FILE"] = error
        # Not in the directory of the node, which agents of several array elements may share.
        dest.filtered_stdout, dest.filtered_stderr = (
            str(directories[0] / name) for name in ("filtered_stdout.log", "filtered_stderr.log")
        )
        return dest

    def _directory(self, logs: RunDir, env: dict[str, str]) -> Path:
        directory = logs.rank_dir(
            int(env["SLURM_ELASTIC_ROUND"]), env["SLURM_ELASTIC_NODE"], int(env["RANK"]), int(env["WORLD_SIZE"])
        )
        try:
            for made in (directory.parent.parent, directory.parent, directory):
                # Not by its own means: Path.mkdir gives parents a mode that follows the umask.
                made.mkdir(NEW_DIRECTORY, parents=True, exist_ok=True)
                # A file server that squashes root gives all that root makes to one other user (exports(5)).
                require_own(made, (made.parent.stat().st_uid,))
        except OSError as error:
            raise RunDirError(
                f"no directory for logs, {directory}: {error.strerror}; mend it or give --log-dir"
            ) from None
        return directory

    def __repr__(self) -> str:
        return (
            f"RoundLogsSpecs({self._logs!r}, redirects={self._to_files!r}, tee={self._to_both!r}, "
            f"local_ranks_filter={self._shown!r})"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RoundLogsSpecs) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


def _nowhere(envs: dict[int, dict[str, str]]) -> LogsDest:
    for env in envs.values():
        env["TORCHELASTIC_ERROR_FILE"] = ""
    return LogsDest(
        stdouts=dict.fromkeys(envs, _CONSOLE),
        stderrs=dict.fromkeys(envs, _CONSOLE),
        error_files=dict.fromkeys(envs, os.devnull),
        filtered_stdout=os.devnull,
        filtered_stderr=os.devnull,
    )
