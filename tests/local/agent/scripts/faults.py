"""A training script in which rank 1 fails in each round by another one of FAULTS, and ends well after the last."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

_CLONE_NEWNS = 0x00020000
"""unshare(2); Python has it since 3.12."""


def _raise(error: BaseException) -> NoReturn:
    raise error


def _open_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
    for _ in range(32):
        os.dup(0)


def _write_to_full_disk() -> None:
    Path("/dev/full").write_text("x")


def _fill_tmp() -> None:
    """Open a file on a full file system below /tmp, which no other process sees mounted."""
    assert ctypes.CDLL(None).unshare(_CLONE_NEWNS) == 0
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        subprocess.run(["/bin/mount", "--make-rprivate", "/"], check=True)
        # Its directory takes the only inode.
        subprocess.run(["/bin/mount", "-t", "tmpfs", "-o", "nr_inodes=1", "full", directory], check=True)
        try:
            Path(directory, "batch.pt").touch()
        finally:
            subprocess.run(["/bin/umount", directory], check=True)


def _bind_twice() -> None:
    first, second = socket.socket(), socket.socket()
    first.bind(("127.0.0.1", 0))
    second.bind(first.getsockname())


def _leave_collective() -> None:
    """Fail so that rank 0, which waits in a collective, ends long before this process does."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        if os.environ["RANK"] == "1":
            raise ValueError("the root of both")
        dist.all_reduce(torch.ones(1))
    finally:
        if os.environ["RANK"] == "1":
            dist.destroy_process_group()
            time.sleep(0.3)


FAULTS: list[tuple[str, Callable[[], Any]]] = [
    ("exception", _leave_collective),
    ("import", lambda: __import__("no_such_module")),
    ("syntax", lambda: compile("x ==", "train.py", "exec")),
    ("mistake", lambda: undefined),  # type: ignore[name-defined]  # noqa: F821
    ("file_missing", lambda: Path("/no/such/file").stat()),
    ("arguments", lambda: argparse.ArgumentParser().parse_args(["--no-such-option"])),
    ("not_finite", lambda: _raise(ValueError("the loss is nan"))),
    ("assertion", lambda: _raise(AssertionError())),
    ("data_damaged", lambda: json.loads("{")),
    ("checkpoint_damaged", lambda: pickle.loads(b"\x80\x04\x95")),
    ("disk_full", _write_to_full_disk),
    ("node_disk_full", _fill_tmp),
    ("descriptors", _open_files),
    ("host_memory", lambda: bytearray(1 << 60)),
    ("port_taken", _bind_twice),
    ("native_crash", lambda: os.kill(os.getpid(), signal.SIGSEGV)),
    ("killed", lambda: os.kill(os.getpid(), signal.SIGKILL)),
    ("terminated", lambda: os.kill(os.getpid(), signal.SIGTERM)),
    ("unknown", lambda: sys.exit(3)),
]
"""Causes, and how each is planted, in the order of rounds."""

if __name__ == "__main__":
    number = int(os.environ["SLURM_ELASTIC_ROUND"])
    if number < len(FAULTS):
        if os.environ["RANK"] == "1" or number == 0:
            FAULTS[number][1]()
        time.sleep(60)
