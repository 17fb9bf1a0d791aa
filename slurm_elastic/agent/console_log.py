"""The log of an agent: one line per fact on stderr, for people to read, and every line in a file of the run."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable
from typing import TextIO

from slurm_elastic.agent.line_writer import LineWriter
from slurm_elastic.agent.workers.output import finish_line
from slurm_elastic.errors import UsageError

NOTICE = logging.INFO + 5
"""The level of lines that people see also with ``--console brief``; those of lower levels are details."""
_PREFIXES = {logging.WARNING: "warning: ", logging.ERROR: "error: ", logging.CRITICAL: "error: "}

_STOP_LOGGER = "torch.distributed.elastic.multiprocessing.api"
"""torch's logger that warns of every worker that is stopped, at every round change, and repeats the root cause."""


def configure_logging(node: str, stream: TextIO | None = None, *, brief: bool = False) -> None:
    """Set up logging: ``12:34:56 [slurm-elastic node2] message`` on stderr.

    torch's loggers keep their level (warnings), except for the one that reports each stopped worker. LOGLEVEL, which
    torch reads for its elastic loggers (elastic/utils/logging.py, 2.13), sets the level of all.

    Args:
        brief: True to leave out details, unless LOGLEVEL is set.

    Raises:
        UsageError: LOGLEVEL is no level; torch would end with a traceback.
    """
    stream = stream or sys.stderr
    logger = logging.getLogger("slurm_elastic")
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
    handler = _Handler(node, stream)
    logger.addHandler(handler)
    logger.propagate = False
    level = os.environ.get("LOGLEVEL")
    if brief and level is None:
        handler.setLevel(NOTICE)
    if level is not None and not isinstance(logging.getLevelName(level), int):
        raise UsageError(f"LOGLEVEL={level!r} is no level; set it to DEBUG, INFO, WARNING or ERROR, or unset it")
    logger.setLevel(level or logging.INFO)
    if level is None:
        logging.getLogger(_STOP_LOGGER).setLevel(logging.CRITICAL)
    # torch copies the workers' lines to sys.stdout without flushing, and in a job that is no terminal.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def notice(text: str) -> None:
    """Write a line that people see also with ``--console brief``."""
    logging.getLogger("slurm_elastic").log(NOTICE, "%s", text)


class LogFile(logging.Handler):
    """Keeps the lines of this agent's log until there is a file, and then lets a thread write them."""

    def __init__(self) -> None:
        super().__init__()
        self._writer = LineWriter("log lines are")

    def emit(self, record: logging.LogRecord) -> None:
        self._writer.put(f"{logging.Formatter().formatTime(record)} {_text(record)}\n")

    def open(self, append: Callable[[str], None]) -> None:
        """Start to write."""
        self._writer.start(append)

    def close(self) -> None:
        """Write out all lines; logging calls this when the process ends."""
        self._writer.close(1.0)
        super().close()


class _Handler(logging.StreamHandler[TextIO]):
    def __init__(self, node: str, stream: TextIO) -> None:
        super().__init__(stream)
        self._node = node

    def emit(self, record: logging.LogRecord) -> None:
        finish_line(self.stream)
        # One write for the whole line, so that other processes cannot write into it.
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        time = logging.Formatter().formatTime(record, "%H:%M:%S")
        return f"{time} [slurm-elastic {self._node}] {_text(record)}"


def _text(record: logging.LogRecord) -> str:
    text = _PREFIXES.get(record.levelno, "") + record.getMessage()
    return f"{text}\n{logging.Formatter().formatException(record.exc_info)}" if record.exc_info else text
