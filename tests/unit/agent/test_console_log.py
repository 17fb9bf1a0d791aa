from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator

import pytest

from slurm_elastic.agent.console_log import LogFile, configure_logging, notice
from slurm_elastic.errors import UsageError

CHATTER = "torch.distributed.elastic.multiprocessing.api"


@pytest.fixture(autouse=True)
def _loggers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("LOGLEVEL", raising=False)
    loggers = [logging.getLogger(name) for name in ("slurm_elastic", CHATTER)]
    before = [(logger.level, logger.propagate, logger.handlers[:]) for logger in loggers]
    yield
    for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate, logger.handlers = propagate, handlers


def lines(text: str) -> list[str]:
    return [re.sub(r"^[0-9]{2}:[0-9]{2}:[0-9]{2} ", "<time> ", line) for line in text.splitlines()]


def test_a_line_for_each_event() -> None:
    stream = io.StringIO()
    configure_logging("n2", stream)
    log = logging.getLogger("slurm_elastic.agent")
    log.debug("hidden")
    log.info("lost %s", "n3")
    log.warning("slow")
    log.error("broken")
    assert lines(stream.getvalue()) == [
        "<time> [slurm-elastic n2] lost n3",
        "<time> [slurm-elastic n2] warning: slow",
        "<time> [slurm-elastic n2] error: broken",
    ]


def test_a_brief_console_has_no_details_and_the_file_has_all() -> None:
    stream, file, log = io.StringIO(), LogFile(), logging.getLogger("slurm_elastic")
    configure_logging("n2", stream, brief=True)
    log.addHandler(file)
    log.info("a detail")
    notice("a fact")
    log.warning("slow")
    written: list[str] = []
    file.open(written.append)
    file.close()
    assert lines(stream.getvalue()) == ["<time> [slurm-elastic n2] a fact", "<time> [slurm-elastic n2] warning: slow"]
    assert [line.split(" ", 2)[2] for line in written] == ["a detail\n", "a fact\n", "warning: slow\n"]


def test_told_twice_it_is_told_once() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging("n2", first)
    configure_logging("n2", second)
    logging.getLogger("slurm_elastic").info("one")
    assert (lines(first.getvalue()), lines(second.getvalue())) == ([], ["<time> [slurm-elastic n2] one"])


def test_a_traceback_is_kept() -> None:
    stream = io.StringIO()
    configure_logging("n2", stream)
    try:
        raise ValueError("x")
    except ValueError:
        logging.getLogger("slurm_elastic").exception("went wrong")
    told = stream.getvalue().splitlines()
    assert (told[1], told[-1]) == ("Traceback (most recent call last):", "ValueError: x")


@pytest.mark.parametrize(
    ("level", "own", "chatter"),
    [(None, logging.INFO, logging.CRITICAL), ("DEBUG", logging.DEBUG, 0), ("ERROR", logging.ERROR, 0)],
)
def test_levels(monkeypatch: pytest.MonkeyPatch, level: str | None, own: int, chatter: int) -> None:
    logging.getLogger(CHATTER).setLevel(logging.NOTSET)
    if level:
        monkeypatch.setenv("LOGLEVEL", level)
    configure_logging("n2", io.StringIO())
    assert (logging.getLogger("slurm_elastic").level, logging.getLogger(CHATTER).level) == (own, chatter)


@pytest.mark.parametrize("level", ["info", "", "10"])
def test_a_level_that_torch_would_choke_on(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    monkeypatch.setenv("LOGLEVEL", level)
    with pytest.raises(UsageError, match=r"^LOGLEVEL='.*' is no level; set it to DEBUG, INFO, WARNING or ERROR"):
        configure_logging("n2", io.StringIO())
