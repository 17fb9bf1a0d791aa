from __future__ import annotations

import io
import json
import logging
import time
import tracemalloc
from pathlib import Path

from slurm_elastic.agent.console_log import configure_logging
from slurm_elastic.agent.workers.output import FollowedFile, LastWords, LogTimes, Tail


def test_lines_are_shown_with_their_prefix_as_they_come(tmp_path: Path) -> None:
    shown = io.StringIO()
    log = tmp_path / "stdout.log"
    followed = FollowedFile(str(log), "[n1/0] ", shown)
    assert not followed.show()
    log.write_bytes(b"one\n\ntw")
    assert followed.show()
    assert shown.getvalue() == "[n1/0] one\n[n1/0] \n[n1/0] tw"
    with log.open("ab") as file:
        file.write(b"o\n\xff\xc3")
    followed.show()
    with log.open("ab") as file:
        file.write(b"\xa4\r\nend")
    followed.show()
    assert shown.getvalue() == "[n1/0] one\n[n1/0] \n[n1/0] two\n[n1/0] \ufffdä\r\n[n1/0] end"
    followed.show(to_the_end=True)
    assert shown.getvalue().endswith("end\n")


def test_a_bar_keeps_its_prefix_and_others_begin_lines_of_their_own(tmp_path: Path) -> None:
    shown = io.StringIO()
    logs = [tmp_path / "0", tmp_path / "1"]
    bar, other = (FollowedFile(str(log), f"[n1/{log.name}] ", shown) for log in logs)

    def say(file: FollowedFile, text: str) -> str:
        before = shown.tell()
        with Path(file.path).open("a", newline="") as log:
            log.write(text)
        file.show()
        return shown.getvalue()[before:]

    assert say(bar, "\r 10%|#") == "\r[n1/0]  10%|#"
    assert say(bar, "#\r 20%|##") == "#\r[n1/0]  20%|##"
    assert say(other, "pdb> ") == "\n[n1/1] pdb> "
    assert say(other, "c\n") == "c\n"
    assert say(bar, "\r 30%|###\r") == "\r[n1/0]  30%|###\r"
    assert say(bar, " 40%") == "[n1/0]  40%"
    configure_logging("n1", shown)
    logging.getLogger("slurm_elastic").warning("a word")
    assert "40%\n" in shown.getvalue()
    assert shown.getvalue().endswith("[slurm-elastic n1] warning: a word\n")
    assert say(bar, "|") == "[n1/0] |"
    bar.show(to_the_end=True)
    assert shown.getvalue().endswith("[n1/0] |\n")


def test_streams_to_one_place_share_its_last_line_and_others_do_not(tmp_path: Path) -> None:
    for name in ("out", "err"):
        (tmp_path / name).write_text(f"of {name}")
    with (tmp_path / "one").open("a") as one, (tmp_path / "one").open("a") as same, (tmp_path / "two").open("a") as two:
        for streams in ((one, same), (one, two)):
            files = [
                FollowedFile(str(tmp_path / name), "> ", stream)
                for name, stream in zip(("out", "err"), streams, strict=True)
            ]
            for file in files:
                file.show()
            for file in files:
                file.show(to_the_end=True)
    assert (tmp_path / "one").read_text() == "> of out\n> of err\n> of out\n"
    assert (tmp_path / "two").read_text() == "> of err\n"


