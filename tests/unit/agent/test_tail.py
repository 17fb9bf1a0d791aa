from __future__ import annotations

import io
from pathlib import Path

from slurm_elastic.agent.log_tail import Followed, Tail


def everything(text: str) -> bool:
    return True


def test_whole_lines_are_shown_with_their_prefix(tmp_path: Path) -> None:
    shown = io.StringIO()
    log = tmp_path / "stdout.log"
    followed = Followed(str(log), "[n1/0] ", shown, everything)
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
    followed = Followed(str(log), "> ", shown, everything)
    followed.show()
    assert shown.getvalue() == ""
    followed.show(to_the_end=True)
    assert shown.getvalue() == "> no end of line\n"


def test_only_the_wanted_lines_are_shown(tmp_path: Path) -> None:
    shown = io.StringIO()
    log = tmp_path / "stdout.log"
    log.write_bytes(b"a loss\nnoise\n")
    Followed(str(log), "", shown, lambda line: "loss" in line).show()
    assert shown.getvalue() == "a loss\n"


def test_stop_shows_what_was_written_before_it_in_every_file(tmp_path: Path) -> None:
    shown = io.StringIO()
    logs = [tmp_path / "0", tmp_path / "1"]
    tail = Tail([Followed(str(log), f"{log.name}:", shown, everything) for log in logs])
    tail.start()
    for log in logs:
        log.write_bytes(b"last words\n" * 20000)
    tail.stop()
    assert shown.getvalue().count("0:last words\n") == shown.getvalue().count("1:last words\n") == 20000


def test_a_file_that_never_came_is_no_trouble(tmp_path: Path) -> None:
    shown = io.StringIO()
    tail = Tail([Followed(str(tmp_path / "missing"), "", shown, everything)])
    tail.start()
    tail.stop()
    assert shown.getvalue() == ""
