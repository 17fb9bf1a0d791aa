"""What a user of the cluster does: commands and jobs."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import IO

from tests import late

from . import machine, slurm
from .errors import TestbedError
from .settings import CONTROLLER, NEIGHBOUR, USER, Settings

_POLL = 0.1
_REST, _LONGEST = 5, 1.0
"""A look that takes long, as one by a command, is followed by a rest of `_REST` times its seconds, `_LONGEST` at most:
the job that the test waits for needs the processors itself."""


class Login:
    """Commands on the cluster's machines, as an ordinary user or as root.

    A job id is what sbatch printed, or `12_3` for an element of an array. Every wait raises TestbedError
    with Slurm's own view when its time is over.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def command(
        self,
        argv: Sequence[str],
        *,
        user: str = USER,
        machine: str = CONTROLLER,
        cwd: str | Path = "/",
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout: float = 60.0,
        input: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a machine and wait for it; `env` adds to an environment that is otherwise fresh."""
        stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
        process = self.popen(argv, user=user, machine=machine, cwd=cwd, env=env, stdin=stdin, stderr=subprocess.PIPE)
        with process:
            try:
                output, errors = process.communicate(input, timeout=timeout)
            except BaseException as error:
                # nsenter's child goes on when nsenter alone is killed. Both may have ended at this moment.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise TestbedError(f"{' '.join(argv)}: no end after {timeout} s") from None
                raise
        if check and process.returncode != 0:
            raise TestbedError(f"{' '.join(argv)}: exit {process.returncode}: {errors.strip() or output.strip()}")
        return subprocess.CompletedProcess(list(argv), process.returncode, output, errors)

    def popen(
        self,
        argv: Sequence[str],
        *,
        user: str = USER,
        machine: str = CONTROLLER,
        cwd: str | Path = "/",
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int | IO[str] | None = subprocess.PIPE,
        stderr: int | IO[str] | None = subprocess.STDOUT,
    ) -> subprocess.Popen[str]:
        """Start a command on a machine; `stdin`, `stdout` and `stderr` as for subprocess.Popen.

        Its end is the caller's business (`os.killpg`, as its one process merely enters the machine); `Cluster.restore`
        kills what is left of it.
        """
        return subprocess.Popen(
            self._entry(machine, argv, user, cwd, env),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )

    def submit(
        self, argv: Sequence[str], cwd: str | Path, env: Mapping[str, str] | None = None, user: str = USER
    ) -> int:
        """`sbatch ARGV` in `cwd`; returns the job id."""
        printed = self.command(["sbatch", "--parsable", *argv], cwd=cwd, env=env, user=user).stdout
        return int(printed.strip().split(";")[0])

    def job(self, job_id: int | str) -> dict[str, str]:
        """The fields of `scontrol show job`, for an array the first record."""
        return self.jobs(job_id)[0]

    def jobs(self, job_id: int | str) -> list[dict[str, str]]:
        """One dict of fields for every record that `scontrol show job` prints, for an array its elements."""
        return slurm.records(self.command(["scontrol", "show", "job", str(job_id)], user="root").stdout)

    def wait_for(self, job_id: int | str, states: str | Collection[str], timeout: float = 60.0) -> str:
        """Wait until the job's state is one of `states` and return it.

        Raises:
            TestbedError: the time is over, or the job ended in another state.
        """
        wanted = {states} if isinstance(states, str) else set(states)
        begun = time.monotonic()
        deadline = begun + timeout
        while (fields := self.job(job_id))["JobState"] not in wanted:
            over = time.monotonic() > deadline
            if over or fields["JobState"] in slurm.FINAL:
                shown = "\n".join(f"  {key}={value}" for key, value in fields.items())
                after = f" after {timeout} s" if over else ""
                raise TestbedError(
                    f"job {job_id} is {fields['JobState']}{after}, not {' or '.join(sorted(wanted))}:\n{shown}"
                )
            begun = _rest(begun)
        return fields["JobState"]

    def nodes_of(self, job_id: int | str) -> list[str]:
        """The nodes that the job has now, in Slurm's order; empty while it is pending."""
        nodes = self.job(job_id).get("NodeList", "")
        if nodes in ("", "(null)"):
            return []
        return self.command(["scontrol", "show", "hostnames", nodes]).stdout.split()

    def wait_until(self, complaint: str, condition: Callable[[], bool], timeout: float = 60.0) -> None:
        """Wait until `condition` holds; `complaint` begins the error if it does not in time."""
        late.look()
        begun = time.monotonic()
        deadline = begun + timeout
        while not condition():
            if time.monotonic() > deadline:
                log = self.settings.state / "log"
                raise TestbedError(f"{complaint} after {timeout} s (logs in {log}):\n{self._views()}")
            begun = _rest(begun)

    def _entry(
        self,
        machine_name: str,
        argv: Sequence[str],
        user: str,
        cwd: str | Path,
        env: Mapping[str, str] | None,
    ) -> list[str]:
        home = "/" if user == NEIGHBOUR else pwd.getpwnam(user).pw_dir
        return machine.entry(self.settings, machine_name, argv, user=user, home=home, cwd=cwd, env=env)

    def _views(self) -> str:
        try:
            views = [
                self.command(argv, user="root", check=False, timeout=10)
                for argv in (["sinfo", "-N", "-l"], ["squeue", "-a"])
            ]
        except TestbedError as error:
            return str(error)
        return "\n".join(view.stdout + view.stderr for view in views)


def _rest(begun: float) -> float:
    """Sleep after a look that was begun then, and return when the next one begins."""
    time.sleep(min(max(_POLL, _REST * (time.monotonic() - begun)), _LONGEST))
    return time.monotonic()
