"""Output that is not read blocks no writer."""

from __future__ import annotations

import io
import logging
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_elastic.agent.workers import output
from slurm_elastic.agent.workers.output import FollowedFile, NonblockingStream, Tail, make_output_nonblocking

HANG = 60.0


class Pipe:
    """A stream into a pipe, and the end for a reader."""

    def __init__(self, stalled_after: float) -> None:
        self.reading, self.writing = os.pipe()
        self.stream = NonblockingStream(self.writing, stalled_after)

    def read(self, until: bytes) -> bytes:
        found = b""
        while until not in found:
            assert select.select([self.reading], [], [], HANG)[0], found[-100:]
            found += os.read(self.reading, 1 << 16)
        return found

    def close(self) -> None:
        # What waits cannot be written any more, so the thread is through with the descriptor.
        os.close(self.reading)
        while not self.stream.finish():
            pass
        os.close(self.writing)


@pytest.fixture
def pipe(request: pytest.FixtureRequest) -> Iterator[Pipe]:
    """A pipe whose reader counts as stalled after 0.1 s, or after the seconds of the parameter."""
    made = Pipe(getattr(request, "param", 0.1))
    yield made
    made.close()


def test_everything_arrives_in_its_order(pipe: Pipe) -> None:
    lines = [f"line {number} ä\n" for number in range(1000)]
    for line in lines:
        print(line, end="", file=pipe.stream, flush=True)
    assert pipe.read(b"line 999 \xc3\xa4\n").decode() == "".join(lines)
    pipe.stream.finish()


def test_a_line_that_is_longer_than_all_that_may_wait_arrives(pipe: Pipe) -> None:
    pipe.stream.write("x" * (1 << 20) + "\n")
    assert pipe.read(b"\n") == b"x" * (1 << 20) + b"\n"


def test_a_reader_that_stops_holds_up_nobody_and_is_told_what_is_left_out(pipe: Pipe) -> None:
    piece = "x" * 99_999 + "\n"
    for _ in range(20):
        pipe.stream.write(piece)
        pipe.stream.wait_for_room()
    pipe.stream.finish()
    assert b"pieces of output dropped here: srun, or the disk, did not take them\n" in pipe.read(b"them\n")
    pipe.stream.write("again\n")
    pipe.read(b"again\n")


@pytest.mark.parametrize("pipe", [HANG], indirect=True)
def test_a_slow_reader_misses_nothing_of_who_has_time(pipe: Pipe) -> None:
    with subprocess.Popen(["wc", "-c"], stdin=pipe.reading, stdout=subprocess.PIPE, text=True) as reader:
        for _ in range(30):
            pipe.stream.wait_for_room()
            pipe.stream.write("x" * 100_000)
        while not pipe.stream.finish():
            pass
        os.close(pipe.writing)
        assert reader.communicate(timeout=HANG)[0] == "3000000\n"
    pipe.writing = os.open(os.devnull, os.O_WRONLY)


def test_workers_output_that_nobody_reads_does_not_hold_up_the_end_of_a_round(pipe: Pipe, tmp_path: Path) -> None:
    log = tmp_path / "stdout.log"
    log.write_bytes(b"many words\n" * 500_000)
    tail = Tail([FollowedFile(str(log), "", pipe.stream)])
    tail.start()
    tail.stop()


def test_pipes_and_files_are_replaced_and_terminals_are_not(
    pipe: Pipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[object] = []
    monkeypatch.setattr(output.atexit, "register", registered.append)
    ours, theirs = os.openpty()
    with (
        io.TextIOWrapper(io.FileIO(os.dup(pipe.writing), "w")) as old,
        io.TextIOWrapper(io.FileIO(theirs, "w")) as terminal,
        (tmp_path / "file").open("w") as file,
        (tmp_path / "file").open("a") as same,
    ):
        handler = logging.StreamHandler(old)
        logging.getLogger("of.torch").addHandler(handler)
        monkeypatch.setattr(sys, "stderr", old)
        monkeypatch.setattr(sys, "stdout", terminal)
        try:
            make_output_nonblocking()
            new = sys.stderr
            assert isinstance(new, NonblockingStream)
            assert (sys.stdout, handler.stream, registered) == (terminal, new, [new.finish])
            logging.getLogger("of.torch").error("broken")
            assert pipe.read(b"\n") == b"broken\n"
            new.finish()
        finally:
            logging.getLogger("of.torch").removeHandler(handler)
        monkeypatch.setattr(sys, "stderr", file)
        monkeypatch.setattr(sys, "stdout", same)
        make_output_nonblocking()
        assert isinstance(sys.stdout, NonblockingStream)
        assert sys.stdout is sys.stderr
    os.close(ours)


def test_a_disk_that_is_full_for_a_moment_takes_what_comes_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "shown").open("wb") as file:
        full = os.open("/dev/full", os.O_WRONLY)
        saved = os.dup(file.fileno())
        stream = NonblockingStream(file.fileno())
        stream.write("before\n")
        stream.finish()
        os.dup2(full, file.fileno())
        for _ in range(3):
            stream.write("lost\n")
            stream.finish()
        os.dup2(saved, file.fileno())
        stream.write("after\n")
        stream.finish()
        os.close(full)
        os.close(saved)
    assert (tmp_path / "shown").read_text() == (
        "before\nafter\n[slurm-elastic] 3 pieces of output dropped here: No space left on device\n"
    )
