"""The run directory, with real processes racing for it and real file systems that are full or not writable."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic.errors import UsageError
from slurm_elastic.rundir import RecordError, RunDir, RunDirError

RACERS = 16
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes root to mount and to become another user")


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.for_run(tmp_path, "4711").open()


@pytest.fixture
def open_base() -> Iterator[Path]:
    """Give a directory that every user can look into, unlike pytest's."""
    base = Path(tempfile.mkdtemp())
    base.chmod(0o755)
    yield base
    shutil.rmtree(base)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount small file systems in memory."""
    mounted: list[Path] = []

    def tmpfs(options: str) -> Path:
        where = tmp_path / f"mounted{len(mounted)}"
        where.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", where], check=True, timeout=20)
        mounted.append(where)
        return where

    yield tmpfs
    for where in mounted:
        subprocess.run(["umount", "--lazy", where], check=True, timeout=20)


def race(action: Callable[[int], Any], racers: int = RACERS, user: int | None = None) -> list[Any]:
    """Let processes do something at the same moment; return what each returned, or the error it raised."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(racers)
    answers = context.SimpleQueue()

    def racer(number: int) -> None:
        if user is not None:
            os.setuid(user)
        barrier.wait(timeout=30)
        try:
            answers.put((number, action(number)))
        except Exception as error:
            answers.put((number, error))

    processes = [context.Process(target=racer, args=(number,), daemon=True) for number in range(racers)]
    try:
        for process in processes:
            process.start()
        results = {}
        for process in processes:
            process.join(timeout=60)
            assert process.exitcode == 0
            number, result = answers.get()
            results[number] = result
        return [results[number] for number in range(racers)]
    finally:
        for process in processes:
            process.kill()
            process.join(timeout=10)


def as_user(user: int, action: Callable[[], Any]) -> Any:
    return race(lambda _: action(), racers=1, user=user)[0]


def hidden(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.name.startswith(".")]


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
        lambda: run_dir.claim_epoch(name, 1, b"{}"),
        lambda: run_dir.newest_epoch(name),
        lambda: run_dir.publish_endpoint(name, b"{}"),
        lambda: run_dir.publish(name, b""),
        lambda: run_dir.claim(name, b""),
    ):
        with pytest.raises(UsageError, match="no safe file name; use"):
            use()


def test_safe_names(tmp_path: Path) -> None:
    for run_id in ("4711", "my_run-2.b", "a" * 128):
        RunDir.for_run(tmp_path, run_id).open()


def test_many_open_at_once_and_share_one_secret(tmp_path: Path) -> None:
    secrets = race(lambda _: RunDir.for_run(tmp_path, "1").open().secret())
    assert len(set(secrets)) == 1
    assert len(secrets[0]) == 32
    path = tmp_path / "elastic-runs" / "1" / "secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_nlink == 1
    assert bytes.fromhex(path.read_text()) == secrets[0]
    assert hidden(tmp_path) == []
    assert RunDir.for_run(tmp_path, "2").open().secret() != secrets[0]


def test_the_secret_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        RunDir.for_run(tmp_path, "1").open().secret()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "elastic-runs" / "1" / "secret").stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_secret_open_to_others_is_refused(run_dir: RunDir, mode: int) -> None:
    run_dir.secret()
    (run_dir.path / "secret").chmod(mode)
    with pytest.raises(UsageError, match=rf"open to others .mode {mode:04o}.; chmod 600"):
        run_dir.secret()


@pytest.mark.parametrize("content", [b"", b"00" * 31 + b"\n", b"00" * 32, b"0" * 70 + b"\n", b"xy" * 32 + b"\n"])
def test_a_truncated_or_foreign_secret_is_refused(run_dir: RunDir, content: bytes) -> None:
    path = run_dir.path / "secret"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(UsageError, match="not the secret of a run; remove it"):
        run_dir.secret()


def test_a_link_is_no_secret(run_dir: RunDir, tmp_path: Path) -> None:
    other = RunDir.for_run(tmp_path, "1").open()
    other.secret()
    (run_dir.path / "secret").symlink_to(other.path / "secret")
    with pytest.raises(UsageError, match="not a regular file"):
        run_dir.secret()


