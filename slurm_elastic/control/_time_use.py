"""Use of the time of a worker's main thread, found by samples of its stack, about 20 a second.

A thread takes the samples. It changes nothing in torch or in the script, and what it sees is the same for all
frameworks. By itself the stack does not tell whether a thread waits in a collective or works for one (a backward pass
computes, and waits for the gradients of other ranks), so a sample counts as waiting only if the kernel says that
the thread sleeps. A thread that waits for a processor, as under a CPU limit, does not sleep.

The thread itself makes the main thread sleep for moments, for Python's lock. The kernel also tells exactly how long the
main thread has slept in all (schedstat), which bounds the time that counts as waiting.

On GPUs the main thread waits for its own kernels as for those of collectives, so waiting is unknown there.

The page also says where the main thread is: in a collective or not, and, when it stays there, at which line of the
script. A worker that hangs keeps the others in a collective to which it does not come itself. When the main thread has
stayed for about a second, torch's flight recorder is asked for its last collectives. The thread also writes the dump
that the agent asks for when a worker of any node hangs (`_flight_recorder`).

The fork server begins this in each worker that it forks, whatever its script imports; in others the trainer API does.
"""

from __future__ import annotations

import _thread
import atexit
import json
import os
import sys
import time
from collections.abc import Mapping
from types import CodeType, FrameType

from slurm_elastic.control._flight_recorder import MOST_GROUPS, collectives, dumps, write_dump
from slurm_elastic.control._shared_page import (
    COLLECTIVES,
    COLLECTIVES_FIELDS,
    DUMP,
    DUMPED,
    IN_COLLECTIVE,
    IN_COLLECTIVE_TIME,
    LAST_DUMP,
    NONE,
    PLACE,
    SAMPLED,
    SAMPLER,
    USES,
    Fields,
    PageError,
    map_page,
    write_text,
)
from slurm_elastic.control._worker_side import VARIABLE

__all__ = ["PLACES", "SWITCH", "Sampler", "start", "start_sampling", "use_of_code", "use_of_stack"]

SWITCH = "SLURM_ELASTIC_TIME_USE"
"""``off`` in the environment of a worker: nothing is measured."""
_PAUSE_NS = 30_000_000
_JITTER_NS = 40_000_000
"""The pause between two samples is drawn from 30 to 70 ms, so that it never has the rhythm of the steps."""
_STILL_SAMPLES = 8
"""Number of samples at one instruction, about 0.4 s, after which the page has the line."""
_LOOK_SAMPLES = 20
"""Number of such samples, about 1 s, after which it has the last collectives."""
_LOOK_SHARE = 100
"""The flight recorder is asked at most for this part of the time: asking takes some 100 ms when it is full."""
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "/slurm_elastic/")
"""Parts of the paths of files that are not the script's own."""
_MOST_CODES = 20_000
"""Code objects whose use is remembered."""
_FORK_TIMEOUT, _EXIT_TIMEOUT = 0.1, 1.0
"""Seconds that a fork and the end of the process wait for the thread, which may be writing a dump."""

WAITING, LOADING, SAVING, RESTORING = range(4)
"""The uses, in the order of `USES`."""
OWN, TRANSPARENT = -1, -2
"""No use that is measured; a function that stands between a collective and its caller."""

