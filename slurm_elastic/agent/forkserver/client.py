"""The agent's handle of its fork server. Needs no torch."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_elastic.agent.forkserver._channel import Channel
from slurm_elastic.agent.forkserver._fork_eligibility import Launch, obstacle_to_any_warm_start, obstacle_to_warm_start
from slurm_elastic.agent.forkserver._import_list import forget_list
from slurm_elastic.agent.forkserver._linux import become_subreaper
from slurm_elastic.agent.forkserver._orphans import kill_orphans
from slurm_elastic.agent.forkserver._protocol import Order, StartInterruptedError, State
from slurm_elastic.agent.forkserver._replacement import FormerServers, Replacement
from slurm_elastic.agent.forkserver._source_effects import effects_of, fingerprint
from slurm_elastic.agent.forkserver._spawn import spawn
from slurm_elastic.agent.forkserver._waiting import wait_on
from slurm_elastic.agent.forkserver.worker_command import FUNCTION, Program, worker_environment
from slurm_elastic.errors import UsageError

__all__ = ["ForkServer"]

logger = logging.getLogger(__name__)

_LAST_STEPS = 10.0
"""Seconds that the fork server is given to kill what is left and go, once the agent has hung up."""


class ForkServer:
    """One process that starts all workers of this node. To be used from one thread, the main thread."""

    def __init__(
        self,
        program: Program | None,
        preload: Sequence[str],
        environment: Mapping[str, str],
        *,
        warm: bool,
        imports: str | None = None,
        found: Replacement | None = None,
    ) -> None:
        self._program = program
        self._preload = tuple(preload)
        self._imports = imports
        self._distrusted = False
        self._launch = Launch(dict(environment), str(Path.cwd()))
        self.exit_codes: dict[int, int] = {}
        """Exit codes, or minus signal numbers, of workers by pid; a caller takes out what it has seen."""
        self.complete = False
        """Whether workers are started with also that imported what can wait until there is nothing else to do."""
        self.reason = ""
        """Why the state is what it is, where that is not plain."""
        self.state = State.IMPORTING
        self._given_up = obstacle_to_any_warm_start(program, wanted=warm)
        self._process: subprocess.Popen[bytes] | Replacement
        self._replacement: Replacement | None = None
        """It imports."""
        self._prepared: Replacement | None = None
        """One that has imported everything; kept until the next one has, which is forked from it."""
        self._said: list[dict[str, Any]] = []
        """What that has told."""
        self._alone = False
        """Whether the fork server has said that nothing takes its place."""
        self._awaited: float | None = None
        """Until when the first workers wait for it; None for not at all."""
        self._former = FormerServers()
        if found is None:
            self._channel, self._process = self._spawn()
        else:
            assert program is not None
            self._set_out(program)
            self._channel, self._process = found.channel, found

    @classmethod
    def start(
        cls,
        program: Program | None,
        *,
        warm: bool = True,
        preload: Sequence[str] = (),
        local_world_size: int | None = None,
        environment: Mapping[str, str] | None = None,
        imports: str | None = None,
    ) -> ForkServer:
        """Start it; returns at once, while it imports.

        Call this as early as possible, from the main thread, which has to live as long as workers shall.
        This process becomes a subreaper (prctl(2)): what the fork server leaves when it is killed stays in reach.

        Args:
            program: What the workers will run; None if that is not a Python script.
            warm: False to start all workers cold.
            preload: Modules to import besides torch.
            local_world_size: Workers on this node; see `worker_environment`.
            environment: What the workers' environment will be, as far as known now; default: this process's.
            imports: The directory of the lists of learned imports; None to learn none.
        """
        known = worker_environment(os.environ if environment is None else environment, local_world_size)
        become_subreaper()
        return cls(program, preload, known, warm=warm, imports=imports)

    @classmethod
    def adopt(
        cls,
        child: Replacement,
        program: Program,
        preload: Sequence[str],
        environment: Mapping[str, str],
        imports: str | None,
    ) -> ForkServer:
        """Take over one that was forked from this very process, before this became the agent.

        Args:
            child: the process.
            program: see `start`.
            preload: see `start`; it was given the same.
            environment: what was in force when torch was imported.
            imports: see `start`.
        """
        become_subreaper()
        return cls(program, preload, environment, warm=True, imports=imports, found=child)

    @property
    def program(self) -> Program | None:
        """The program that it was started for."""
        return self._program

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def fileno(self) -> int:
        """Readable when `read` would learn something: progress, a worker's exit, its own death.

        Changes in `renew` and `revive`.
        """
        return self._channel.fileno()

    def read(self) -> None:
        """Take in what it reported; never waits."""
        while self.state is not State.DEAD and self._channel.readable():
            self._take(self._channel.receive())
        self._read_replacements()

    def _read_replacements(self) -> None:
        while True:
            if self._replacement is not None and self._replacement.channel.readable():
                received = self._replacement.channel.receive()
                if received is not None:
                    self._drop_prepared()
                    self._prepared, self._replacement, self._said = self._replacement, None, [received[0]]
                else:
                    # It cannot be forked with all that it has imported. The one that can stays.
                    self._drop_replacement()
            elif self._prepared is not None and self._prepared.channel.readable():
                received = self._prepared.channel.receive()
                if received is None:
                    self._drop_prepared()
                elif received[0]["state"] == "replacement":
                    self._begin_replacement(*received)
                else:
                    self._said.append(received[0])
            else:
                return

    def _begin_replacement(self, message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        self._drop_replacement()
        self._replacement = Replacement(message["pid"], *descriptors)

    def wait_ready(self, timeout: float, should_stop: Callable[[], bool] | None = None) -> bool:
        """Until it has imported everything, or never will; False if that took longer.

        Args:
            timeout: Seconds.
            should_stop: Asked every 0.1 s.

        Raises:
            StartInterruptedError: `should_stop` said so.
        """
        return self._wait(self._is_ready, timeout, should_stop)

    def _is_ready(self) -> bool:
        """Return whether workers can be started, with all that is known to be imported by them if that is near."""
        late = self._awaited is None or time.monotonic() > self._awaited
        return self.state is not State.IMPORTING and (late or self._prepared is not None)

    def import_all(self, timeout: float, should_stop: Callable[[], bool] | None = None) -> None:
        """Import now what can wait too, for at most so many seconds.

        Raises:
            StartInterruptedError: `should_stop` said so.
        """
        if not self.wait_ready(timeout, should_stop):
            return
        # What can wait comes on top of what a replacement has imported.
        self._take_replacement()
        if self.state is State.WARM:
            self._alone = False
            self._send({"order": "import"})
            self._wait(lambda: self._prepared is not None or self._alone, timeout, should_stop)

    def check_preload(self) -> None:
        """Raise what a person has to mend.

        Raises:
            UsageError: a module of `preload` cannot be imported.
        """
        self.read()
        if self.state is State.BROKEN:
            raise UsageError(f"--preload: {self.reason}; install it for {self._launched.interpreter} or leave it out")

    def obstacle(self, command: Sequence[str], environment: Mapping[str, str]) -> str | None:
        """Return why this command has to start cold; None if it can start warm."""
        if self._given_up or self._program is None:
            return self._given_up
        if self.state is not State.WARM:
            return self.reason or "the fork server is not ready"
        return obstacle_to_warm_start(self._program, self._launch, command, Launch(environment, str(Path.cwd())))

    def renew(self) -> None:
        """Go over to the replacement if that has imported everything, and no workers are left of a round before.

        If files were replaced that it has imported, begin anew: workers must not find one half of a package in memory
        and the other half on disk.
        """
        self.read()
        if self._sessions or self.state is not State.WARM:
            return
        self._take_replacement()
        changed = next((path for path, when in self._imported.items() if _changed_at(path) != when), None)
        changed = changed or self._changed_script()
        if changed is not None:
            logger.warning("%s has changed since modules were imported: they are imported anew", changed)
        if changed is not None or self._distrusted:
            self._distrusted = False
            self._channel.close()
            self._drop_replacement()
            self._drop_prepared()
            self._former.add(self._process)
            self._channel, self._process = self._spawn()

    def _changed_script(self) -> str | None:
        """Return a file of the script's own that now changes something else before its imports; None if none does."""
        for path, (when, effects) in self._own.items():
            now = _changed_at(path)
            if now != when and fingerprint(effects_of(path)[0]) != effects:
                return path
            self._own[path] = now or 0, effects
        return None

    @property
    def has_learned(self) -> bool:
        """Return whether workers are forked with imports that were learned."""
        return self._has_learned

    def distrust_learned(self, reason: str) -> None:
        """Learn nothing from now on, here and in later runs of this script, and fork no more workers with it.

        Args:
            reason: what the list says from now on, for people.
        """
        self._distrusted, self._imports = True, None
        if self._list:
            # A network file system may take long to answer.
            threading.Thread(target=forget_list, args=(self._list, reason), name="import list", daemon=True).start()

    def _take_replacement(self) -> None:
        if self._prepared is None:
            return
        replacement, self._prepared, self._awaited = self._prepared, None, None
        self._channel.close()
        self._former.add(self._process)
        self._channel, self._process = replacement.channel, replacement
        for message in self._said:
            self._take((message, []))
        self.complete = True

    def revive(self) -> None:
        """Replace it, if it died, by one that starts workers cold."""
        self.read()
        if self.state is State.DEAD:
            self._given_up = self.reason
            self._channel.close()
            self._channel, self._process = self._spawn()

    def start_workers(
        self, orders: Sequence[Order], *, warm: bool, should_stop: Callable[[], bool] | None = None
    ) -> dict[int, int]:
        """Start them and return their pids by local rank.

        Raises:
            OSError: one could not be started; those that were run on.
            StartInterruptedError: `should_stop` said so, asked every 0.1 s.
        """
        self._pids: dict[int, int] = {}
        self._refused = ""
        for order in orders:
            with order.described("fork" if warm else "exec") as details:
                self._send({"order": "start", "rank": order.rank}, [details, *order.descriptors.values()])
        self._wait(lambda: self._refused != "" or len(self._pids) == len(orders), None, should_stop)
        if self._refused or self.state is State.DEAD:
            raise OSError(self._refused or self.reason)
        self._former.reap(_LAST_STEPS)
        return self._pids

    def sweep(self, timeout: float) -> list[int]:
        """Kill all workers and all their descendants.

        Returns:
            The processes that would not end within `timeout` seconds (uninterruptible sleep).
        """
        self._left: list[int] | None = None
        self._send({"order": "sweep", "seconds": timeout})
        answered = self._wait(lambda: self._left is not None, timeout + 1.0, None)
        return (self._left or []) if answered else [self.pid]

    def close(self) -> None:
        """End it with everything that it started."""
        self._channel.close()
        self._drop_replacement()
        self._drop_prepared()
        self._former.add(self._process)
        self._former.reap(_LAST_STEPS)
        self.state = State.DEAD

    def _spawn(self) -> tuple[Channel, subprocess.Popen[bytes]]:
        self._set_out(FUNCTION if self._program is None or self._given_up else self._program)
        environment, warm = self._launch.environment, not self._given_up
        return spawn(self._launched, environment, self._preload, warm=warm, imports=self._imports)

    def _set_out(self, program: Program) -> None:
        self._launched = program
        self._sessions: set[int] = set()
        self._module = "Python"
        self._imported: dict[str, int] = {}
        self._own: dict[str, tuple[int, str]] = {}
        self._has_learned, self._list = False, ""
        self._awaited = None
        self.state = State.IMPORTING

    def _send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        # If it is gone, reading will find out.
        with contextlib.suppress(OSError):
            self._channel.send(message, descriptors)

    def _wait(
        self, happened: Callable[[], bool], timeout: float | None, should_stop: Callable[[], bool] | None
    ) -> bool:
        end = None if timeout is None else time.monotonic() + timeout
        self.read()
        while not happened() and self.state is not State.DEAD:
            left = 0.1 if end is None else min(0.1, end - time.monotonic())
            if left < 0:
                return False
            if should_stop is not None and should_stop():
                raise StartInterruptedError
            channels = [self._channel.fileno()]
            channels += [other.channel.fileno() for other in (self._replacement, self._prepared) if other is not None]
            wait_on(channels, left)
            self.read()
        return True

    def _take(self, received: tuple[dict[str, Any], list[int]] | None) -> None:
        if received is None:
            self._bury()
            return
        message, descriptors = received
        match message["state"]:
            case "importing":
                self._module = message["module"]
            case "warm" | "cold" | "broken" as state:
                self.state = State(state)
                self.reason = message.get("reason", "")
                if "awaited" in message:
                    self._awaited = time.monotonic() + (message["awaited"] or float("inf"))
            case "complete":
                self._note_imports(message)
            case "alone":
                self._awaited, self._alone = None, True
                self._note_imports(message)
            case "replacement":
                # The one before may have said that it is ready since this was read last.
                self._read_replacements()
                self._begin_replacement(message, descriptors)
            case "started":
                self._pids[message["rank"]] = message["pid"]
                self._sessions.add(message["pid"])
            case "refused":
                self._refused = message["reason"]
            case "exited":
                self.exit_codes[message["pid"]] = message["code"]
            case "swept":
                self._left = message["left"]
                self._sessions.clear()

    def _note_imports(self, message: Mapping[str, Any]) -> None:
        """Tell what every worker has to import by itself."""
        self._imported = message.get("changed", {})
        self._own = {path: (when, effects) for path, (when, effects) in message.get("own", {}).items()}
        self._has_learned, self._list = message.get("learned", False), message.get("list", "")
        for note in message.get("notes", ()):
            logger.info("%s", note)
        left_out: Mapping[str, str] = message.get("left_out", {})
        for reason in dict.fromkeys(left_out.values()):
            names = [name for name in left_out if left_out[name] == reason]
            level = logging.WARNING if {*names} & {*self._preload} else logging.INFO
            logger.log(level, "each worker imports %s anew: %s", ", ".join(names), reason)

    def _bury(self) -> None:
        """It died, and by its death the kernel killed its workers; kill what those left, which is ours to reap now."""
        self._drop_replacement()
        self._drop_prepared()
        code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        while_importing = f" while it imported {self._module}" if self.state is State.IMPORTING else ""
        self.state = State.DEAD
        self.reason = f"the fork server died ({how}){while_importing}"
        codes = kill_orphans(self._sessions, _LAST_STEPS)
        for pid in self._sessions:
            self.exit_codes[pid] = codes.get(pid, self.exit_codes.get(pid, -signal.SIGKILL))

    def _drop_replacement(self) -> None:
        if self._replacement is not None:
            self._replacement.channel.close()
            self._former.add(self._replacement)
            self._replacement = None

    def _drop_prepared(self) -> None:
        if self._prepared is not None:
            self._prepared.channel.close()
            self._former.add(self._prepared)
            self._prepared = None


def _changed_at(path: str) -> int | None:
    try:
        return os.stat(path).st_mtime_ns  # noqa: PTH116
    except OSError:
        return None
