"""The root cause of a failed run, in the few lines that are printed last, and what tells it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import signal
from pathlib import Path
from typing import Any

from slurm_elastic import typed_json
from slurm_elastic.errors import ExitCode
from slurm_elastic.failures import causes
from slurm_elastic.rendezvous.membership.agents import Reason, WorkerFailure
from slurm_elastic.rendezvous.membership.events import Ended, Interrupted
from slurm_elastic.rendezvous.records.api import Records
from slurm_elastic.rundir import read_file

logger = logging.getLogger("slurm_elastic")

_ROOT = Path("/")
_LINES = 20
_WIDTH = 300
_TAIL_BYTES = 65536
_ABORTED = "terminate called without an active exception"
"""The words of libstdc++ when a C++ thread still runs while its object is destroyed (vterminate.cc). A script that ends
by an exception leaves threads of gloo: with torch 2.13 some of such workers end by SIGABRT, also without this agent."""
_FRAME, _OF_LIBRARY = (
    '  File "',
    re.compile(r'  File "(?:<frozen |.*/(?:site-packages|dist-packages|lib/python3\.\d+)/)'),
)
"""The first line of a frame of a traceback, and of one of a library."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
"""Colours and movements of the cursor (ECMA-48), and control characters but tab and newline."""


def root_cause(failure: WorkerFailure) -> str:
    """Return a text with the worker, its exit, the cause, its last output, advice, and the file with all output."""
    words = [f"  {line}" for line in _shown_lines(failure.message)]
    row = causes.named(failure.cause)
    advice = [f"what can help: {row.advice}"] if row is not None and row.advice else []
    rest = [f"the rest: {failure.log or failure.error_file}"] if failure.log or failure.error_file else []
    why = causes.explanation(failure.cause, "" if failure.detail in failure.message else failure.detail)
    how = f"{_exit_text(failure)}: {why}" if why else _exit_text(failure)
    return "\n".join([f"rank {failure.rank} on {failure.node} {how}", *words, *advice, *rest])


def last_output(error_file: str, log: str) -> str:
    """Return the part of the last output of a worker that is shown: at most 20 lines of :func:`words`."""
    return "\n".join(_shown_lines(words(error_file, log)))


def named_error(text: str) -> str:
    """Return the line of the output of a worker that names its error, as it is shown; see `words`."""
    return "".join(_shown_lines(causes.error_line(text))[-1:])


def words(error_file: str, log: str) -> str:
    """Return the last output of a worker: its traceback, else the end of its stderr."""
    return causes.without_prefixes(recorded_traceback(error_file)) or causes.ending(_tail(log))


def told_elsewhere(round_end: Interrupted | Ended | None, rank: int, text: str) -> bool:
    """Return True if the last words of a worker tell no more than the leader has said of the end of the round."""
    match round_end:
        case Ended(failure=WorkerFailure(rank=root)) if root == rank:
            # The root cause is told at the end.
            return True
        case Ended(failure=WorkerFailure(summary=error)):
            pass
        case Interrupted(reason=Reason.NODE_LOST):
            error = ""
        case Interrupted(reason=Reason.WORKER_FAILED, detail=detail) if not detail.startswith(f"rank {rank}:"):
            error = detail.partition(": ")[2]
        case _:
            return False
    # A mistake in the script ends all workers, with one and the same error.
    return named_error(text) == error != "" or causes.attribute(text).cause.consequence


def aborted_at_exit(text: str, exit_code: int, error_file: str) -> bool:
    """Return True if a worker has ended by an exception, and only its exit by SIGABRT."""
    has_message = text.startswith(causes.TRACEBACK) and _ABORTED in text
    return exit_code == -signal.SIGABRT and (has_message or bool(recorded_traceback(error_file)))


