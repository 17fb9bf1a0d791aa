"""Signals that Slurm sends to workers too, where process tracking knows no better."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys
from slurm_elastic.control.worker_side import shield, unshield

os.register_at_fork(after_in_child=unshield)
numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
{own}
print(shield(), flush=True)
for number in numbers:
    os.kill(os.getpid(), number)
print("lives", flush=True)
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os.execlp("sh", "sh", "-c", "kill -TERM $$; echo ignored")
"""


def run(own: str = "") -> tuple[list[str], int]:
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(own=own)], capture_output=True, text=True, timeout=60)
    assert not done.stderr
    return done.stdout.splitlines(), done.returncode


def test_a_worker_outlives_them_and_what_it_starts_does_not() -> None:
    assert run() == (["True", "lives", "-15"], -15)


@pytest.mark.parametrize("action", ["lambda *_: print('own', flush=True)", "signal.SIG_IGN"])
def test_what_the_script_does_about_them_stays(action: str) -> None:
    said, _ = run(f"signal.signal(signal.SIGTERM, {action})")
    assert said[0] == "False"
    assert ("own" in said) == ("own" in action)
