"""Names and records, with many processes claiming and reading them at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_elastic.errors import UsageError
from slurm_elastic.rundir import RunDir
from tests.unit.rundir.helpers.processes import RACERS, hidden, race


def test_layout(tmp_path: Path) -> None:
    run = RunDir.for_run(tmp_path, "4711")
    assert run.path == tmp_path / "elastic-runs" / "4711"
    assert not run.path.exists()
    assert run.open() is run
    assert run.log_dir(3, "n2") == run.path / "logs" / "round_0003" / "n2"
    assert run.rank_dir(3, "n2", 5, 8).name == "rank_05"
    assert run.rank_dir(3, "n2", 5, 100).name == "rank_05"
    assert run.rank_dir(3, "n2", 5, 101).name == "rank_005"
    assert run.rank_dir(12345, "n2", 0, 1) == run.path / "logs" / "round_12345" / "n2" / "rank_00"
    assert hidden(run.path) == []


def test_a_relative_base_is_fixed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert RunDir.for_run(Path(), "1").path == tmp_path / "elastic-runs" / "1"


@pytest.mark.parametrize("name", ["", ".", "..", "../4", "a/b", ".hidden", "-x", "a b", "a\n", "ä", "a" * 129, "a\0"])
def test_unsafe_names(run_dir: RunDir, name: str) -> None:
    for use in (
        lambda: RunDir.for_run(run_dir.path, name),
        lambda: run_dir.log_dir(0, name),
        lambda: run_dir.append_event(name, "{}"),
        lambda: run_dir.claim_record({}, "epochs", name, 1),
        lambda: run_dir.newest("epochs", name),
        lambda: run_dir.publish_record({}, "endpoints", name),
        lambda: run_dir.publish_record({}, name),
        lambda: run_dir.claim_record({}, "notified", name),
    ):
        with pytest.raises(UsageError, match="no safe file name; use"):
            use()


def test_safe_names(tmp_path: Path) -> None:
    for run_id in ("4711", "my_run-2.b", "a" * 128):
        RunDir.for_run(tmp_path, run_id).open()


def test_a_reader_never_sees_part_of_a_claim_or_publication(run_dir: RunDir) -> None:
    size = 300_000
    rounds = 40

    def act(number: int) -> set[tuple[int, int]]:
        if number == 0:
            for turn in range(rounds):
                run_dir.publish_record({"text": chr(65 + turn) * size}, "published")
                run_dir.claim_record({"text": chr(65 + turn) * size}, f"claimed{turn}")
            return set()
        seen = set()
        turn = 0
        over = False
        while not over:
            # Looked at before, so that even who comes late reads once.
            over = run_dir.read_record(f"claimed{rounds - 1}") is not None
            for name in ("published", f"claimed{turn % rounds}"):
                record = run_dir.read_record(name)
                if record is not None:
                    seen.add((len(record["text"]), len(set(record["text"]))))
                    turn += 1
        return seen

    first, *others = race(act, racers=3)
    assert first == set()
    assert others == [{(size, 1)}, {(size, 1)}]


def test_a_lost_answer_to_link_counts_as_won(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    # An NFS client may repeat a link() that the server has done already; only the answer is played here.
    real = Path.hardlink_to

    def repeated(self: Path, target: Path) -> None:
        real(self, target)
        real(self, target)

    monkeypatch.setattr(Path, "hardlink_to", repeated)
    assert run_dir.claim_record({"by": 1}, "x") is True
    assert run_dir.claim_record({"by": 2}, "x") is False
    assert run_dir.read_record("x") == {"by": 1}


def test_other_files_among_the_rounds_are_none(run_dir: RunDir) -> None:
    for number in (10, 1_000_000):
        assert run_dir.claim_record({}, "rounds", number)
    (run_dir.path / "rounds" / "9999999.json.bak").touch()
    (run_dir.path / "rounds" / ".9999999.json.0123").touch()
    assert run_dir.newest("rounds") == 1_000_000
    with pytest.raises(ValueError, match="start at 0"):
        run_dir.claim_record({}, "rounds", -1)


def test_done_can_be_asked_before_the_directory_exists(tmp_path: Path) -> None:
    assert not RunDir.for_run(tmp_path / "nowhere", "1").is_done()


def test_events_are_whole_lines_per_node(run_dir: RunDir) -> None:
    def write(number: int) -> None:
        for turn in range(50):
            run_dir.append_event(f"n{number % 2}", f"{number} {turn} {'x' * 500}")

    assert race(write) == [None] * RACERS
    for node in range(2):
        lines = (run_dir.path / "events" / f"n{node}.jsonl").read_text().splitlines()
        assert len(lines) == RACERS // 2 * 50
        assert all(line.endswith("x" * 500) and line.count(" ") == 2 for line in lines)
    with pytest.raises(ValueError, match="one line"):
        run_dir.append_event("n0", "a\nb")
