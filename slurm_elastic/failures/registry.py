"""The registry of causes of worker failures, read from ``causes.ini``.

A row is found by the text of a failure (its traceback, or the end of its stderr) and by its exit code, in the order of
the file.
"""

from __future__ import annotations

import configparser
import enum
import functools
import re
import signal
from dataclasses import dataclass
from pathlib import Path

BY_WATCHDOG = "by the watchdog: "
"""The beginning of the message of a worker that the watchdog killed."""
BY_KERNEL = "by the kernel: "
"""The beginning of the message of a worker that the kernel killed for lack of memory."""


class Domain(enum.Enum):
    """The part of a run that has failed."""

    USER_CODE = "user_code"
    DATA = "data"
    NODE = "node"
    NETWORK = "network"
    STORAGE = "storage"
    SLURM = "slurm"
    UNKNOWN = "unknown"

    @property
    def words(self) -> str:
        """The domain as a person reads it."""
        return {Domain.SLURM: "Slurm"}.get(self, self.value.replace("_", " "))


class Outlook(enum.Enum):
    """The effect that another start can have."""

    AGAIN = "again"
    """The same can succeed when it starts again."""
    NOT_AGAIN = "not_again"
    """It fails again until a person changes something."""
    ELSEWHERE = "elsewhere"
    """It can succeed on another node."""
    UNKNOWN = "unknown"

    @property
    def words(self) -> str:
        """The outlook as a person reads it; empty if it is unknown."""
        return {
            Outlook.AGAIN: "a restart can help",
            Outlook.NOT_AGAIN: "a restart will not help",
            Outlook.ELSEWHERE: "another node can help",
            Outlook.UNKNOWN: "",
        }[self]


@dataclass(frozen=True, slots=True)
class Cause:
    """A row: a cause, and how to know it.

    Attributes:
        name: The name of the cause in records; never changed, as programs read it.
        title: The cause in a few words; empty for a row that says no more than the message of the failure.
        domain: The part of the run that has failed.
        outlook: What another start can bring.
        text: Found in the text of the failure; `^` stands for the beginning of a line. None if `signals` alone tell.
        signals: Numbers of signals by one of which the worker ended; empty for every end.
        consequence: True if another worker, or the agent, made this one fail.
        advice: What a person can do; empty for nothing in general.
    """

    name: str
    title: str
    domain: Domain
    outlook: Outlook
    text: re.Pattern[str] | None = None
    signals: tuple[int, ...] = ()
    consequence: bool = False
    advice: str = ""


_RAISED = r"^(?:[\w.]*\.)?(?:{})(?::|$)"
"""The last line of a traceback; {} are names of exceptions, with or without their modules."""


@functools.cache
def registry() -> tuple[Cause, ...]:
    """Return all causes, in the order in which they are tried."""
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    parser.read_string(Path(__file__).with_name("causes.ini").read_text())
    return tuple(_cause(parser[name]) for name in parser.sections())


def _cause(row: configparser.SectionProxy) -> Cause:
    texts = [_RAISED.format(_joined(row["raised"]))] if "raised" in row else []
    texts += [_joined(row["text"])] if "text" in row else []
    return Cause(
        row.name,
        row.get("title", ""),
        Domain(row["domain"]),
        Outlook(row["outlook"]),
        re.compile("|".join(texts), re.MULTILINE) if texts else None,
        tuple(signal.Signals[f"SIG{name}"].value for name in row.get("signals", "").split()),
        row.getboolean("consequence", False),
        " ".join(row.get("advice", "").splitlines()),
    )


def _joined(value: str) -> str:
    return value.replace("\n", "")
