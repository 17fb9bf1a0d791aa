"""The warm process: imports, then forks workers on the agent's order, and watches over all its descendants."""

from __future__ import annotations

import contextlib
import enum
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_elastic.agent.warm import _preload as preload
from slurm_elastic.agent.warm import _worker as worker
from slurm_elastic.agent.warm._channel import Channel, read_memory_file
from slurm_elastic.agent.warm._family import Family
from slurm_elastic.agent.warm._finalization import Finalization
from slurm_elastic.agent.warm._linux import become_subreaper, flush_c_streams, set_parent_death_signal, set_task_name

__all__ = ["Zygote"]

_IDLE_BEFORE_LATER_IMPORTS = 2.0
"""Seconds without an order before imports that can wait: the moments around a start belong to the workers."""
_SWEEP_AFTER_AGENT = 5.0
"""Seconds to kill what the agent left, before this process goes too."""


class _Fork(enum.Enum):
    """What a forked process is to become."""

    WORKER = enum.auto()
    SUCCESSOR = enum.auto()


class Zygote:
    """One warm process. `serve` returns only in a worker."""

    def __init__(self, settings: Mapping[str, Any], finalization: Finalization) -> None:
        # While the imports run nobody looks whether the agent lives.
        set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != settings["agent"]:
            os._exit(0)
        self._settings = settings
        self._channel = Channel.inherited(settings["channel"])
        self._agent = os.pidfd_open(settings["agent"])
        self._task_name = Path("/proc/self/comm").read_bytes().strip()
        self._family = Family()
        self._finalization = finalization
        self._torch_seed: int | None = None
        self._unconfirmed: list[tuple[int, int, int]] = []
        self._later: list[str] = []
        self._idle = _IDLE_BEFORE_LATER_IMPORTS
        self._environment_by_imports: dict[str, tuple[str | None, str | None]] = {}
        become_subreaper()

    def serve(self) -> None:
        """Import, then work for the agent until it is gone; return in every worker that is to run the program."""
        if self._settings["warm"]:
            self._warm_up()
        else:
            self._tell(state="cold")
        set_task_name(b"slurm-elastic-w")
        while self._work() is _Fork.SUCCESSOR:
            self._import_later()

    def _work(self) -> _Fork:
        """Return in forked processes only."""
        self._family.watch()
        # From here on the agent's end is seen at once, and there is something to do about it before going.
        set_parent_death_signal(0)
        waiting = select.poll()
        for descriptor in (self._channel.fileno(), self._agent, self._family.fileno()):
            waiting.register(descriptor, select.POLLIN)
        idle_since = time.monotonic()
        while True:
            ready = {descriptor for descriptor, _events in waiting.poll(self._patience(idle_since))}
            if self._agent in ready:
                self._end()
            if self._family.fileno() in ready or self._family.seconds_to_scan() == 0:
                self._report_exits()
            if self._channel.fileno() in ready:
                if self._obey():
                    return _Fork.WORKER
            else:
                self._confirm()
            if ready:
                idle_since = time.monotonic()
            elif self._later and time.monotonic() - idle_since >= self._idle and self._bear():
                return _Fork.SUCCESSOR

    def _patience(self, idle_since: float) -> float | None:
        """How long to wait for something to happen, in ms; None for ever."""
        if self._unconfirmed:
            return 0
        scan = self._family.seconds_to_scan()
        imports = idle_since + self._idle - time.monotonic() if self._later else None
        seconds = [wait for wait in (scan, imports) if wait is not None]
        return max(0.0, min(seconds)) * 1000 if seconds else None

    # Imports

    def _warm_up(self) -> None:
        before = self._settings.get("environment") or dict(os.environ)
        directory = preload.script_directory(self._settings["options"])
        sys.path[:0] = directory
        state = {"state": "warm"}
        try:
            obstacle = self._import([*preload.REQUIRED, *self._settings["preload"]])
        except preload.BrokenPreloadError as error:
            state = {"state": "broken", "module": error.module, "reason": str(error)[:8000]}
        else:
            self._later = [*preload.LATER]
            if obstacle is not None:
                state = {"state": "cold", "reason": obstacle}
        del sys.path[: len(directory)]
        self._task_name = Path("/proc/self/comm").read_bytes().strip()
        after = dict(os.environ)
        self._environment_by_imports = {
            name: (before.get(name), after.get(name)) for name in before | after if before.get(name) != after.get(name)
        }
        flush_c_streams()
        self._keep_imports()
        self._tell(**state)

    def _import(self, names: Sequence[str]) -> str | None:
        """Import these modules; returns what stands against a fork after one of them."""
        for name in dict.fromkeys(names):
            self._tell(state="importing", module=name)
            preload.import_module(name)
            if name == "torch":
                self._torch_seed = sys.modules[name].initial_seed()
            elif name not in preload.REQUIRED[:-1]:
                obstacle = preload.obstacle_to_forking()
                if obstacle is not None:
                    return f"after importing {name} {obstacle}"
        return None

    def _keep_imports(self) -> None:
        """Do once what is the same in all workers, each of which would have to copy the memory that it touches."""
        self._finalization.note_modules()
        importlib.invalidate_caches()
        gc.freeze()

    # The successor

    def _bear(self) -> bool:
        """Fork the process that will start the workers of later rounds, while this one keeps those that run.

        It imports what can wait, which takes longer than a round change may: meanwhile this process is there for that.
        True in the successor.
        """
        names, self._later = self._later, []
        near_end, far_end = Channel.pair()
        me = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            # Whoever is short of processes needs them for something else.
            return False
        if pid == 0:
            os.setsid()
            set_parent_death_signal(signal.SIGKILL)
            if os.getppid() != me:
                os._exit(0)
            become_subreaper()
            self._family.forget()
            self._family = Family()
            self._channel.close()
            near_end.close()
            self._channel, self._later = far_end, names
            return True
        self._family.successor = pid
        handle = os.pidfd_open(pid)
        with contextlib.suppress(OSError):
            self._channel.send({"state": "successor", "pid": pid}, [near_end.fileno(), handle])
        os.close(handle)
        near_end.close()
        far_end.close()
        return False

    def _import_later(self) -> None:
        """In the successor: get ready, or go if no workers could be forked from it then."""
        try:
            for name in self._later:
                preload.import_module(name)
            obstacle = preload.obstacle_to_forking()
        except preload.BrokenPreloadError:
            os._exit(0)
        if obstacle is not None:
            os._exit(0)
        self._later = []
        self._keep_imports()
        # From now on it outlives the process that it was forked from.
        set_parent_death_signal(0)
        self._tell(state="complete")

    # Orders

    def _obey(self) -> bool:
        """Carry out the next order; True in a process that is to become a worker."""
        received = self._channel.receive()
        if received is None:
            self._end()
            raise AssertionError
        order, descriptors = received
        if order["order"] == "start":
            return self._start(order, descriptors)
        if order["order"] == "import":
            self._idle = 0.0
        if order["order"] == "sweep":
            left = self._sweep(order["seconds"])
            self._tell(state="swept", left=left)
        return False

    def _start(self, order: dict[str, Any], descriptors: Sequence[int]) -> bool:
        order |= json.loads(read_memory_file(descriptors[0]))
        streams = dict(zip(order["streams"], descriptors[1:], strict=True))
        refusals, refusal = os.pipe()
        me = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            pid = -1
            os.write(refusal, str(error).encode())
        if pid == 0:
            for reading_end in (refusals, *(other for _rank, _pid, other in self._unconfirmed)):
                os.close(reading_end)
            with _errors_to(refusal):
                self._become_worker(me, order, streams)
            os.close(refusal)
            return True
        os.close(refusal)
        for descriptor in streams.values():
            os.close(descriptor)
        if pid > 0:
            self._family.add(pid)
        self._unconfirmed.append((order["rank"], pid, refusals))
        return False

    def _confirm(self) -> None:
        """Tell what became of starts, once no more are ordered: the forked processes get ready side by side."""
        for rank, pid, refusals in self._unconfirmed:
            with os.fdopen(refusals, "rb") as reasons:
                refused = reasons.read().decode()
            self._tell(state="refused" if refused else "started", rank=rank, pid=pid, reason=refused)
        self._unconfirmed.clear()

    def _become_worker(self, warm_process: int, order: dict[str, Any], streams: dict[str, int]) -> None:
        worker.enter_own_session(warm_process)
        extra = worker.place_descriptors(streams)
        self._family.forget()
        os.close(self._agent)
        self._channel.close()
        environment = order["environment"] | extra
        if order["how"] == "exec":
            signal.pthread_sigmask(signal.SIG_SETMASK, self._settings["signal_mask"])
            os.chdir(order["directory"])
            worker.execute(order["execute"], environment)
        for name, (before, after) in self._environment_by_imports.items():
            if environment.get(name) == before and after is not None:
                environment[name] = after
            elif environment.get(name) == before:
                environment.pop(name, None)
        worker.become_fresh_interpreter(order, environment, streams, self._task_name, self._torch_seed)
        self._finalization.inherit()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._settings["signal_mask"])

    # What becomes of workers

    def _report_exits(self) -> None:
        for pid, code in self._family.exits():
            self._tell(state="exited", pid=pid, code=code)

    def _sweep(self, seconds: float) -> list[int]:
        """Kill every descendant; returns those that the kernel would not end in time (uninterruptible sleep)."""
        self._family.kill()
        end = time.monotonic() + seconds
        while True:
            left = self._family.kill_rest()
            self._report_exits()
            if not left or time.monotonic() > end:
                return left
            self._family.wait(0.02)

    def _end(self) -> None:
        """The agent is gone: so go its workers, and this process."""
        with contextlib.suppress(OSError):
            self._sweep(_SWEEP_AFTER_AGENT)
        os._exit(0)

    def _tell(self, **message: Any) -> None:
        try:
            self._channel.send(message)
        except OSError:
            if message["state"] != "exited":
                self._end()


@contextlib.contextmanager
def _errors_to(descriptor: int) -> Iterator[None]:
    """In a forked process: end it on any error, which goes to whoever reads the other end of this pipe."""
    try:
        yield
    except BaseException as error:
        os.write(descriptor, f"{type(error).__name__}: {error}"[:4000].encode())
        os._exit(1)