def test_a_line_without_an_end_costs_no_memory(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    block = b"\r" + b"#" * ((1 << 20) - 1)
    for words in ((), ("loss",)):
        log.write_bytes(b"")
        with (tmp_path / "shown").open("w") as shown, log.open("ab", buffering=0) as file:
            followed = FollowedFile(str(log), "", shown, words)
            followed.show()
            tracemalloc.start()
            for _ in range(16):
                file.write(block)
                followed.show()
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            followed.show(to_the_end=True)
        assert most < len(block)


def test_only_the_wanted_lines_are_shown(tmp_path: Path) -> None:
    shown = io.StringIO()
    log = tmp_path / "stdout.log"
    log.write_bytes(b"a loss\nnoise\n")
    FollowedFile(str(log), "", shown, ("loss",)).show()
    assert shown.getvalue() == "a loss\n"


def test_stop_shows_what_was_written_before_it_in_every_file(tmp_path: Path) -> None:
    shown = io.StringIO()
    logs = [tmp_path / "0", tmp_path / "1"]
    tail = Tail([FollowedFile(str(log), f"{log.name}:", shown) for log in logs])
    tail.start()
    for log in logs:
        log.write_bytes(b"last words\n" * 20000)
    tail.stop()
    assert shown.getvalue().count("0:last words\n") == shown.getvalue().count("1:last words\n") == 20000


def test_a_file_that_never_came_is_no_trouble(tmp_path: Path) -> None:
    shown = io.StringIO()
    tail = Tail([FollowedFile(str(tmp_path / "missing"), "", shown)])
    tail.start()
    tail.stop()
    assert shown.getvalue() == ""


def test_the_times_of_logs_are_noted_when_they_grow(tmp_path: Path) -> None:
    logs = [tmp_path / f"rank_0{rank}" / "stdout.log" for rank in (0, 1)]
    for log in logs:
        log.parent.mkdir()
    index = logs[0].with_name("times.jsonl")
    times = LogTimes(str(index), [str(log) for log in logs], pause=3600.0)
    assert not times.show()
    before = time.time()
    logs[0].write_text("one\n")
    assert times.show()
    # The logs grow all the time; a line for each look would be more than they are.
    logs[0].write_text("one\ntwo\n")
    logs[1].write_text("1\n")
    assert not times.show()
    times.show(to_the_end=True)
    first, second = (json.loads(line) for line in index.read_text().splitlines())
    assert first["sizes"] == {"rank_00/stdout.log": 4}
    assert second["sizes"] == {"rank_00/stdout.log": 8, "rank_01/stdout.log": 2}
    assert before - 0.01 <= first["time"] <= second["time"] <= time.time() + 0.01


def test_a_disk_that_refuses_the_times_stops_nothing(tmp_path: Path) -> None:
    log = tmp_path / "stdout.log"
    log.write_text("one\n")
    times = LogTimes(str(tmp_path / "missing" / "times.jsonl"), [str(log)])
    assert times.show()
    assert not times.show(to_the_end=True)


def test_a_tail_without_files_to_show_notes_their_times(tmp_path: Path) -> None:
    log, index = tmp_path / "stdout.log", tmp_path / "times.jsonl"
    tail = Tail([LogTimes(str(index), [str(log)])])
    tail.start()
    log.write_text("one\n")
    tail.stop()
    assert json.loads(index.read_text())["sizes"] == {f"{tmp_path.name}/stdout.log": 4}


TRACEBACK = "[rank0]: Traceback (most recent call last):\n[rank0]: RuntimeError: Connection reset by peer\n"


class Worker:
    """A worker whose stderr is followed on a brief console."""

    def __init__(self, directory: Path) -> None:
        self.shown, self.log, self.now, self.ended = io.StringIO(), directory / "stderr.log", 0.0, False
        self.words = LastWords(lambda: self.ended, lambda: self.now)
        self.followed = FollowedFile(str(self.log), "> ", self.shown, last_words=self.words)

    def write(self, text: str) -> str:
        """Return what is shown of it now."""
        before = self.shown.tell()
        with self.log.open("a") as file:
            file.write(text)
        self.followed.show()
        return self.shown.getvalue()[before:]


def test_last_words_are_held_back_until_their_cause_is_known(tmp_path: Path) -> None:
    for is_consequence in (True, False):
        worker = Worker(tmp_path / str(is_consequence))
        worker.log.parent.mkdir()
        assert worker.write("a word\n" + TRACEBACK) == "> a word\n"
        worker.now, worker.ended = 100.0, True
        assert worker.write("more\n") == ""
        worker.words.is_consequence = lambda text, answer=is_consequence: text == TRACEBACK + "more\n" and answer  # type: ignore[misc]
        worker.followed.show(to_the_end=True)
        assert ("Traceback" in worker.shown.getvalue(), "more" in worker.shown.getvalue()) == 2 * (not is_consequence,)
        # The file has all.
        assert "Traceback" in worker.log.read_text()


def test_a_traceback_that_the_worker_survives_is_shown_soon(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    assert worker.write(TRACEBACK) == ""
    worker.now = 1.9
    assert worker.write("still here\n") == ""
    worker.now = 2.0
    assert worker.write("").count("\n") == 3
    assert worker.write("and on\n") == "> and on\n"


def test_what_is_held_back_is_bounded(tmp_path: Path) -> None:
    worker, line = Worker(tmp_path), "x" * 99 + "\n"
    worker.ended = True
    assert worker.write(TRACEBACK) == ""
    assert worker.write(line * 1000).count(line) == 1000
