"""The end of a worker in its own output: the traceback that ended it, and the line that names the error. Pure.

Python and libraries print other tracebacks, too: of finalizers and exit functions, which Python ignores; of threads; of
errors that were logged and handled; and those of this package's own machinery. None of them has ended the worker while
another one is there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_HEADER = "Traceback (most recent call last):"
_PREFIX = re.compile(r"^\[rank\d+\]:(?:\[[^\]\n]*\])? ?", re.MULTILINE)
"""torch's prefix of the lines of a traceback (distributed_c10d.py, _distributed_excepthook, 2.13)."""
_GROUP = re.compile(r"^[ |+-]*\| ?")
"""The margin of an exception group (traceback.py, Python 3.11)."""
_IGNORED = re.compile(r"^(?:Exception ignored |Error in (?:atexit\._run_exitfuncs|sys\.\w+):|--- Logging error ---)")
"""Before tracebacks after which the process goes on (Python/errors.c, atexitmodule.c, logging, Python 3.10 to 3.14)."""
_THREAD = re.compile(r"^Exception in thread ")
_CHAINED = re.compile(
    r"^(?:During handling of the above|The above exception was|Original Traceback|-- Process \d+ term)"
)
_OURS = re.compile(r'^ *File "[^"\n]*/slurm_elastic/(?:agent/forkserver|control)/')
_NATIVE_FRAME = re.compile(r"^(?:frame #\d+: |Exception raised from .* \(most recent call first\):$)")
_SURVIVED = 20
"""Lines after a traceback that show that the worker went on; an exception's own words are fewer."""
_FATAL = re.compile(r"^(?:Fatal Python error: .*|\s*what\(\): .*|terminate called without .*)$")
_AFTER = re.compile(
    r"^(?:wandb: |\[W\d+ |\[rank\d+\]:\[W|srun: |slurmstepd: |Usage: |Set the environment variable HYDRA_|\s*$"
    r"|Extension modules: |Current thread |Thread 0x|  File \"|  <no Python frame>"
    r"|.*\b(?:resource_tracker\.py|UserWarning|warnings\.warn\())"
)
"""Lines that libraries print while a process ends; none of them is its error."""
_DEAD, _THREADS, _MACHINERY, _MAIN, _RANK = range(5)


@dataclass(frozen=True, slots=True)
class _Block:
    """One traceback: the lines from `first` to `last`, which names the exception. The highest kind is the fatal one."""

    first: int
    last: int
    kind: int


def without_prefixes(text: str) -> str:
    """Return the text without the prefix that torch gives each line of a traceback."""
    return _PREFIX.sub("", text)


def ending(text: str) -> str:
    """Return the output from the traceback that ended the worker on, without those that did not.

    Without such a traceback it is the whole output, and without prefixes of torch in any case.
    """
    lines, fatal, blocks = _parse(text)
    dropped = {
        number
        for block in blocks
        if (block.kind == _DEAD if fatal is None else block.first > fatal.first and block.kind < fatal.kind)
        for number in range(block.first, block.last + 1)
    }
    first = 0 if fatal is None else fatal.first
    kept = [_GROUP.sub("", lines[number]) for number in range(first, len(lines)) if number not in dropped]
    return "\n".join(kept) if any(line.strip() for line in kept) else "\n".join(lines)


def error_line(text: str) -> str:
    """Return the line of a worker's output that names its error; empty if the output is."""
    lines, fatal, _ = _parse(text)
    if fatal is not None:
        return _GROUP.sub("", lines[fatal.last]).strip()
    own_lines = [line.strip() for line in ending(text).split("\n") if not _AFTER.match(line)]
    return next((line for line in reversed(own_lines) if _FATAL.match(line)), own_lines[-1] if own_lines else "")


def _parse(text: str) -> tuple[Sequence[str], _Block | None, Sequence[_Block]]:
    """Return the lines, without torch's prefixes; the traceback that ended the worker, if one did; and all of them."""
    raw = text.split("\n")
    lines = [_PREFIX.sub("", line) for line in raw]
    blocks: list[_Block] = []
    for number, line in enumerate(lines):
        if line.rstrip().endswith(_HEADER):
            blocks.append(_block(raw, lines, number, blocks))
    newest = max(blocks, key=lambda block: (block.kind, block.first), default=None)
    if newest is None or newest.kind == _DEAD:
        return lines, None, blocks
    later = {number for block in blocks if block.first > newest.last for number in range(block.first, block.last + 1)}
    rest = [line for number, line in enumerate(lines) if number > newest.last and number not in later]
    after = sum(bool(line.strip()) and not _NATIVE_FRAME.match(line) and not _AFTER.match(line) for line in rest)
    return lines, None if after > _SURVIVED and newest.kind < _RANK else newest, blocks


def _block(raw: Sequence[str], lines: Sequence[str], header: int, before: Sequence[_Block]) -> _Block:
    margin = len(lines[header]) - len(_GROUP.sub("", lines[header]))
    bare = [line[margin:] if margin else line for line in lines[header + 1 : header + 1 + 2000]]
    last = next((header + 1 + number for number, line in enumerate(bare) if line and line[0] not in " \t"), None)
    last = len(lines) - 1 if last is None else last
    number_before = next((number for number in range(header - 1, -1, -1) if lines[number].strip()), None)
    words = "" if number_before is None else lines[number_before]
    chained = _CHAINED.match(words) or _CHAINED.match(lines[header])
    first = header
    if chained and before:
        kind = before[-1].kind
        first = number_before if kind == _DEAD and number_before is not None else header
    elif _IGNORED.match(words):
        kind, first = _DEAD, header - 1
        if words.startswith("--- Logging"):
            ends = (number for number in range(last, len(lines)) if lines[number].startswith("Arguments: "))
            last = next(ends, last)
    elif _THREAD.match(words):
        kind = _THREADS
    elif header + 1 < len(lines) and _OURS.match(lines[header + 1]):
        kind = _MACHINERY
    else:
        kind = _RANK if raw[header] != lines[header] else _MAIN
    return _Block(first, last, kind)
