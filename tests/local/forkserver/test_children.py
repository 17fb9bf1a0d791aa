"""The children of a fork server, in a process forked from the test, whose own children are swept."""

from __future__ import annotations

import os
import signal
import time

from slurm_elastic.agent.forkserver._children import ChildReaper


def _exits_of_a_swept_worker() -> bool:
    reaper = ChildReaper()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    reaper.watch()
    worker = os.fork()
    if worker == 0:
        os.setsid()
        time.sleep(1000)
    reaper.workers.add(worker)
    told: list[tuple[int, int]] = []
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks > 1:
            told.extend(reaper.exits())
        else:
            # It ends when it was looked at.
            os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)

    return reaper.sweep(60.0, look) == [] and told == [(worker, -signal.SIGKILL)] and not reaper.workers


def test_a_worker_that_ends_while_its_round_is_swept_is_told_of() -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if _exits_of_a_swept_worker() else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