PLACES: tuple[tuple[str, str, int], ...] = (
    # The end of a file's path, or a directory in it; the name of a function, empty for all; the use.
    # torch 2.12 to 2.15. tests/unit/control/test_time_use.py looks for these places in the installed release.
    ("torch/utils/data/dataloader.py", "", LOADING),
    ("torchdata/stateful_dataloader/stateful_dataloader.py", "", LOADING),
    ("slurm_elastic/trainer.py", "loading", LOADING),
    ("torch/serialization.py", "save", SAVING),
    ("torch/serialization.py", "load", RESTORING),
    ("torch/distributed/checkpoint/state_dict_saver.py", "", SAVING),
    ("torch/distributed/checkpoint/state_dict_loader.py", "", RESTORING),
    ("slurm_elastic/snapshot/_worker_side.py", "save", SAVING),
    ("slurm_elastic/snapshot/_worker_side.py", "load", RESTORING),
    ("safetensors/torch.py", "save_file", SAVING),
    ("safetensors/torch.py", "load_file", RESTORING),
    # transformers 5.23, lightning 2.6.
    ("transformers/trainer.py", "_save_checkpoint", SAVING),
    ("transformers/trainer.py", "_load_from_checkpoint", RESTORING),
    ("lightning/pytorch/trainer/trainer.py", "save_checkpoint", SAVING),
    ("lightning/pytorch/trainer/connectors/checkpoint_connector.py", "_restore_modules_and_callbacks", RESTORING),
    ("lightning/pytorch/trainer/connectors/checkpoint_connector.py", "restore_training_state", RESTORING),
    ("torch/autograd/graph.py", "_engine_run_backward", WAITING),
    ("torch/nn/parallel/distributed.py", "", WAITING),
    ("torch/distributed/elastic/", "", OWN),
    ("torch/distributed/", "", WAITING),
    ("slurm_elastic/control/_worker_side.py", "_wait", WAITING),
    ("torch/_ops.py", "", TRANSPARENT),
)


def use_of_code(path: str, name: str) -> int:
    """Return the use of a function by itself: the first of `PLACES` that fits, else `OWN`."""
    path = path.replace(os.sep, "/")
    for place, function, use in PLACES:
        fits = f"/{place}" in path if place.endswith("/") else path.endswith(f"/{place}")
        if fits and function in ("", name):
            return use
    return OWN


def use_of_stack(frame: FrameType | None, known: dict[CodeType, int]) -> int:
    """Return the use of a stack.

    It is reading, writing or input if any function on it says so, the outermost if several do: a checkpoint may be
    written by collectives, and input read from a checkpoint. It is waiting if the innermost function says so: all of
    the training may run inside of a function of torch.distributed.

    Args:
        frame: The innermost.
        known: The uses of code objects that were looked at before.
    """
    found, innermost = OWN, TRANSPARENT
    while frame is not None:
        code = frame.f_code
        use = known.get(code)
        if use is None:
            if len(known) >= _MOST_CODES:
                known.clear()
            use = known[code] = use_of_code(code.co_filename, code.co_name)
        if use > WAITING:
            found = use
        if innermost == TRANSPARENT:
            innermost = use
        frame = frame.f_back
    if found != OWN:
        return found
    return WAITING if innermost == WAITING else OWN


def place_of_stack(frame: FrameType | None) -> str:
    """Return the innermost line of a stack that is the script's own, as ``train.py:12 in step``; empty if none is."""
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith("<") and not any(part in code.co_filename for part in _LIBRARIES):
            return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"  # noqa: PTH119
        frame = frame.f_back
    return ""


