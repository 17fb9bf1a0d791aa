"""The fork server: imports, then forks workers on the agent's order, and watches over all its descendants."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import mmap
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slurm_elastic.agent.forkserver import _preload as preload
from slurm_elastic.agent.forkserver import _worker_setup as worker
from slurm_elastic.agent.forkserver._channel import Channel
from slurm_elastic.agent.forkserver._child_reaper import ChildReaper
from slurm_elastic.agent.forkserver._fast_exit import FastExit
from slurm_elastic.agent.forkserver._import_learner import ImportLearner, Outcome
from slurm_elastic.agent.forkserver._import_plan import ImportPlan
from slurm_elastic.agent.forkserver._import_recorder import ImportRecord
from slurm_elastic.agent.forkserver._import_replay import renew_ranks
from slurm_elastic.agent.forkserver._linux import (
    ancestors,
    become_subreaper,
    flush_c_streams,
    sent_signals,
    set_parent_death_signal,
    set_task_name,
    signal_descriptor,
)
from slurm_elastic.agent.forkserver._memfd import read_memory_file
from slurm_elastic.agent.forkserver._standby_pool import StandbyPool

__all__ = ["ServerProcess"]

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a worker may send to its parent and mean the agent."""
_IDLE_BEFORE_LATER_IMPORTS = 2.0
"""Seconds without an order before imports that can wait: the moments around a start belong to the workers."""
_TASK_NAME = b"slurm-elastic-w"
_LEAST_WAIT, _WAIT_FACTOR = 15.0, 4.0
"""Seconds, and times that imports took before, that the first workers wait for them."""
_SWEEP_AFTER_AGENT = 5.0
"""Seconds to kill what the agent left, before this process goes too."""
_PID = struct.Struct("=q")


