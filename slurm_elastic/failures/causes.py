"""The causes of failures: their registry, the end of a worker in its output, and a failure that comes again. Pure.

A row of the registry is found by the text of a failure (its traceback, or the end of its stderr) and its exit code.
Python and libraries print other tracebacks, too: of finalizers and exit functions, which Python ignores; of threads; of
errors that were logged and handled; and of this package's own machinery. None of them has ended the worker
while another one is there.
"""

from __future__ import annotations

import configparser
import functools
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BY_WATCHDOG = "by the watchdog: "
"""The beginning of the message of a worker that the watchdog killed."""
BY_KERNEL = "by the kernel: "
"""The beginning of the message of a worker that the kernel killed for lack of memory."""


_OUTLOOKS = {
    "again": "a restart can help",
    "not_again": "a restart will not help",
    "elsewhere": "another node can help",
    "unknown": "",
}
"""The effects that another start can have, as a person reads them: the same can succeed when it starts again; it fails
again until a person changes something; it can succeed on another node."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A row: a cause, and how to know it.

    Attributes:
        name: Never changed, as programs read it.
        title: The cause in a few words; empty for a row that says no more than the message of the failure.
        domain: The part of the run that has failed: user_code, data, node, network, storage, slurm or unknown.
        outlook: The effect that another start can have: again, not_again, elsewhere or unknown.
        text: Found in the text of the failure; `^` stands for the beginning of a line. None if `signals` alone tell.
        signals: Numbers of signals by one of which the worker ended; empty for every end.
        consequence: True if another worker, or the agent, made this one fail.
        advice: What a person can do; empty for nothing in general.
    """

    name: str
    title: str
    domain: str
    outlook: str
    text: re.Pattern[str] | None = None
    signals: tuple[int, ...] = ()
    consequence: bool = False
    advice: str = ""

    @property
    def domain_words(self) -> str:
        """The domain as a person reads it."""
        return "Slurm" if self.domain == "slurm" else self.domain.replace("_", " ")

    @property
    def outlook_words(self) -> str:
        """The outlook as a person reads it; empty if it is unknown."""
        return _OUTLOOKS[self.outlook]


_NAMED = r"^(?:[\w.]*\.)?(?:{})(?::|$)"
"""The last line of a traceback; {} are names of exceptions, with or without their modules."""


@functools.cache
def registry() -> tuple[Cause, ...]:
    """Return all causes, in the order in which they are tried."""
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    parser.read_string(Path(__file__).with_name("causes.ini").read_text())
    return tuple(_cause(parser[name]) for name in parser.sections())


def _cause(row: configparser.SectionProxy) -> Cause:
    texts = [_NAMED.format(_joined(row["raised"]))] if "raised" in row else []
    texts += [_joined(row["text"])] if "text" in row else []
    return Cause(
        row.name,
        row.get("title", ""),
        row["domain"],
        row["outlook"],
        re.compile("|".join(texts), re.MULTILINE) if texts else None,
        tuple(signal.Signals[f"SIG{name}"].value for name in row.get("signals", "").split()),
        row.getboolean("consequence", False),
        " ".join(row.get("advice", "").splitlines()),
    )


def _joined(value: str) -> str:
    return value.replace("\n", "")


TRACEBACK = "Traceback (most recent call last):"
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
NATIVE_FRAME = re.compile(r"^(?:frame #\d+: |Exception raised from .* \(most recent call first\):$)")
"""The C++ stack that follows the message of an error of torch (c10/util/Exception.cpp, 2.13)."""
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
        if line.rstrip().endswith(TRACEBACK):
            blocks.append(_block(raw, lines, number, blocks))
    newest = max(blocks, key=lambda block: (block.kind, block.first), default=None)
    if newest is None or newest.kind == _DEAD:
        return lines, None, blocks
    later = {number for block in blocks if block.first > newest.last for number in range(block.first, block.last + 1)}
    rest = [line for number, line in enumerate(lines) if number > newest.last and number not in later]
    after = sum(bool(line.strip()) and not NATIVE_FRAME.match(line) and not _AFTER.match(line) for line in rest)
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


_END = 40
"""Lines at the end of a log without a traceback in which a cause is looked for: earlier ones were survived."""
_IN_USE = re.compile(r"(?:this process|Process \d+) has [\d.]+ \w+ memory in use", re.IGNORECASE)
"""Whose memory a GPU is full of (c10/cuda/CUDACachingAllocator.cpp, torch 2.13)."""
_KILL = 9
_UNKNOWN = Cause("unknown", "", "unknown", "unknown")


