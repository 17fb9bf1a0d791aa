"""The log of an agent on stderr: one line per event, for people to read."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from typing import TYPE_CHECKING, TextIO

from slurm_elastic.agent.log_tail import finish_line
from slurm_elastic.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

_PREFIXES = {logging.WARNING: "warning: ", logging.ERROR: "error: ", logging.CRITICAL: "error: "}
_STYLES = {logging.WARNING: "yellow", logging.ERROR: "bold red", logging.CRITICAL: "bold red"}

_STOP_LOGGER = "torch.distributed.elastic.multiprocessing.api"
"""torch's logger that warns of every worker that is stopped, at every round change, and repeats the root cause."""


def configure_logging(node: str, stream: TextIO | None = None) -> None:
    """Set up logging: ``12:34:56 [slurm-elastic node2] message`` on stderr, in colour on a terminal.

    torch's loggers keep their level (warnings), except for the one that reports each stopped worker. LOGLEVEL, which
    torch reads for its elastic loggers (elastic/utils/logging.py, 2.13), sets the level of all.

    Args:
        node: Slurm's name of this node.
        stream: The stream to write to; None for stderr.

    Raises:
        UsageError: LOGLEVEL is no level; torch would end with a traceback.
    """
    stream = stream or sys.stderr
    logger = logging.getLogger("slurm_elastic")
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
    logger.addHandler(_Handler(node, stream))
    logger.propagate = False
    level = os.environ.get("LOGLEVEL")
    if level is not None and not isinstance(logging.getLevelName(level), int):
        raise UsageError(f"LOGLEVEL={level!r} is no level; set it to DEBUG, INFO, WARNING or ERROR, or unset it")
    logger.setLevel(level or logging.INFO)
    if level is None:
        logging.getLogger(_STOP_LOGGER).setLevel(logging.CRITICAL)
    # torch copies the workers' lines to sys.stdout without flushing, and in a job that is no terminal.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


class _Handler(logging.Handler):
    def __init__(self, node: str, stream: TextIO) -> None:
        super().__init__()
        self._node = node
        self._stream = stream
        self._console = _console(stream)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(record)
        except Exception:
            self.handleError(record)

    def _write(self, record: logging.LogRecord) -> None:
        formatter = logging.Formatter()
        head = f"{formatter.formatTime(record, '%H:%M:%S')} [slurm-elastic {self._node}] "
        text = _PREFIXES.get(record.levelno, "") + record.getMessage()
        if record.exc_info:
            text += "\n" + formatter.formatException(record.exc_info)
        finish_line(self._stream)
        if self._console:
            from rich.text import Text

            line = Text.assemble((head, "dim"), (text, _STYLES.get(record.levelno, "")))
            self._console.print(line, soft_wrap=True)
        else:
            # One write for the whole line, so that other processes cannot write into it.
            self._stream.write(f"{head}{text}\n")
            self._stream.flush()


def _console(stream: TextIO) -> Console | None:
    with contextlib.suppress(ValueError):
        if stream.isatty():
            from rich.console import Console

            return Console(file=stream, highlight=False)
    return None