class Sampler:
    """Samples one thread of this process, and writes its use of time to the control page.

    Args:
        fields: The fields of the page.
        ident: Python's number of the thread.
        task: The kernel's number of the thread.

    Raises:
        OSError: The kernel does not tell the times of threads (no /proc, or built without CONFIG_SCHED_INFO).
    """

    def __init__(self, fields: Fields, ident: int, task: int) -> None:
        self._fields, self._ident = fields, ident
        self._times = os.open(f"/proc/self/task/{task}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._state = os.open(f"/proc/self/task/{task}/stat", os.O_RDONLY | os.O_CLOEXEC)
        self._begin = self._last = time.monotonic_ns()
        self._awake = self._awake_ns()
        self._uses = [0, 0, 0, 0]
        self._known: dict[CodeType, int] = {}
        self._samples, self._random = 0, task
        self._on_gpu = False
        self._instruction: tuple[CodeType, int] | None = None
        self._still = 0
        self._looked = False
        self._may_look_at = self._valid = 0
        for field in USES:
            fields[field] = 0
        fields[SAMPLED] = 1

    def pause(self) -> float:
        """Return the seconds until the next sample."""
        # Numerical Recipes, 7.1: good enough, and without an import.
        self._random = (1664525 * self._random + 1013904223) % 2**32
        return (_PAUSE_NS + _JITTER_NS * self._random // 2**32) / 1e9

    def sample(self) -> bool:
        """Take a sample; return False when the thread has ended."""
        try:
            asleep = self._is_asleep()
            slept = time.monotonic_ns() - self._begin - (self._awake_ns() - self._awake)
        except OSError:
            return False
        frame = sys._current_frames().get(self._ident)
        use = use_of_stack(frame, self._known)
        now = time.monotonic_ns()
        self._write_place(frame, use, now)
        if use > WAITING or (use == WAITING and asleep):
            self._uses[use] += now - self._last
        self._last = now
        self._write(now, slept)
        return True

    def _write_place(self, frame: FrameType | None, use: int, now: int) -> None:
        instruction = None if frame is None else (frame.f_code, frame.f_lasti)
        moved, self._instruction = instruction != self._instruction, instruction
        if moved and self._still >= _STILL_SAMPLES:
            write_text(self._fields, "", PLACE)
        self._still = 0 if moved else self._still + 1
        self._write_collectives(now, moved)
        if self._still == _STILL_SAMPLES:
            write_text(self._fields, place_of_stack(frame), PLACE)
        # On a GPU the main thread may stand anywhere while its kernels wait in a collective.
        self._fields[IN_COLLECTIVE] = 1 if use == WAITING else NONE if self._on_gpu else 0
        self._fields[IN_COLLECTIVE_TIME] = now

    def _write_collectives(self, now: int, moved: bool) -> None:
        if moved and self._looked:
            # A collective that has failed at last, most likely; a worker that goes on has others soon.
            self._looked = False
            self._valid = _STILL_SAMPLES
            if now >= self._may_look_at:
                self.look()
        elif self._still >= _LOOK_SAMPLES and not self._looked and now >= self._may_look_at:
            self._looked = True
            self.look()
        elif not self._looked and self._valid:
            self._valid -= 1
            if not self._valid:
                write_text(self._fields, "", COLLECTIVES, COLLECTIVES_FIELDS)
        if self._fields[DUMP] > self._fields[DUMPED]:
            wanted = self._fields[DUMP]
            self._valid = _STILL_SAMPLES
            self.look()
            write_dump(os.environ)
            self._fields[DUMPED] = wanted

    def look(self) -> None:
        """Write the last collectives to the page; nothing where torch's functions have changed."""
        begin = time.monotonic_ns()
        try:
            last = [each for content in dumps().values() for each in collectives(content)]
        except Exception:
            # They are private: an untested release may raise anything. The training goes on.
            last = []
        text = json.dumps(last[:MOST_GROUPS], separators=(",", ":")) if last else ""
        write_text(self._fields, text, COLLECTIVES, COLLECTIVES_FIELDS)
        self._may_look_at = begin + _LOOK_SHARE * (time.monotonic_ns() - begin)

    def has_ended(self) -> None:
        """Tell the agent not to wait for a dump of this process any more."""
        self._fields[DUMPED] = LAST_DUMP

    def _write(self, now: int, slept: int) -> None:
        if not self._on_gpu and self._samples % 16 == 0:
            cuda = sys.modules.get("torch.cuda")
            self._on_gpu = cuda is not None and bool(getattr(cuda, "is_initialized", bool)())
        self._samples += 1
        fields = self._fields
        waiting, *others = self._uses
        fields[USES[0]] = NONE if self._on_gpu else min(waiting, max(0, slept))
        for field, nanoseconds in zip(USES[1:], others, strict=True):
            fields[field] = nanoseconds
        fields[SAMPLED] = now - self._begin

    def _is_asleep(self) -> bool:
        # proc_pid_stat(5): the name, in parentheses, may contain anything.
        content = os.pread(self._state, 128, 0)
        return content[content.rindex(b")") + 2] in b"SD"

    def _awake_ns(self) -> int:
        """Return the time that the thread has run, or waited for a processor (kernel, scheduler/sched-stats.rst)."""
        run, waited = os.pread(self._times, 64, 0).split()[:2]
        return int(run) + int(waited)


def start_sampling(environ: Mapping[str, str]) -> None:
    """Have the calling thread sampled, for the agent whose control page the environment names; do nothing without one.

    The script can still attach to the page, or a program that it starts.
    """
    path = environ.get(VARIABLE)
    if path:
        try:
            start(map_page(path))
        except (OSError, ValueError, PageError):
            # Only a script that attaches has to know.
            return


def start(fields: Fields) -> None:
    """Have the calling thread sampled from now on, for as long as the process lives.

    Does nothing in a process that samples already, where the environment has ``SLURM_ELASTIC_TIME_USE=off``, or the
    kernel does not tell the times.
    """
    if fields[SAMPLER] == os.getpid() or os.environ.get(SWITCH) == "off":
        return
    try:
        sampler = Sampler(fields, _thread.get_ident(), _thread.get_native_id())
    except (OSError, ValueError):
        return
    fields[SAMPLER] = os.getpid()
    thread = _SamplerThread(sampler, fields)
    atexit.register(_at_exit, sampler, thread, os.getpid())
    os.register_at_fork(before=thread.end, after_in_parent=thread.begin)
    thread.begin()


class _SamplerThread:
    """The thread that takes the samples. It ends before its process forks, and begins again in the parent after that.

    So a script that has no threads can fork as before: a child would inherit the locks that a thread holds at this
    moment, and Python warns of it (docs.python.org, os.fork, 3.12). It ends before Python does, too: Python would end
    it in the middle of a C++ function of torch, and then std::terminate ends the process by SIGABRT
    (Python/ceval_gil.h, take_gil, until 3.13).
    """

    def __init__(self, sampler: Sampler, fields: Fields) -> None:
        self._sampler, self._fields, self._pid = sampler, fields, os.getpid()
        self._stop: _thread.LockType | None = None
        self._task: int | None = None

    def begin(self) -> None:
        if self._stop is None and os.getpid() == self._pid:
            self._stop, self._task = _thread.allocate_lock(), None
            self._stop.acquire()
            # Not `threading`, whose import takes longer; like a daemon, such a thread does not hold up the end of the
            # process.
            _thread.start_new_thread(self._run, (self._stop,))

    def end(self, timeout: float = _FORK_TIMEOUT) -> None:
        if self._stop is None or os.getpid() != self._pid:
            return
        self._stop.release()
        self._stop = None
        by = time.monotonic() + timeout
        while time.monotonic() < by:
            if self._task is not None and not os.path.exists(f"/proc/self/task/{self._task}"):  # noqa: PTH110
                return
            time.sleep(0.0001)

    def _run(self, stop: _thread.LockType) -> None:
        self._task = _thread.get_native_id()
        while self._fields[SAMPLER] == self._pid and self._sampler.sample():
            if stop.acquire(timeout=self._sampler.pause()):
                return


def _at_exit(sampler: Sampler, thread: _SamplerThread, pid: int) -> None:
    """Leave the last collectives of a process that ends because one has failed, as by its time limit."""
    thread.end(_EXIT_TIMEOUT)
    # Set by Python for an exception that ends the program (docs.python.org, sys.last_traceback).
    last = getattr(sys, "last_traceback", None)
    if last is None or os.getpid() != pid:
        return
    while last.tb_next is not None:
        last = last.tb_next
    if use_of_stack(last.tb_frame, {}) == WAITING:
        sampler.look()
        write_dump(os.environ, stacks=False)
        sampler.has_ended()