@dataclass(frozen=True, slots=True)
class Attribution:
    """The cause of a failure.

    Attributes:
        cause: A row of the registry; a row named `unknown` if none fits.
        detail: More about this failure, such as who uses the memory; empty for nothing.
    """

    cause: Cause
    detail: str = ""


def attribute(text: str, exit_code: int | None = None) -> Attribution:
    """Return the cause of a failure.

    Args:
        text: The traceback of the worker, else the end of its stderr; or the words of the watchdog or of the agent.
        exit_code: Of the worker, negative for a signal; None if it is unknown.
    """
    if exit_code == -_KILL and not text.startswith((BY_KERNEL, BY_WATCHDOG)):
        # SIGKILL comes from outside: what the worker wrote before says nothing about it.
        text = ""
    text = ending(text)
    if not text.startswith(TRACEBACK):
        text = "\n".join(text.rstrip().split("\n")[-_END:])
    for row in registry():
        by_text = row.text is not None and row.text.search(text) is not None
        by_signal = exit_code is not None and exit_code < 0 and -exit_code in row.signals
        if by_text or by_signal:
            return Attribution(row, _detail(row, text))
    return Attribution(_UNKNOWN)


def explanation(cause: str, detail: str = "") -> str:
    """Return a cause in one line for people; empty for one that says no more than the failure itself."""
    row = named(cause)
    if row is None or not row.title:
        return ""
    domain = "" if row.domain == "unknown" else f" ({row.domain_words})"
    words = ", ".join(filter(None, (f"{row.title}{domain}", row.outlook_words)))
    return f"{words}; {detail}" if detail else words


def named(cause: str) -> Cause | None:
    """Return the row of this name; None if this release has none."""
    return next((row for row in registry() if row.name == cause), None)


def _detail(row: Cause, text: str) -> str:
    if row.name == "gpu_memory":
        return ", ".join(dict.fromkeys(detail[0].lower() + detail[1:] for detail in _IN_USE.findall(text)))
    if row.name == "host_memory" and text.startswith(BY_KERNEL):
        return text.split("\n")[0].removeprefix(BY_KERNEL)
    return ""


BEFORE_FIRST_STEP = "before the first step"
_FRAME = re.compile(r'^  File "([^"\n]+)", line (\d+)', re.MULTILINE)
_RAISED = re.compile(r"^(?!Traceback \()\S.*", re.MULTILINE)
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|[0-9]+(?:\.[0-9]+)*")
_WIDTH = 200


def position(calls: int | None, step: int | None) -> str | None:
    """Return where in the training a worker was; None if that cannot be compared with another round.

    Args:
        calls: Calls of should_stop in this round; None if the script does not use the trainer API.
        step: The step that the script gave to the last of them, in its own count; None if it gave none. The number of
            calls is not comparable: a round may start from a later checkpoint than the one before.
    """
    if calls == 0:
        return BEFORE_FIRST_STEP
    return None if calls is None or step is None else f"at step {step}"


def fingerprint(attribution: Attribution, text: str, exit_code: int, where: str | None) -> str:
    """Return what two failures have in common if the second is the first one again; empty if that is never known.

    It is empty for a consequence of another failure, for a signal from outside, and where a restart can help. A script
    that does not say where it was has one only if a restart will not help.

    Args:
        text: The traceback of the worker, or the end of its stderr.
        exit_code: Of the worker, negative for a signal.
        where: Of the worker, see `position`.
    """
    row = attribution.cause
    outside = row.domain == "unknown" and exit_code < 0 and row.name != "hang"
    if row.consequence or outside or row.outlook in ("again", "elsewhere"):
        return ""
    if where is None and row.outlook != "not_again":
        return ""
    text = without_prefixes(text)
    frames = list(_FRAME.finditer(text))
    raised = _RAISED.search(text, frames[-1].end() if frames else 0)
    words = "" if row.name == "hang" or raised is None else _NUMBERS.sub("#", raised[0])[:_WIDTH]
    place = f"{frames[-1][1]}:{frames[-1][2]}" if frames else ""
    return " | ".join((row.name, str(exit_code), words, place[-_WIDTH:], where or ""))
