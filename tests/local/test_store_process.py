"""The processes that serve worker stores."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from slurm_elastic.rendezvous.worker_store import ServedStore, serve_store
from tests.local.agents import ROOT
from tests.local.waiting import HANG


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes mount namespaces")
def test_a_store_starts_while_another_thread_looks_up_a_name() -> None:
    program = [sys.executable, "-m", "tests.local.store_beside_lookup"]
    command = ["unshare", "--mount", *program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=False)
    assert (done.returncode, done.stdout) == (0, "value\n"), done.stderr


def test_a_store_ends_when_it_is_closed_and_not_before() -> None:
    served, port = _served()
    client = _client(port)
    client.set("key", "value")
    another, port_of_another = _served()
    _client(port_of_another).set("key", "other")
    assert client.get("key") == b"value"
    served.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), HANG)
    another.close()


def test_a_store_that_is_stopped_is_closed() -> None:
    before = set(_stores())
    served, port = _served()
    (store,) = set(_stores()) - before
    os.kill(store, signal.SIGSTOP)
    served.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), HANG)


def test_stores_are_forked_from_another_process_if_theirs_was_killed() -> None:
    first, port = _served()
    _client(port).set("key", "value")
    for pid in _children():
        os.kill(pid, signal.SIGKILL)
    # Stores outlive it.
    _client(port).set("key", "value")
    second, port = _served()
    _client(port).set("key", "value")
    second.close()
    first.close()


def _served() -> tuple[ServedStore, int]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.setblocking(False)
    return serve_store("127.0.0.1", port, listener.detach()), port


def _client(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=HANG))


def _stores() -> list[int]:
    return [store for forker in _children() for store in _children(forker)]


def _children(of: int | None = None) -> list[int]:
    """The processes that were forked from this one, or from another one, and have its command line."""
    own = Path("/proc/self/cmdline").read_bytes()
    found = []
    for task in Path(f"/proc/{of or 'self'}/task").iterdir():
        for pid in (task / "children").read_text().split():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes() == own:
                    found.append(int(pid))
    return found
