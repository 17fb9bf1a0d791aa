"""The agent's side of its fork server: starts it, sends orders, reads reports. Needs no torch."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slurm_elastic.agent.forkserver._fork_eligibility import obstacle_to_any_warm_start, obstacle_to_warm_start
from slurm_elastic.agent.forkserver._import_list import fingerprint, forget_list
from slurm_elastic.agent.forkserver._processes import ForkedProcess, kill_orphans, spawn
from slurm_elastic.agent.forkserver.linux import become_subreaper, memory_file
from slurm_elastic.agent.forkserver.protocol import Channel, Order, StartInterruptedError, State, wait_on
from slurm_elastic.agent.forkserver.worker_command import FUNCTION, Program
from slurm_elastic.errors import UsageError

logger = logging.getLogger(__name__)

_IMPORTS_TIMEOUT = 300.0
"""Seconds for preloads and learned imports. Where thousands of nodes import at once, workers that import for themselves
would be later still, and make the others later: so it is the time after which an import counts as stuck."""
_CHILD_TIMEOUT = 10.0
"""Seconds for the fork server to fork a child for the agent, while it may be busy with the workers of a round."""
_END_TIMEOUT = 10.0
"""Seconds for the fork server to kill all workers and end, after the agent has closed the channel."""
_MOST_NAMED = 8
"""Modules that a line names."""


class ForkServer:
    """The process that starts all workers of this node. Use it from the main thread only, but for `fork_child`.

    Start it as early as possible, from the main thread: it imports meanwhile, and when the calling thread ends, the
    kernel kills it and its workers. This process becomes a subreaper (prctl(2)), so that it can kill what the fork
    server leaves when that is killed.

    Args:
        program: What the workers will run; None if that is not a Python script.
        environment: The workers' environment, as far as known now (see `worker_environment`); default: this process's.
        imports: The directory of the lists of learned imports; None to learn none.
        child: A fork server that was forked from this process, before this process became the agent (see
            `worker_command`), with the same preloads, and the channel to it; None to start one.
    """

    def __init__(
        self,
        program: Program | None,
        *,
        warm: bool = True,
        preload: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        imports: str | None = None,
        child: tuple[Channel, ForkedProcess] | None = None,
    ) -> None:
        become_subreaper()
        self.program = program
        self._preload = tuple(preload)
        self._imports = imports
        self._distrusted = False
        self._environment = dict(os.environ if environment is None else environment)
        self.exit_codes: dict[int, int] = {}
        """Exit codes, or minus signal numbers, of workers by pid; the caller removes those that it has handled."""
        self.reason = ""
        """The reason of the states COLD and DEAD, for people; else empty."""
        self.state = State.IMPORTING
        self._cold_reason = obstacle_to_any_warm_start(program, wanted=warm)
        self._process: subprocess.Popen[bytes] | ForkedProcess
        self._former: list[subprocess.Popen[bytes] | ForkedProcess] = []
        """Fork servers that end and are not reaped yet."""
        self._forked: list[ForkedProcess] = []
        """Children for the agent."""
        self._switching = threading.Lock()
        """Held while another process becomes the fork server, and while `fork_child` sends an order."""
        if child is None:
            self._channel, self._process = self._spawn()
        else:
            assert program is not None
            self._reset(program)
            self._channel, self._process = child

    @property
    def pid(self) -> int:
        """The process id of the fork server."""
        return self._process.pid

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is a message to `read`, or the fork server has ended.

        `refresh` and `restart_cold` change it.
        """
        return self._channel.fileno()

    def read(self) -> None:
        """Handle the messages that have arrived; never waits.

        Raises UsageError if a preload cannot be imported, which the user has to change.
        """
        while self.state is not State.DEAD and wait_on([self.fileno()], 0):
            self._handle(self._channel.receive())

    def wait_ready(self, timeout: float, should_stop: Callable[[], bool] | None = None) -> bool:
        """Wait at most `timeout` seconds until workers can be started; returns False if that took longer.

        `should_stop` is called every 0.1 s; StartInterruptedError is raised when it returns True.
        """

        def is_ready() -> bool:
            return self.state is not State.IMPORTING and time.monotonic() > self._awaits_until

        return self._wait(is_ready, timeout, should_stop)

    def obstacle(self, command: Sequence[str], environment: Mapping[str, str]) -> str | None:
        """Return why this command has to start cold, for people; None if it can start warm."""
        program = self.program
        if self._cold_reason or program is None:
            return self._cold_reason
        if self.state is not State.WARM:
            return self.reason or "the fork server is not ready"
        return obstacle_to_warm_start(program, self._environment, command, environment)

    def refresh(self) -> None:
        """Between two rounds: if installed packages have changed, or what the script sets, start a new fork server.

        Workers must not find one half of a package in memory and the other half on disk.
        """
        self.read()
        if self._workers or self.state is not State.WARM:
            return
        changed = [path for path, value in self._files.items() if fingerprint(path) != value]
        if changed:
            logger.warning("%s has changed since modules were imported: they are imported anew", changed[0])
        if changed or self._distrusted:
            self._distrusted = False
            self._restart()

    def distrust_learned(self, reason: str) -> None:
        """Do without learned imports from now on, here and in later runs, which are given the reason for people."""
        self._distrusted, self._imports = True, None
        if self._list:
            # A network file system may take long to answer.
            threading.Thread(target=forget_list, args=(self._list, reason), name="import list", daemon=True).start()

    def restart_cold(self) -> None:
        """If the fork server has died, start one that starts workers cold."""
        self.read()
        if self.state is State.DEAD:
            self._cold_reason = self.reason
            self._restart()

    def start_workers(
        self, orders: Sequence[Order], *, warm: bool, should_stop: Callable[[], bool] | None = None
    ) -> dict[int, int]:
        """Start workers, forked if `warm`, else executed, and return their pids by local rank.

        See `wait_ready` for `should_stop`. Raises OSError if one could not be started; those that were started run on.
        """
        self._refused = ""
        for order in orders:
            # The environment may be larger than a message.
            details = memory_file(json.dumps({**order._asdict(), "descriptors": [*order.descriptors]}).encode())
            message = {"order": "start", "rank": order.rank, "warm": warm}
            self._send(message, [details, *order.descriptors.values()])
            os.close(details)
        self._wait(lambda: self._refused != "" or len(self._workers) == len(orders), math.inf, should_stop)
        if self._refused or self.state is State.DEAD:
            raise OSError(self._refused or self.reason)
        self._reap_former()
        return dict(self._workers)

    def fork_child(
        self, module: str, should_stop: Callable[[], bool] = lambda: False
    ) -> tuple[ForkedProcess, socket.socket] | None:
        """Fork a process that has imported torch and works for the agent; for any thread.

        It is no worker: it outlives rounds, and the fork server, and ends by itself when the socket is closed. It calls
        ``main(descriptor)`` of a module, with SIGTERM and other signals to jobs blocked. `should_stop` ends the wait
        for it. Returns the process, and this end of the socket whose other end is the descriptor, where messages keep
        their boundaries; None if there is no such process: torch is not imported there, or it cannot be forked.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._switching:
            if self.state is State.WARM:
                self._send({"order": "child", "module": module}, [theirs.fileno()])
        end = time.monotonic() + _CHILD_TIMEOUT
        while not (ready := wait_on([ours.fileno()], 0.1)) and time.monotonic() < end and not should_stop():
            pass
        received = Channel(ours).receive() if ready else None
        if received is None:
            ours.close()
            return None
        child = ForkedProcess(received[0]["pid"], *received[1])
        self._forked.append(child)
        return child, ours

    def sweep(self, timeout: float) -> list[int]:
        """Kill all workers and all their descendants.

        Returns the pids of those that have not ended within `timeout` seconds (uninterruptible sleep).
        """
        self._unended: list[int] | None = None
        self._send({"order": "sweep", "seconds": timeout})
        answered = self._wait(lambda: self._unended is not None, timeout + 1.0, None)
        return (self._unended or []) if answered else [self.pid]

    def close(self) -> None:
        """End the fork server and all workers."""
        with self._switching:
            self._channel.close()
        self._former.append(self._process)
        self._reap_former()
        self.state = State.DEAD

    def _reap_former(self) -> None:
        for process in self._former:
            try:
                process.wait(_END_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._former.clear()

    def _restart(self) -> None:
        self._former.append(self._process)
        with self._switching:
            self._channel.close()
            self._channel, self._process = self._spawn()

    def _spawn(self) -> tuple[Channel, subprocess.Popen[bytes]]:
        self._reset(FUNCTION if self.program is None or self._cold_reason else self.program)
        warm = not self._cold_reason
        return spawn(self._launched, self._environment, self._preload, warm=warm, imports=self._imports)

    def _reset(self, program: Program) -> None:
        self._launched = program
        self._workers: dict[int, int] = {}
        """Pids by local rank of the workers that were started and not swept yet."""
        self._files: Mapping[str, str] = {}
        self.has_learned, self._list = False, ""
        """Whether workers are forked with learned imports, and the path of the list."""
        self._awaits_until = 0.0
        """The monotonic time until which the first workers wait for learned imports or preloads."""
        self.state = State.IMPORTING

    def _send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        # If the fork server has ended, `read` notices it.
        with contextlib.suppress(OSError):
            self._channel.send(message, descriptors)

    def _wait(self, happened: Callable[[], bool], timeout: float, should_stop: Callable[[], bool] | None) -> bool:
        end = time.monotonic() + timeout
        self.read()
        while not happened() and self.state is not State.DEAD:
            left = min(0.1, end - time.monotonic())
            if left < 0:
                return False
            if should_stop is not None and should_stop():
                raise StartInterruptedError
            wait_on([self._channel.fileno()], left)
            self.read()
        return True

    def _handle(self, received: tuple[dict[str, Any], list[int]] | None) -> None:
        if received is None:
            self._handle_death()
            return
        message, descriptors = received
        match message["state"]:
            case "broken":
                why, python = message["reason"], self._launched.interpreter
                raise UsageError(f"--preload: {why}; install it for {python} or leave it out")
            case "warm" | "cold" as state:
                self.state = State(state)
                self.reason = message.get("reason", "")
                self._awaits_until = time.monotonic() + _IMPORTS_TIMEOUT if message.get("awaits") else 0.0
                if "pid" in message:
                    # A replacement has taken over.
                    self._former.append(self._process)
                    self._process = ForkedProcess(message["pid"], *descriptors)
                if "list" in message:
                    self._note_imports(message)
            case "started":
                self._workers[message["rank"]] = message["pid"]
            case "refused":
                self._refused = message["reason"]
            case "exited":
                self.exit_codes[message["pid"]] = message["code"]
            case "swept":
                self._unended = message["left"]
                self._workers.clear()

    def _note_imports(self, message: Mapping[str, Any]) -> None:
        """Note what imports depend on, and log which modules the fork server cannot import for the workers."""
        self._files, self.has_learned, self._list = message["files"], message["learned"], message["list"]
        for note in message["notes"]:
            logger.info("%s", note)
        left_out: Mapping[str, str] = message["left_out"]
        for reason in dict.fromkeys(left_out.values()):
            names = [name for name in left_out if left_out[name] == reason]
            level = logging.WARNING if {*names} & {*self._preload} else logging.INFO
            logger.log(level, "each worker imports %s itself: %s", _named(names), reason)

    def _handle_death(self) -> None:
        """Handle the death of the fork server: the kernel has killed its workers, the agent kills what those leave."""
        code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        while_importing = " while it imported torch" if self.state is State.IMPORTING else ""
        self.state = State.DEAD
        self.reason = f"the fork server died ({how}){while_importing}"
        spared = [child.pid for child in self._forked if child.returncode is None]
        kill_orphans(self._workers.values(), _END_TIMEOUT, spared)
        for pid in self._workers.values():
            self.exit_codes.setdefault(pid, -signal.SIGKILL)


def _named(modules: Sequence[str]) -> str:
    more = len(modules) - _MOST_NAMED
    return ", ".join(modules[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
