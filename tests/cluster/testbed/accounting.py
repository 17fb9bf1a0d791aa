"""Accounting: MariaDB on one machine, slurmdbd on another; they meet at a unix socket in the state directory."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from . import config, machine
from .errors import TestbedError
from .settings import ACCOUNTING, DATABASE, Settings

MACHINES = (DATABASE, ACCOUNTING)
"""In the order in which they must start."""

_SMALL = ("--innodb-log-file-size=8M", "--innodb-buffer-pool-size=32M", "--innodb-flush-log-at-trx-commit=0")


def missing_programs(settings: Settings) -> list[Path]:
    """Programs that accounting needs and the machine lacks."""
    programs = [
        Path("/usr/sbin/mariadbd"),
        Path("/usr/bin/mariadb-install-db"),
        settings.root / "usr/sbin/slurmdbd",
    ]
    return [program for program in programs if not program.exists()]


def start_machine(settings: Settings, name: str) -> None:
    """Boot one of MACHINES and wait until it serves."""
    if name == DATABASE:
        _start_database(settings)
    else:
        _start_slurmdbd(settings)


def _socket(settings: Settings) -> Path:
    return settings.state / "mariadb.sock"


def _start_database(settings: Settings) -> None:
    data = settings.state / "mariadb"
    if not data.exists():
        data.mkdir(mode=0o700)
        log = settings.state / "log/mariadb-install-db.log"
        with log.open("wb") as output:
            done = subprocess.run(
                [
                    *("mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data}", *_SMALL),
                    *("--auth-root-authentication-method=normal", "--skip-test-db"),
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if done.returncode != 0:
            raise TestbedError(f"mariadb-install-db: exit {done.returncode}, see {log}")
    program = [
        *("/usr/sbin/mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", *_SMALL),
        *("--skip-networking", f"--socket={_socket(settings)}", "--pid-file=/run/mariadbd.pid"),
        f"--log-error={settings.state}/log/mariadbd.log",
    ]
    _socket(settings).unlink(missing_ok=True)
    # Always this Debian's, whatever the release of Slurm.
    machine.start(settings, DATABASE, program, root=Path("/"))
    machine.wait_running(settings, DATABASE)
    _wait("MariaDB does not answer", lambda: _accepts(_socket(settings)))


def _start_slurmdbd(settings: Settings) -> None:
    file = settings.state / "slurmdbd.conf"
    # slurmdbd refuses a file that others can read.
    file.touch(mode=0o600)
    file.write_text(config.slurmdbd_conf(settings))
    # StorageHost=localhost means libmariadb's default socket, which only this variable changes.
    machine.start(settings, ACCOUNTING, ["/usr/sbin/slurmdbd", "-D"], env={"MYSQL_UNIX_PORT": str(_socket(settings))})
    machine.wait_running(settings, ACCOUNTING)
    _wait("slurmdbd does not answer", lambda: machine.listens(settings, ACCOUNTING, 6819))


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
        except OSError:
            return False
    return True


def _wait(complaint: str, condition: Callable[[], bool], timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TestbedError(f"{complaint} after {timeout} s")
        time.sleep(0.05)
