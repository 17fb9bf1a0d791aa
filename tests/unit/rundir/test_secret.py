"""The secret: drawn once, private, and never taken from elsewhere."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from slurm_elastic.errors import UsageError
from slurm_elastic.rundir import RunDir
from tests.unit.rundir.helpers.processes import OTHER_USER, as_root, as_user, hidden, race


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
    os.chown(run_dir.path / "secret", OTHER_USER, OTHER_USER)
    with pytest.raises(UsageError, match=r"belongs to another user .uid 65534."):
        run_dir.secret()
    mine = RunDir.for_run(open_base, "1").open()
    mine.secret()
    mine.path.chmod(0o777)
    assert "belongs to another user (uid 0)" in str(as_user(OTHER_USER, mine.secret))


def test_the_token_of_health_ports_follows_from_the_secret(run_dir: RunDir, tmp_path: Path) -> None:
    token = run_dir.health_token()
    assert token == RunDir.for_run(tmp_path, "7").health_token() != run_dir.secret().hex()
    path = run_dir.path / "health-token"
    assert path.read_text() == f"{token}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text(f"{'0' * 64}\n")
    with pytest.raises(UsageError, match="health-token is not the token of this run; remove it"):
        run_dir.health_token()
    path.unlink()
    assert run_dir.health_token() == token
    assert RunDir.for_run(tmp_path, "2").open().health_token() != token
