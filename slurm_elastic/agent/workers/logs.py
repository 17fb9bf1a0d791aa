"""The logs of workers: a directory for every rank of every round, in which no later round writes."""

from __future__ import annotations

import os
import re
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std, to_map

from slurm_elastic.errors import UsageError
from slurm_elastic.ownership import NEW_DIRECTORY, require_own
from slurm_elastic.rundir import RunDir, RunDirError

_CONSOLE = ""
"""torch's word for a stream that is not redirected."""
_STREAMS = re.compile(r"[0-3]|[0-9]{1,4}:[0-3](,[0-9]{1,4}:[0-3])*")


def streams(option: str, text: str) -> Std | dict[int, Std]:
    """Parse ``--tee`` or ``--redirects``: ``3``, or ``0:3,1:1`` by local rank.

    torch's own ``Std.from_str`` takes local ranks of one digit only (elastic/multiprocessing/api.py, 2.13).

    Raises:
        UsageError: The text is malformed.
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
    """Parse ``--local-ranks-filter``; return None if it names no rank.

    Raises:
        UsageError: The text is malformed.
    """
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4})*", text):
        raise UsageError(f"--local-ranks-filter {text!r} is not a list of local ranks such as 0,1")
    return {int(rank) for rank in text.split(",")}


class RoundLogsSpecs(LogsSpecs):
    """Puts the logs into ``logs/round_0003/<node>/rank_05/{stdout,stderr}.log,error.json``.

    torch's DefaultLogsSpecs numbers its directories by failures and empties a directory before it uses it again: a
    round that follows without a failure would remove the logs of the round before.

    Args:
        logs: The run directory whose layout is used; None for no files, as with ``--log-dir /dev/null``.
        local_ranks_filter: The local ranks whose output goes to the console; None for all.
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
        # torch's class has the same values under private names.
        self._to_files, self._to_both, self._local_ranks_shown = redirects, tee, local_ranks_filter

    @property
    def root_log_dir(self) -> str:
        """The directory above those of the rounds, for torch's messages."""
        return str(self._logs.path) if self._logs else os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the directories of a round and name the files.

        Args:
            envs: The environment of every local rank, with RANK, WORLD_SIZE, SLURM_ELASTIC_ROUND and
                SLURM_ELASTIC_NODE; this function adds TORCHELASTIC_ERROR_FILE.

        Raises:
            RunDirError: A directory cannot be made.
        """
        shown = {rank for rank in envs if rank in (self._local_ranks_shown or envs)}
        consoles = {rank: _CONSOLE if rank in shown else os.devnull for rank in envs}
        nowhere = os.devnull
        dest = LogsDest(
            stdouts=consoles,
            stderrs=consoles.copy(),
            error_files=dict.fromkeys(envs, nowhere),
            filtered_stdout=nowhere,
            filtered_stderr=nowhere,
        )
        if self._logs is None:
            for env in envs.values():
                env["TORCHELASTIC_ERROR_FILE"] = ""
            return dest
        directories = {local_rank: self._directory(self._logs, env) for local_rank, env in envs.items()}
        tee, redirects = (to_map(chosen, len(envs)) for chosen in (self._to_both, self._to_files))
        for local_rank, directory in directories.items():
            for stream, name, files, followed in (
                (Std.OUT, "stdout.log", dest.stdouts, dest.tee_stdouts),
                (Std.ERR, "stderr.log", dest.stderrs, dest.tee_stderrs),
            ):
                # torch tees by following the file that a stream is redirected to.
                if stream in redirects[local_rank] | tee[local_rank]:
                    files[local_rank] = str(directory / name)
                if local_rank in shown and stream in tee[local_rank]:
                    followed[local_rank] = files[local_rank]
            dest.error_files[local_rank] = envs[local_rank]["TORCHELASTIC_ERROR_FILE"] = str(directory / "error.json")
        # In the directory of a rank: agents of several array elements may share that of the node.
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
                # One by one: Path.mkdir makes parents with the mode of the umask.
                made.mkdir(NEW_DIRECTORY, parents=True, exist_ok=True)
                # With root_squash the file server gives root's directories to another user (exports(5)).
                require_own(made, (made.parent.stat().st_uid,))
        except OSError as error:
            raise RunDirError(
                f"no directory for logs, {directory}: {error.strerror}; fix it or give --log-dir"
            ) from None
        return directory

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RoundLogsSpecs) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]