@as_root
def test_another_users_secret_is_refused(run_dir: RunDir, open_base: Path) -> None:
    run_dir.secret()
    os.chown(run_dir.path / "secret", NOBODY, NOBODY)
    with pytest.raises(UsageError, match=r"belongs to another user .uid 65534."):
        run_dir.secret()
    mine = RunDir.for_run(open_base, "1").open()
    mine.secret()
    mine.path.chmod(0o777)
    assert "belongs to another user (uid 0)" in str(as_user(NOBODY, mine.secret))


def test_claim_has_one_winner_and_its_content_is_whole(run_dir: RunDir) -> None:
    def content(number: int) -> bytes:
        return bytes([65 + number]) * 100_000

    won = race(lambda number: run_dir.claim("leader", content(number)))
    assert sorted(won) == [False] * (RACERS - 1) + [True]
    assert run_dir.read("leader") == content(won.index(True))
    assert hidden(run_dir.path) == []


def test_a_reader_never_sees_part_of_a_claim_or_publication(run_dir: RunDir) -> None:
    size = 300_000
    rounds = 40

    def act(number: int) -> set[tuple[int, int]]:
        if number == 0:
            for turn in range(rounds):
                run_dir.publish("published", bytes([turn]) * size)
                run_dir.claim(f"claimed{turn}", bytes([turn]) * size)
            return set()
        seen = set()
        turn = 0
        while run_dir.read(f"claimed{rounds - 1}") is None:
            for name in ("published", f"claimed{turn % rounds}"):
                content = run_dir.read(name)
                if content is not None:
                    seen.add((len(content), len(set(content))))
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
    assert run_dir.claim("x", b"{}") is True
    assert run_dir.claim("x", b"[]") is False
    assert run_dir.read("x") == b"{}"


def test_rounds_are_claimed_once_and_the_last_is_known(run_dir: RunDir) -> None:
    assert run_dir.last_round() is None
    assert run_dir.round_record(0) is None
    assert sum(race(lambda number: run_dir.claim_round(0, b'{"by": %d}' % number))) == 1
    for number in (1, 2, 10):
        assert run_dir.claim_round(number, b"{}")
    assert not run_dir.claim_round(2, b"{}")
    assert run_dir.claim_round(1_000_000, b"{}")
    (run_dir.path / "rounds" / "9999999.json.bak").touch()
    (run_dir.path / "rounds" / ".9999999.json.0123").touch()
    assert run_dir.last_round() == 1_000_000
    with pytest.raises(ValueError, match="start at 0"):
        run_dir.claim_round(-1, b"{}")


def test_epochs_of_incarnations_are_apart(run_dir: RunDir) -> None:
    assert run_dir.newest_epoch("0") is None
    assert sum(race(lambda number: run_dir.claim_epoch("0", 1, b'{"by": %d}' % number))) == 1
    assert run_dir.claim_epoch("0", 2, b'{"leader": "n2"}')
    assert run_dir.newest_epoch("0") == 2
    assert run_dir.epoch_record("0", 2) == b'{"leader": "n2"}'
    assert run_dir.newest_epoch("1") is None
    assert run_dir.claim_epoch("1", 1, b"{}")


def test_endpoints_of_incarnations_are_apart(run_dir: RunDir) -> None:
    assert run_dir.endpoint("0") is None
    run_dir.publish_endpoint("0", b'{"port": 1}')
    run_dir.publish_endpoint("0", b'{"port": 2}')
    assert run_dir.endpoint("0") == b'{"port": 2}'
    assert run_dir.endpoint("1") is None


def test_done_is_recorded_once(run_dir: RunDir) -> None:
    assert not run_dir.is_done()
    assert run_dir.done_record() is None
    assert sum(race(lambda number: run_dir.mark_done({"by": number}))) == 1
    assert run_dir.is_done()
    first = run_dir.done_record()
    assert first is not None
    assert set(first) == {"by"}
    assert not run_dir.mark_done({"by": "late"})
    assert run_dir.done_record() == first