class _Attempt(NamedTuple):
    """A process that imports a plan to take this one's place."""

    plan: ImportPlan
    pid: int
    answers: int
    """A pipe from it."""


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Drop what imports print, which workers that import anew would print each: nobody has asked for it here."""
    kept = [(number, os.dup(number)) for number in (1, 2)]
    nothing = os.open(os.devnull, os.O_WRONLY)
    for number, _copy in kept:
        os.dup2(nothing, number)
    os.close(nothing)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        flush_c_streams()
        for number, copy in kept:
            os.dup2(copy, number)
            os.close(copy)


class ServerProcess:
    """One fork server. `serve` returns only in a worker."""

    def __init__(self, settings: Mapping[str, Any], finalization: FastExit) -> None:
        # While the imports run nobody looks whether the agent lives.
        set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != settings["agent"]:
            os._exit(0)
        self._settings = settings
        self._channel = Channel.inherited(settings["channel"])
        self._agent = os.pidfd_open(settings["agent"])
        self._signals = signal_descriptor(_PASSED_ON)
        self._task_name = Path("/proc/self/comm").read_bytes().strip()
        self._family = ChildReaper()
        self._finalization = finalization
        self._torch_seed: int | None = None
        self._unconfirmed: list[tuple[int, int, int]] = []
        self._later: list[str] = []
        self._reserve = StandbyPool(0)
        self._idle = _IDLE_BEFORE_LATER_IMPORTS
        self._environment_before: Mapping[str, str] = {}
        self._environment_by_imports: worker.Changes = {}
        self._learner = ImportLearner(None, (), (), ())
        self._attempt: _Attempt | None = None
        self._next: ImportPlan | None = None
        self._gently = True
        self._serves = True
        """Whether it has workers, and not one that it was forked from."""
        self._newest = mmap.mmap(-1, mmap.PAGESIZE)
        """The process that is to start the next workers, or else no number: all that are forked for that share this."""
        self._handed_on: frozenset[int] = frozenset()
        """The workers whose imports that process sees, too."""
        become_subreaper()

    def serve(self) -> None:
        """Import, then work for the agent until it is gone; return in every worker that is to run the program."""
        if self._settings["warm"]:
            self._warm_up()
        else:
            self._tell(state="cold")
        set_task_name(_TASK_NAME)
        while not self._work():
            self._import_plan()

    def _work(self) -> bool:
        """Return in forked processes only: True in a worker, False in the replacement."""
        self._family.watch()
        # From here on the agent's end is seen at once, and there is something to do about it before going.
        set_parent_death_signal(0)
        idle_since = time.monotonic()
        if self._next is not None and self._bear():
            return False
        while True:
            waiting = select.poll()
            answers = self._attempt.answers if self._attempt is not None else None
            for descriptor in (self._channel.fileno(), self._agent, self._signals, self._family.fileno(), answers):
                if descriptor is not None:
                    waiting.register(descriptor, select.POLLIN)
            ready = {descriptor for descriptor, _events in waiting.poll(self._timeout_ms(idle_since))}
            if self._agent in ready:
                self._end()
            if self._signals in ready:
                self._pass_signals_on()
            if self._family.fileno() in ready or self._family.seconds_to_scan() == 0:
                self._report_exits()
            if answers in ready and self._judge_attempt() and self._bear():
                return False
            if self._channel.fileno() in ready:
                if self._obey():
                    return True
            else:
                self._confirm()
            if ready:
                idle_since = time.monotonic()
            elif self._reserve.wanted:
                # If it fails, the order will find out.
                with contextlib.suppress(OSError):
                    if self._fork_one():
                        return True
            elif self._wants_more(time.monotonic() - idle_since) and self._bear():
                return False

    def _wants_more(self, idle: float) -> bool:
        """Return whether now is the time to import more than this process has."""
        if self._attempt is not None or not self._settings["warm"] or idle < self._idle:
            return False
        urgent, self._idle = self._idle == 0, _IDLE_BEFORE_LATER_IMPORTS
        if not urgent and (self._leaves_it_to_another() or not self._learner.is_quiet()):
            return False
        if not self._later and not self._learner.has_news():
            if urgent:
                self._tell(state="alone", **self._learner.news())
            return False
        self._learner.make_plan()
        self._next, self._gently = self._learner.planned(self._later), not urgent
        self._later = []
        return True

    def _leaves_it_to_another(self) -> bool:
        """Return whether a process that was forked from this one has imported what this one has not, and sees the rest.

        The next one is then forked from that, and imports only what has come since.
        """
        (newest,) = _PID.unpack_from(self._newest)
        if newest in (0, os.getpid()) or self._learner.observed() != self._handed_on:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(newest, 0)
            return True
        return False

    def _timeout_ms(self, idle_since: float) -> float | None:
        """Return how long to wait for something to happen, in ms; None for ever."""
        if self._unconfirmed or self._reserve.wanted:
            return 0
        scan = self._family.seconds_to_scan()
        idle = idle_since + self._idle - time.monotonic()
        imports = None
        if self._attempt is None and self._idle == 0:
            imports = 0.0
        elif self._attempt is None and not self._leaves_it_to_another():
            look = self._learner.seconds_to_look()
            imports = idle if self._later and look is None else max(idle, look) if look is not None else None
        seconds = [wait for wait in (scan, imports) if wait is not None]
        return max(0.0, min(seconds)) * 1000 if seconds else None

    # Imports

    def _warm_up(self) -> None:
        self._environment_before = self._settings.get("environment") or dict(os.environ)
        directory = preload.script_directory(self._settings["options"])
        self._learner = ImportLearner(
            self._settings.get("imports"), self._settings["options"], self._settings["preload"], directory
        )
        sys.path[:0] = directory
        state: dict[str, Any] = {"state": "warm"}
        try:
            obstacle, self._torch_seed = preload.import_modules(
                preload.REQUIRED,
                lambda name: self._tell(state="importing", module=name),
                tried="joint" in self._settings,
            )
        except preload.BrokenPreloadError as error:
            # A worker that is started cold tells of a torch that is broken itself, or does without.
            state = {"state": "cold", "module": error.module, "reason": str(error)[:8000]}
        else:
            if obstacle is not None:
                state = {"state": "cold", "reason": obstacle}
        del sys.path[: len(directory)]
        if state["state"] == "warm":
            self._later = [*preload.LATER]
            self._learner.begin()
            if self._learner.wanted.steps:
                # That may spoil a process, and this one is left then.
                self._next, self._gently = self._learner.wanted, False
                longest = max(_LEAST_WAIT, _WAIT_FACTOR * self._learner.seconds)
                # A preload is waited for however long it takes.
                state["awaited"] = None if self._settings["preload"] else longest
            else:
                self._reserve = StandbyPool(self._settings.get("workers", 0))
        self._task_name = Path("/proc/self/comm").read_bytes().strip()
        flush_c_streams()
        self._keep_imports()
        self._tell(**state)

    def _keep_imports(self) -> None:
        """Do once what is the same in all workers, each of which would have to copy the memory that it touches."""
        self._environment_by_imports = worker.changes(self._environment_before, dict(os.environ))
        self._finalization.note_modules()
        importlib.invalidate_caches()
        gc.freeze()

    # The replacement

    def _bear(self) -> bool:
        """Fork the process that will start the workers of later rounds, while this one keeps those that run.

        It imports the next plan, which takes longer than a round change may: meanwhile this process is there for that.
        True in the new process.
        """
        plan, self._next = self._next, None
        assert plan is not None
        self._reserve.dismiss()
        near_end, far_end = Channel.pair()
        answers, answer = os.pipe()
        me = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            # Whoever is short of processes needs them for something else.
            for descriptor in (near_end, far_end):
                descriptor.close()
            os.close(answers)
            os.close(answer)
            self._tell(state="alone")
            return False
        if pid == 0:
            os.setsid()
            set_parent_death_signal(signal.SIGKILL)
            if os.getppid() != me:
                os._exit(0)
            become_subreaper()
            self._family.forget()
            self._family = ChildReaper()
            self._channel.close()
            near_end.close()
            os.close(answers)
            self._channel, self._attempt = far_end, _Attempt(plan, os.getpid(), answer)
            self._serves = False
            return True
        self._handed_on = self._learner.observed()
        self._family.replacements.add(pid)
        self._attempt = _Attempt(plan, pid, answers)
        handle = os.pidfd_open(pid)
        with contextlib.suppress(OSError):
            self._channel.send({"state": "replacement", "pid": pid}, [near_end.fileno(), handle])
        os.close(handle)
        os.close(answer)
        near_end.close()
        far_end.close()
        return False

    def _import_plan(self) -> None:
        """In the new process: get ready, or go if no workers could be forked from it then."""
        attempt, self._attempt = self._attempt, None
        assert attempt is not None
        set_task_name(self._task_name)
        with _silent():
            outcome = self._learner.attempt(attempt.plan, gently=self._gently)
        set_task_name(_TASK_NAME)
        gone = not outcome.complete or self._learner.searches
        if not gone and not outcome.broken:
            self._learner.settle(attempt.plan)
        with contextlib.suppress(OSError):
            os.write(attempt.answers, outcome.packed())
        os.close(attempt.answers)
        if gone:
            os._exit(0)
        if outcome.broken:
            self._tell(state="broken", reason=outcome.broken)
            return
        self._later = [name for name in self._later if name not in sys.modules]
        self._keep_imports()
        # From now on it outlives the process that it was forked from.
        set_parent_death_signal(0)
        _PID.pack_into(self._newest, 0, os.getpid())
        self._tell(state="complete", **self._learner.news())

    def _judge_attempt(self) -> bool:
        """Take in what became of the process that was to take this one's place; True if there is to be another."""
        attempt, self._attempt = self._attempt, None
        assert attempt is not None
        with os.fdopen(attempt.answers, "rb") as file:
            answer = file.read()
        outcome = Outcome.unpacked(answer)
        if outcome is None or not outcome.complete or self._learner.searches:
            self._family.replacements.discard(attempt.pid)
            code = -signal.SIGKILL
            with contextlib.suppress(ChildProcessError):
                code = os.waitstatus_to_exitcode(os.waitpid(attempt.pid, 0)[1])
            self._next = self._learner.next_attempt(attempt.plan, outcome, code)
            if self._next is None:
                self._tell(state="alone", **self._learner.news())
        return self._next is not None

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
        if not self._serves:
            self._serves = True
            self._learner.round_over()
        refusals, refusal = os.pipe()
        handed = [refusal, *descriptors]
        pid = self._reserve.take(order, handed)
        if pid is None:
            try:
                if self._fork_one(refusals, *handed, *(other for _rank, _pid, other in self._unconfirmed)):
                    return True
                pid = self._reserve.take(order, handed)
                os.write(refusal, b"" if pid else b"it was killed")
            except OSError as error:
                os.write(refusal, str(error).encode())
        for descriptor in handed:
            os.close(descriptor)
        if pid is not None:
            self._family.add(pid)
        self._unconfirmed.append((order["rank"], pid or -1, refusals))
        return False

    def _fork_one(self, *not_inherited: int) -> bool:
        """Fork one for the reserve; True there, once it has an order. Raises OSError."""
        self._reserve.wanted = max(0, self._reserve.wanted - 1)
        record = self._learner.new_record()
        near_end, far_end = Channel.pair()
        me = os.getpid()
        pid = os.fork()
        if pid == 0:
            with worker.errors_to(None):
                near_end.close()
                self._reserve.dismiss()
                for descriptor in (self._agent, self._signals, *not_inherited):
                    os.close(descriptor)
                if self._attempt is not None:
                    os.close(self._attempt.answers)
                worker.enter_own_session(me)
                self._family.forget()
                self._channel.close()
                order, (refusal, *descriptors) = far_end.receive() or os._exit(0)
                far_end.close()
            with worker.errors_to(refusal):
                self._become_worker(order, descriptors, record)
            os.close(refusal)
            return True
        far_end.close()
        self._reserve.add(pid, near_end)
        self._learner.add(pid, record)
        return False

    def _confirm(self) -> None:
        """Tell what became of starts, once no more are ordered: the forked processes get ready side by side."""
        for rank, pid, refusals in self._unconfirmed:
            with os.fdopen(refusals, "rb") as reasons:
                refused = reasons.read().decode()
            self._tell(state="refused" if refused else "started", rank=rank, pid=pid, reason=refused)
        self._unconfirmed.clear()

    def _become_worker(self, order: dict[str, Any], descriptors: Sequence[int], record: ImportRecord | None) -> None:
        order |= json.loads(read_memory_file(descriptors[0]))
        streams = dict(zip(order["streams"], descriptors[1:], strict=True))
        extra = worker.place_descriptors(streams)
        environment = order["environment"] | extra
        if order["how"] == "exec":
            signal.pthread_sigmask(signal.SIG_SETMASK, self._settings["signal_mask"])
            os.chdir(order["directory"])
            worker.execute(order["execute"], environment)
        worker.change(environment, self._environment_by_imports)
        worker.become_fresh_interpreter(order, environment, streams, self._task_name, self._torch_seed)
        self._finalization.inherit()
        renew_ranks()
        self._learner.observe(record)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._settings["signal_mask"])

    # What becomes of workers

    def _report_exits(self) -> None:
        for pid, code in self._family.exits():
            self._tell(state="exited", pid=pid, code=code)

    def _sweep(self, seconds: float) -> list[int]:
        self._reserve.dismiss()
        # It is a child of another one until that goes, and of this process then.
        left = self._family.sweep(seconds, self._report_exits, _PID.unpack_from(self._newest))
        self._learner.round_over()
        return left

    def _pass_signals_on(self) -> None:
        """Send to the agent what a worker sends to its parent, which is the agent with torchrun."""
        for number, sender in sent_signals(self._signals):
            # slurmstepd, the agent's parent, signals every process of a step, the agent among them.
            if sender not in ancestors():
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._agent, number)

    def _end(self) -> None:
        """The agent is gone: so go its workers, and this process."""
        with contextlib.suppress(OSError):
            self._sweep(_SWEEP_AFTER_AGENT)
            if self._serves:
                self._learner.save_unverified()
        os._exit(0)

    def _tell(self, **message: Any) -> None:
        try:
            self._channel.send(message)
        except OSError:
            if message["state"] != "exited":
                self._end()
