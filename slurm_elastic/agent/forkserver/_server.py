"""The fork server: imports modules, forks workers on the agent's order, reports their exits, kills what they leave."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from slurm_elastic.agent.forkserver import _children as child
from slurm_elastic.agent.forkserver import _imports as imports
from slurm_elastic.agent.forkserver._fast_exit import FastExit, keep_owned_groups
from slurm_elastic.agent.forkserver._import_learner import Attempt, ImportLearner, ImportRecord
from slurm_elastic.agent.forkserver.linux import (
    ancestors,
    become_subreaper,
    flush_c_streams,
    read_memory_file,
    sent_signals,
    set_parent_death_signal,
    signal_descriptor,
)
from slurm_elastic.agent.forkserver.protocol import Channel, wait_on
from slurm_elastic.control.answers import start_answering

_SWEEP_AFTER_AGENT = 5.0
"""Seconds to kill all workers when the agent has ended, before this process ends."""


class _Replacement(NamedTuple):
    """A forked process that imports modules, to replace its parent as the fork server.

    It reports what has come of its imports, and waits until it has to take over. It has the same channel to the agent
    as its parent, of which only the fork server reads.
    """

    attempt: Attempt
    pid: int
    link: Channel
    """The own end of the channel between both."""


@contextlib.contextmanager
def _output_dropped() -> Iterator[None]:
    """Drop what imports print: no script has asked for these modules yet."""
    # Python's own streams have no buffers (`python -u`).
    kept = [os.dup(number) for number in (1, 2)]
    with open(os.devnull, "wb") as nothing:  # noqa: PTH123
        for number in (1, 2):
            os.dup2(nothing.fileno(), number)
    try:
        yield
    finally:
        flush_c_streams()
        for number, copy in enumerate(kept, 1):
            os.dup2(copy, number)
            os.close(copy)


class ServerProcess:
    """One fork server. `serve` returns only in a worker."""

    def __init__(self, settings: Mapping[str, Any], fast_exit: FastExit) -> None:
        # While this process imports it cannot watch the agent: the kernel kills it with the agent.
        set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != settings["agent"]:
            os._exit(0)
        self._settings = settings
        self._channel = Channel.inherited(settings["channel"])
        self._agent = os.pidfd_open(settings["agent"])
        # Workers send signals to their parent, which is the agent with torchrun.
        self._signals = signal_descriptor(child.JOB_SIGNALS)
        self._children = child.ChildReaper()
        self._fast_exit = fast_exit
        self._environment_before: Mapping[str, str] = {}
        self._environment_after: Mapping[str, str] = {}
        self._learner = ImportLearner(None, (), (), ())
        self._replacement: _Replacement | None = None
        """The replacement that still imports."""
        self._prepared: _Replacement | None = None
        """The replacement that has imported, and takes over between two rounds; kept until the next one has."""
        become_subreaper()

    def serve(self) -> None:
        """Import, then carry out the agent's orders until it ends; return in workers only, which run the program."""
        if self._settings["warm"]:
            self._import_required()
        else:
            self._report(state="cold")
        while not self._run_until_forked():
            self._import_learned()

    def _run_until_forked(self) -> bool:
        """Handle events; return in forked processes only: True in a worker, False in a replacement."""
        self._children.watch()
        # From here on this process sees the agent's end at once, and kills the workers before it ends itself.
        set_parent_death_signal(0)
        while True:
            attempt = self._learner.next_attempt() if self._replacement is None else None
            if attempt is not None and self._fork_replacement(attempt):
                return False
            link = self._replacement.link.fileno() if self._replacement is not None else None
            descriptors = self._channel.fileno(), self._agent, self._signals, self._children.fileno(), link
            seconds = self._learner.seconds_to_look() if self._replacement is None else None
            ready = wait_on([each for each in descriptors if each is not None], seconds)
            if self._agent in ready:
                self._shut_down()
            if self._signals in ready:
                self._forward_signals()
            if self._children.fileno() in ready:
                self._report_exits()
            if link in ready:
                self._hear_replacement()
            if self._channel.fileno() in ready and self._handle_order():
                return True

    # Imports

    def _import_required(self) -> None:
        self._environment_before = self._settings.get("environment") or dict(os.environ)
        directory = imports.script_directory(self._settings["options"])
        self._learner = ImportLearner(
            self._settings.get("imports"), self._settings["options"], self._settings["preload"], directory
        )
        sys.path[:0] = directory
        try:
            obstacle = imports.import_required()
        except imports.BrokenPreloadError as error:
            # Cold workers import torch themselves, and fail with its error if the script needs it.
            obstacle = str(error)[:8000]
        del sys.path[: len(directory)]
        state: dict[str, Any] = {"state": "cold", "reason": obstacle} if obstacle else {"state": "warm"}
        if not obstacle:
            keep_owned_groups()
            # An import may make a process unfit to fork workers: a replacement tries, and this process stays.
            state["awaits"] = self._learner.begin()
        flush_c_streams()
        self._freeze_imports()
        self._report(**state)

    def _freeze_imports(self) -> None:
        """Do what is the same for all workers: done in a worker it would copy the memory pages that it touches."""
        self._environment_after = dict(os.environ)
        self._fast_exit.note_modules()
        importlib.invalidate_caches()
        gc.freeze()

    # The replacement

    def _fork_replacement(self, attempt: Attempt) -> bool:
        """Fork a process that starts the workers of later rounds; this one remains the parent of those that run.

        The replacement imports what workers have imported, which takes longer than a round change may: until it is
        done, this process starts the workers. Returns True in the replacement.
        """
        near_end, far_end = Channel.pair()
        me = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            # The limit on processes is reached (EAGAIN) or memory is short: go on without a replacement.
            near_end.close()
            far_end.close()
            self._report(state="warm")
            return False
        if pid == 0:
            child.enter_own_session(me)
            become_subreaper()
            self._children.forget()
            self._children = child.ChildReaper()
            near_end.close()
            if self._prepared is not None:
                self._prepared.link.close()
            self._prepared, self._replacement = None, _Replacement(attempt, os.getpid(), far_end)
            return True
        far_end.close()
        self._children.kept.add(pid)
        self._replacement = _Replacement(attempt, pid, near_end)
        return False

    def _import_learned(self) -> None:
        """In the replacement: import, and take over when the fork server says so; ends where that does not come."""
        replacement, self._replacement = self._replacement, None
        assert replacement is not None
        link = replacement.link
        with _output_dropped():
            outcome = self._learner.carry_out(replacement.attempt)
        if not any(outcome.values()):
            self._freeze_imports()
        with contextlib.suppress(OSError):
            link.send(outcome)
        if link.receive() is None:
            os._exit(0)
        # From now on it outlives the process that it was forked from, which ends at the answer.
        set_parent_death_signal(0)
        with contextlib.suppress(OSError):
            link.send({})
        link.close()
        self._learner.round_over()
        handle = os.pidfd_open(os.getpid())
        self._report(descriptors=[handle], state="warm", pid=os.getpid(), **self._learner.message_fields())
        os.close(handle)

    def _hear_replacement(self) -> None:
        """Handle what the replacement that imports reports."""
        replacement = self._replacement
        assert replacement is not None
        received = replacement.link.receive()
        # One that was killed has said nothing.
        outcome = {"harm": "ends the process", "broken": ""} if received is None else received[0]
        self._replacement = None
        if outcome["broken"]:
            self._dismiss(replacement)
            self._report(state="broken", reason=outcome["broken"])
        elif outcome["harm"]:
            self._dismiss(replacement)
            if not self._learner.tries_again(replacement.attempt, outcome["harm"]):
                # The first workers wait for the replacement until this.
                self._report(state="warm", **self._learner.message_fields())
        else:
            self._dismiss(self._prepared)
            self._prepared = replacement
            if not self._children.workers:
                self._hand_over()

    def _hand_over(self) -> None:
        """Have the replacement that is ready be the fork server, and end; return if it has died."""
        prepared, self._prepared = self._prepared, None
        assert prepared is not None
        self._dismiss(self._replacement)
        self._replacement = None
        with contextlib.suppress(OSError):
            prepared.link.send({})
            if prepared.link.receive() is not None:
                os._exit(0)
        self._dismiss(prepared)
        self._report(state="warm")

    def _dismiss(self, replacement: _Replacement | None) -> None:
        if replacement is not None:
            replacement.link.close()
            if replacement.pid in self._children.kept:
                # Reaped when it has ended, which a file system may hold up.
                os.kill(replacement.pid, signal.SIGKILL)

    # Orders

    def _handle_order(self) -> bool:
        """Receive one order and carry it out; return True in a process that is to become a worker."""
        received = self._channel.receive()
        if received is None:
            self._shut_down()
        order, descriptors = received
        if order["order"] == "start":
            return self._start(order, descriptors)
        if order["order"] == "child":
            self._fork_agent_child(order["module"], descriptors[0])
        if order["order"] == "sweep":
            left = self._children.sweep(order["seconds"], self._report_exits)
            self._learner.round_over()
            self._report(state="swept", left=left)
            # What is left would have no parent that reaps it.
            if self._prepared is not None and not left:
                self._hand_over()
        return False

    def _start(self, order: dict[str, Any], descriptors: Sequence[int]) -> bool:
        record = self._learner.new_record()
        pid, me, reason = -1, os.getpid(), ""
        try:
            pid = os.fork()
        except OSError as error:
            reason = str(error)
        if pid == 0:
            try:
                self._let_go()
                child.enter_own_session(me)
                self._become_worker(order, descriptors, record)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                os._exit(127)  # That of a shell for a program that cannot be executed.
            return True
        for descriptor in descriptors:
            os.close(descriptor)
        if pid > 0:
            self._children.workers.add(pid)
        self._report(state="started" if pid > 0 else "refused", rank=order["rank"], pid=pid, reason=reason)
        return False

    def _fork_agent_child(self, module: str, descriptor: int) -> None:
        """Fork a process that works for the agent. It is no worker: rounds and this process end without it.

        Args:
            descriptor: A socket to the agent. It is closed if the fork fails, which tells the agent.
        """
        flush_c_streams()
        pid = -1
        with contextlib.suppress(OSError):
            pid = os.fork()
        if pid == 0:
            child.run_agent_child(module, descriptor, self._settings["signal_mask"], self._let_go)
        os.close(descriptor)
        if pid > 0:
            self._children.kept.add(pid)

    def _let_go(self) -> None:
        """In a forked process: close what belongs to the fork server alone."""
        for descriptor in (self._agent, self._signals):
            os.close(descriptor)
        for other in (self._replacement, self._prepared):
            if other is not None:
                other.link.close()
        self._children.forget()
        self._channel.close()

    def _become_worker(self, order: dict[str, Any], descriptors: Sequence[int], record: ImportRecord | None) -> None:
        order |= json.loads(read_memory_file(descriptors[0]))
        streams = dict(zip(order["descriptors"], descriptors[1:], strict=True))
        environment = order["environment"] | child.place_descriptors(streams)
        if order["cpus"] is not None:
            os.sched_setaffinity(0, order["cpus"])
        if not order["warm"]:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._settings["signal_mask"])
            child.execute(order["command"], environment)
        environment = child.changed_alike(environment, self._environment_before, self._environment_after)
        sys.argv[1:] = order["command"][1 + len(self._settings["options"]) :]
        child.become_fresh_interpreter(order["command"], environment)
        self._fast_exit.inherit()
        imports.renew_ranks()
        self._learner.observe(record)
        # Before the signals are unblocked: none of the script's comes to this thread.
        start_answering(environment)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._settings["signal_mask"])

    # Ends of workers and of the agent

    def _report_exits(self) -> None:
        for pid, code in self._children.exits():
            self._report(state="exited", pid=pid, code=code)

    def _forward_signals(self) -> None:
        for number, sender in sent_signals(self._signals):
            # slurmstepd, the agent's parent, signals every process of a step, the agent among them.
            if sender not in ancestors(os.getppid()):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._agent, number)

    def _shut_down(self) -> NoReturn:
        """The agent has ended: kill its workers, then end this process."""
        with contextlib.suppress(OSError):
            self._children.sweep(_SWEEP_AFTER_AGENT, self._report_exits)
        os._exit(0)

    def _report(self, *, descriptors: Sequence[int] = (), **message: Any) -> None:
        try:
            self._channel.send(message, descriptors)
        except OSError:
            if message["state"] != "exited":
                self._shut_down()
