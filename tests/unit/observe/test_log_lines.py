from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path

import pytest

from slurm_elastic.observe import log_lines
from slurm_elastic.observe.log_lines import LogFilter, LogReader, log_times
from slurm_elastic.rundir import RunContents, RunFile
from tests.unit.observe.runs import WrittenRun

EVERYTHING = LogFilter()


def log(run: WrittenRun, round_: int, node: str, rank: int, stream: str = "stdout") -> Path:
    directory = run.run_dir.rank_dir(round_, node, rank, 100)
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f"{stream}.log"


def written(path: Path, first: int, *pieces: tuple[float, str]) -> None:
    """Write a log in pieces, and their times where the agent of its node does, beside the log of rank `first`."""
    index = path.parents[1] / f"rank_{first:02d}" / "times.jsonl"
    for time, text in pieces:
        with path.open("a") as file:
            file.write(text)
        sizes = {f"{path.parent.name}/{path.name}": path.stat().st_size}
        with index.open("a") as file:
            file.write(json.dumps({"time": time, "sizes": sizes}) + "\n")


def shown(run: WrittenRun, wanted: LogFilter = EVERYTHING) -> list[tuple[float | None, int, str]]:
    reader = LogReader(RunContents(run.run_dir), wanted)
    return [(line.time, line.log.rank, line.text) for line in reader.lines()]


@pytest.mark.parametrize("block", [1, 3, 1 << 16])
def test_lines_of_all_ranks_are_merged_by_time(run: WrittenRun, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(log_lines, "_MOST_BLOCK", block)
    monkeypatch.setattr(log_lines, "_LEAST_BLOCK", block)
    zero, one, two = log(run, 0, "n1", 0), log(run, 0, "n1", 1), log(run, 0, "n2", 2)
    written(zero, 0, (1.0, "a\nb"), (3.0, "c\nd\n"), (9.0, "the last has no end"))
    written(one, 0, (2.0, "x\n"), (4.0, "\xe4\n"))
    written(two, 2, (2.5, "y\r1 %\r2 %\n"))
    written(log(run, 1, "n1", 0), 0, (0.5, "the next round\n"))
    assert shown(run) == [
        (1.0, 0, "a"),
        (2.0, 1, "x"),
        (2.5, 2, "2 %"),
        (3.0, 0, "bc"),
        (3.0, 0, "d"),
        (4.0, 1, "\xe4"),
        (9.0, 0, "the last has no end"),
        # Rounds follow each other, whatever the clocks say.
        (0.5, 0, "the next round"),
    ]


def test_every_line_is_shown_once_while_logs_grow(run: WrittenRun) -> None:
    drawn = random.Random(7)
    reader = LogReader(RunContents(run.run_dir), EVERYTHING)
    seen: dict[int, list[str]] = {rank: [] for rank in range(3)}
    times = []
    paths = {rank: log(run, 0, "n1", rank) for rank in seen}
    counts = dict.fromkeys(seen, 0)
    for look in range(200):
        rank = drawn.randrange(3)
        counts[rank] += 1
        text = f"{rank}.{counts[rank]}\n"
        cut = drawn.randrange(len(text))
        written(paths[rank], 0, (look + 0.1, text[:cut]), (look + 0.2, text[cut:]))
        for line in reader.lines(last=look == 199):
            seen[line.log.rank].append(line.text)
            times.append(line.time)
    for rank, lines in seen.items():
        assert lines == [f"{rank}.{number}" for number in range(1, counts[rank] + 1)]
    assert times == sorted(times, key=lambda time: time or 0.0)


def test_bytes_without_a_time_yet_wait(run: WrittenRun) -> None:
    path = log(run, 0, "n1", 0)
    written(path, 0, (1.0, "a\n"))
    reader = LogReader(RunContents(run.run_dir), EVERYTHING)
    with path.open("a") as file:
        file.write("b\n")
    assert [line.text for line in reader.lines(last=False)] == ["a"]
    # At the end, as of an agent that was killed, they have the time of the last change of the log.
    os.utime(path, (7.0, 7.0))
    assert [(line.time, line.text) for line in reader.lines()] == [(7.0, "b")]
    # As of one without any times, whose disk was full.
    other = log(run, 0, "n1", 1)
    other.write_text("c\n")
    os.utime(other, (8.0, 8.0))
    assert list(reader.lines(last=False)) == []
    assert [(line.time, line.text) for line in reader.lines()] == [(8.0, "c")]


def test_what_is_wanted(run: WrittenRun) -> None:
    written(log(run, 0, "n1", 0), 0, (1.0, "early\nloss 1\n"), (5.0, "loss 2\n"))
    written(log(run, 0, "n2", 1, "stderr"), 1, (2.0, "loss 3\n"))
    written(log(run, 1, "n2", 0), 0, (6.0, "loss 4\n"))

    def texts(**wanted: object) -> list[str]:
        return [text for _, _, text in shown(run, LogFilter(**wanted))]  # type: ignore[arg-type]

    assert texts(pattern=re.compile("loss [23]")) == ["loss 3", "loss 2"]
    assert texts(ranks=[range(1, 2)]) == ["loss 3"]
    assert texts(nodes={"n2"}) == ["loss 3", "loss 4"]
    assert texts(rounds=[range(1, 2)]) == ["loss 4"]
    assert texts(since=2.0) == ["loss 3", "loss 2", "loss 4"]


def test_damaged_times_are_left_out() -> None:
    good = '{"time": 2, "sizes": {"rank_00/stdout.log": 4}}'
    lines = ["", "x", "[]", '{"time": "x", "sizes": {}}', '{"time": 1, "sizes": 3}', good, '{"time": 3, "si']
    lines.insert(3, '{"time": 1, "sizes": {"rank_00/stdout.log": "many"}}')
    found = log_times(RunFile("logs/round_0000/n1/rank_00/times.jsonl", "\n".join(lines).encode()))
    ((name, (sizes, at)),) = found.items()
    assert (name, list(sizes), list(at)) == ("rank_00/stdout.log", [4], [2.0])