def test_done_can_be_asked_before_the_directory_exists(tmp_path: Path) -> None:
    assert not RunDir.for_run(tmp_path / "nowhere", "1").is_done()


@pytest.mark.parametrize("content", [b"", b'{"port": 1', b"[]", b"\x80\x04N.", b"\xff", b"[" * 100_000, b"{}{}"])
def test_truncated_or_foreign_records_are_reported(run_dir: RunDir, content: bytes) -> None:
    run_dir.publish_endpoint("0", content)
    run_dir.claim_epoch("0", 1, content)
    run_dir.claim_round(0, content)
    run_dir.claim("done.json", content)
    for read in (
        lambda: run_dir.endpoint("0"),
        lambda: run_dir.epoch_record("0", 1),
        lambda: run_dir.round_record(0),
        run_dir.done_record,
    ):
        with pytest.raises(RecordError, match="not one complete JSON object"):
            read()
    assert run_dir.is_done()


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


def test_a_missing_base(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere is no directory on this node; .*--run-dir"):
        RunDir.for_run(tmp_path / "nowhere", "1").open()


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "elastic-runs").touch()
    with pytest.raises(UsageError, match="elastic-runs: a file is in the way"):
        RunDir.for_run(tmp_path, "1").open()


@as_root
def test_a_directory_of_somebody_else(open_base: Path) -> None:
    run = RunDir.for_run(open_base, "1")
    message = str(as_user(NOBODY, run.open))
    assert f"{run.path.parent}: no permission for this user; mend" in message
    assert "--run-dir" in message
    run.open()
    error = as_user(NOBODY, run.open)
    assert isinstance(error, UsageError)
    assert f"{run.path}: no permission" in str(error)
    error = as_user(NOBODY, lambda: run.claim_round(0, b"{}"))
    assert isinstance(error, RunDirError)
    assert "000000.json: no permission" in str(error)


@as_root
def test_a_base_that_cannot_be_looked_into(open_base: Path) -> None:
    (open_base / "closed" / "base").mkdir(parents=True)
    (open_base / "closed").chmod(0o700)
    error = as_user(NOBODY, RunDir.for_run(open_base / "closed" / "base", "1").open)
    assert isinstance(error, UsageError)
    assert "no permission" in str(error)


@as_root
@pytest.mark.parametrize("options", ["size=16k", "size=1m,nr_inodes=6"])
def test_a_full_disk(mount: Callable[[str], Path], options: str) -> None:
    with pytest.raises(UsageError, match="the file system is full; free some space, or give another"):
        RunDir.for_run(mount(options), "1").open()


@as_root
def test_a_disk_that_gets_full_later(mount: Callable[[str], Path]) -> None:
    base = mount("size=1m")
    run = RunDir.for_run(base, "1").open()
    run.publish_endpoint("0", b"{}")
    (base / "filler").write_bytes(bytes(900_000))
    for act in (
        lambda: run.publish_endpoint("0", b"{" + b" " * 200_000 + b"}"),
        lambda: run.claim_epoch("0", 1, bytes(200_000)),
        lambda: run.append_event("n1", "x" * 200_000),
    ):
        with pytest.raises(RunDirError, match="the file system is full"):
            act()
    assert run.endpoint("0") == b"{}"
    assert run.newest_epoch("0") is None
    assert hidden(base) == []


@as_root
def test_a_read_only_disk(mount: Callable[[str], Path]) -> None:
    base = mount("size=1m")
    run = RunDir.for_run(base, "1").open()
    subprocess.run(["mount", "-o", "remount,ro", base], check=True, timeout=20)
    with pytest.raises(UsageError, match="mounted read-only"):
        run.open()
    with pytest.raises(RunDirError, match="mounted read-only"):
        run.claim_round(0, b"{}")
    assert run.last_round() is None


def test_a_directory_removed_under_way(run_dir: RunDir) -> None:
    shutil.rmtree(run_dir.path)
    with pytest.raises(RunDirError, match="gone, or its directory is"):
        run_dir.claim_round(0, b"{}")
    assert run_dir.last_round() is None
    assert run_dir.newest_epoch("0") is None
