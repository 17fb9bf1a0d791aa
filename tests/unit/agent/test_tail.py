from __future__ import annotations

import io
import json
import time
from pathlib import Path

from slurm_elastic.agent.log_tail import FollowedFile, LogTimes, Tail


def everything(text: str) -> bool:
    return True


def test_whole_lines_are_shown_with_their_prefix(tmp_path: Path) -> None:
    shown = io.StringIO()
    log = tmp_path / "stdout.log"
    followed = FollowedFile(str(log), "[n1/0] ", shown, everything)
    assert not followed.show()
    log.write_bytes(b"one\ntw")
    assert followed.show()
    assert shown.getvalue() == "[n1/0] one\n"
    with log.open("ab") as file:
        file.write(b"o\n\xff\n")
    followed.show()
    assert shown.getvalue() == "[n1/0] one\n[n1/0] two\n[n1/0] \ufffd\n"


def test_what_has_no_end_of_line_is_shown_at_the_end(tmp_path: Path) -> None:
    shown = io.StringIO()
    log = tmp_path / "stdout.log"
    log.write_bytes(b"no end of line")
    followed = FollowedFile(str(log), "> ", shown, everything)
    followed.show()
    assert shown.getvalue() == ""
    followed.show(to_the_end=True)
    assert shown.getvalue() == "> no end of line\n"


def test_only_the_wanted_lines_are_shown(tmp_path: Path) -> None:
    shown = io.StringIO()
    log = tmp_path / "stdout.log"
    log.write_bytes(b"a loss\nnoise\n")
    FollowedFile(str(log), "", shown, lambda line: "loss" in line).show()
    assert shown.getvalue() == "a loss\n"


def test_stop_shows_what_was_written_before_it_in_every_file(tmp_path: Path) -> None:
    shown = io.StringIO()
    logs = [tmp_path / "0", tmp_path / "1"]
    tail = Tail([FollowedFile(str(log), f"{log.name}:", shown, everything) for log in logs])
    tail.start()
    for log in logs:
        log.write_bytes(b"last words\n" * 20000)
    tail.stop()
    assert shown.getvalue().count("0:last words\n") == shown.getvalue().count("1:last words\n") == 20000


def test_a_file_that_never_came_is_no_trouble(tmp_path: Path) -> None:
    shown = io.StringIO()
    tail = Tail([FollowedFile(str(tmp_path / "missing"), "", shown, everything)])
    tail.start()
    tail.stop()
    assert shown.getvalue() == ""


def test_the_times_of_logs_are_noted_when_they_grow(tmp_path: Path) -> None:
    logs = [tmp_path / f"rank_0{rank}" / "stdout.log" for rank in (0, 1)]
    for log in logs:
        log.parent.mkdir()
    index = logs[0].with_name("times.jsonl")
    times = LogTimes(str(index), [str(log) for log in logs], pause=3600.0)
    assert not times.note()
    before = time.time()
    logs[0].write_text("one\n")
    assert times.note()
    # The logs grow all the time; a line for each look would be more than they are.
    logs[0].write_text("one\ntwo\n")
    logs[1].write_text("1\n")
    assert not times.note()
    times.close()
    first, second = (json.loads(line) for line in index.read_text().splitlines())
    assert first["sizes"] == {"rank_00/stdout.log": 4}
    assert second["sizes"] == {"rank_00/stdout.log": 8, "rank_01/stdout.log": 2}
    assert before - 0.01 <= first["time"] <= second["time"] <= time.time() + 0.01


def test_a_disk_that_refuses_the_times_stops_nothing(tmp_path: Path) -> None:
    log = tmp_path / "stdout.log"
    log.write_text("one\n")
    times = LogTimes(str(tmp_path / "missing" / "times.jsonl"), [str(log)])
    assert times.note()
    assert not times.note(at_once=True)
    times.close()


def test_a_tail_without_files_to_show_notes_their_times(tmp_path: Path) -> None:
    log, index = tmp_path / "stdout.log", tmp_path / "times.jsonl"
    tail = Tail([], LogTimes(str(index), [str(log)]))
    tail.start()
    log.write_text("one\n")
    tail.stop()
    assert json.loads(index.read_text())["sizes"] == {f"{tmp_path.name}/stdout.log": 4}