def memory_kills(root: Path = _ROOT) -> int | None:
    """Return the number of processes of this agent's control group that the kernel has killed for lack of memory.

    Workers are in the control group of their agent. Where it has no counter, those of the whole node are counted; None
    if the kernel does not say.
    """
    paths = []
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            # cgroups(7): hierarchy, controllers, path; the hierarchy of version 2 names no controllers.
            _, controllers, path = line.split(":", 2)
            if not controllers:
                paths.append(root / "sys/fs/cgroup" / path.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                paths.append(root / "sys/fs/cgroup/memory" / path.lstrip("/") / "memory.oom_control")
    for file in (*paths, root / "proc/vmstat"):
        with contextlib.suppress(OSError):
            # "oom_kill" in memory.events (cgroup-v2.html), memory.oom_control (v1, since Linux 4.13) and vmstat.
            counts = re.findall(r"^oom_kill ([0-9]+)", file.read_text(), re.MULTILINE)
            if counts:
                return int(counts[0])
    return None


def _exit_text(failure: WorkerFailure) -> str:
    exit_code = failure.exit_code
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    explained = failure.message.startswith((causes.BY_WATCHDOG, causes.BY_KERNEL))
    hint = ", perhaps for lack of memory" if -exit_code == signal.SIGKILL and not explained else ""
    return f"was killed by {name}{hint}"


def _shown_lines(text: str) -> list[str]:
    # A progress bar rewrites its line after a carriage return: only the last state was visible.
    lines = [_CONTROL.sub("", line.rstrip().rpartition("\r")[2]) for line in text.split("\n")]
    kept = [line[:_WIDTH] for line in lines if line.strip() and not causes.NATIVE_FRAME.match(line)]
    if kept and kept[0] == causes.TRACEBACK:
        kept = [line for line in kept if line != _ABORTED]
    if len(kept) > _LINES:
        kept = _without_libraries(kept)
    if len(kept) <= _LINES:
        return kept
    # A traceback begins with what it is and ends with what went wrong.
    first = kept[:1] if kept[0] == causes.TRACEBACK else []
    return [*first, "...", *kept[len(first) + 1 - _LINES :]] if first else kept[-_LINES:]


def _without_libraries(lines: list[str]) -> list[str]:
    """Leave the frames of libraries out of a traceback, but for the last one: those of the script tell more."""
    frames: list[list[str]] = []
    for line in lines:
        if frames and frames[-1][0].startswith(_FRAME) and line.startswith(("    ", "  [Previous line")):
            frames[-1].append(line)
        else:
            frames.append([line])
    if not any(first.startswith(_FRAME) and not _OF_LIBRARY.match(first) for first, *_ in frames):
        return lines
    kept: list[list[str]] = []
    for frame, (after, *_) in itertools.pairwise([*frames, [""]]):
        if not (_OF_LIBRARY.match(frame[0]) and after.startswith(_FRAME)):
            kept.append(frame)
        elif kept[-1:] != [["  ..."]]:
            kept.append(["  ..."])
    return [line for frame in kept for line in frame]


def recorded_traceback(error_file: str) -> str:
    """Return the whole traceback in the file of ``@record``; empty if there is none."""
    try:
        content = typed_json.loads(read_file(Path(error_file)) or b"")
    except (OSError, ValueError):
        return ""
    message: Any = content.get("message", "") if isinstance(content, dict) else ""
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        message = (extra.get("py_callstack") if isinstance(extra, dict) else None) or message.get("message", "")
    return message if isinstance(message, str) else ""


def _tail(log: str) -> str:
    try:
        with Path(log).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""


def end_on_record(records: Records) -> ExitCode | None:
    """Return the exit code for how the run has ended, and log the root cause of a failure; None if the run goes on.

    A failure counts if it is one of the newest round: no agent identity is used twice, and a run that failed may have
    begun again since.
    """
    if records.is_done():
        return ExitCode.FINISHED
    content, newest = records.failure(), records.situation().round
    if content is None or newest is None:
        return None
    failure = typed_json.convert(content, WorkerFailure)
    if failure.agent not in {place["agent"] for place in newest["places"]}:
        return None
    logger.error("%s", root_cause(failure))
    return ExitCode.FAILED
