"""Looks at the stack of a worker's main thread, about 20 a second, from a thread of the worker itself.

A look says what the time since the last one counts as, and where the main thread is. A stack alone does not tell
whether a thread waits in a collective or computes in it (a backward pass does both), so time counts as waiting only if
the kernel says that the thread sleeps; on GPUs it waits for kernels of any kind, and nothing is known. The fork server
begins this in each worker that it forks, in others the trainer API does. Nothing in torch or in the script is replaced.
"""

from __future__ import annotations

import _thread
import atexit
import functools
import json
import os
import sys
import threading
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

SWITCH = "SLURM_ELASTIC_TIME_USE"
"""``off`` in the environment of a worker: nothing is measured."""
_LOOK_SAMPLES = 20
"""Looks at one instruction, about 1 s, after which the page has the last collectives."""
_VALID_NS, _NEVER = 400_000_000, 2**63
"""For so long the page has them when the thread has moved: it still tells which collective has just failed."""
_LOOK_SHARE = 100
"""The flight recorder is asked at most for this part of the time: asking takes some 100 ms when it is full."""
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "/slurm_elastic/")
"""Parts of the paths of files that are not the script's own."""
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


@functools.lru_cache(maxsize=20_000)
def use_of_code(path: str, name: str) -> int:
    """Return the use of a function by itself: the first of `PLACES` that fits, else `OWN`."""
    path = path.replace(os.sep, "/")
    for place, function, use in PLACES:
        fits = f"/{place}" in path if place.endswith("/") else path.endswith(f"/{place}")
        if fits and function in ("", name):
            return use
    return OWN


def use_of_stack(frame: FrameType | None) -> int:
    """Return the use of a stack, whose innermost frame is given.

    It is reading, writing or input if any function on it says so, the outermost if several do: a checkpoint may be
    written by collectives, and input read from a checkpoint. It is waiting if the innermost function says so: all of
    the training may run inside of a function of torch.distributed.
    """
    outermost, innermost = OWN, TRANSPARENT
    while frame is not None:
        use = use_of_code(frame.f_code.co_filename, frame.f_code.co_name)
        if use > WAITING:
            outermost = use
        if innermost == TRANSPARENT:
            innermost = use
        frame = frame.f_back
    if outermost != OWN:
        return outermost
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
    """Looks at one thread of this process, and writes its use of time to the control page.

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
        self._instruction: tuple[CodeType, int] | None = None
        self._still = self._may_look_at = 0
        self._looked_at = _NEVER
        for field in USES:
            fields[field] = 0
        fields[SAMPLED] = 1

    def pause(self) -> float:
        """Return the seconds until the next look, 30 to 70 ms by chance, so that looks never have a script's rhythm."""
        return 0.03 + time.monotonic_ns() % 1000 * 4e-5

    def sample(self) -> bool:
        """Take a look; return False when the thread has ended."""
        fields = self._fields
        try:
            asleep = self._is_asleep()
            slept = time.monotonic_ns() - self._begin - (self._awake_ns() - self._awake)
        except OSError:
            return False
        frame = sys._current_frames().get(self._ident)
        use, now = use_of_stack(frame), time.monotonic_ns()
        if use > WAITING or (use == WAITING and asleep):
            self._uses[use] += now - self._last
        self._last = now
        cuda = sys.modules.get("torch.cuda")
        on_gpu = cuda is not None and bool(getattr(cuda, "is_initialized", bool)())
        for field, nanoseconds in zip(USES, self._uses, strict=True):
            fields[field] = nanoseconds
        # The other thread sleeps for moments while this one has Python's lock; the kernel knows how long in all.
        fields[USES[0]] = NONE if on_gpu else min(self._uses[0], max(0, slept))
        fields[SAMPLED] = now - self._begin
        write_text(fields, place_of_stack(frame), PLACE)
        # On a GPU the main thread may stand anywhere while its kernels wait in a collective.
        fields[IN_COLLECTIVE] = 1 if use == WAITING else NONE if on_gpu else 0
        fields[IN_COLLECTIVE_TIME] = now
        self._note_collectives(None if frame is None else (frame.f_code, frame.f_lasti), now)
        return True

    def _note_collectives(self, instruction: tuple[CodeType, int] | None, now: int) -> None:
        self._still = self._still + 1 if instruction == self._instruction else 0
        self._instruction = instruction
        asked = self._fields[DUMP]
        if asked > self._fields[DUMPED]:
            self.look()
            write_dump(os.environ)
            self._fields[DUMPED] = asked
        elif self._still == _LOOK_SAMPLES and now >= self._may_look_at:
            self.look()
        elif self._still < _LOOK_SAMPLES and now > self._looked_at + _VALID_NS:
            write_text(self._fields, "", COLLECTIVES, COLLECTIVES_FIELDS)
            self._looked_at = _NEVER
        if self._still >= _LOOK_SAMPLES and self._looked_at != _NEVER:
            self._looked_at = now

    def look(self) -> None:
        """Write the last collectives to the page; nothing where torch's functions have changed."""
        begin = time.monotonic_ns()
        try:
            last = [collective for content in dumps().values() for collective in collectives(content)]
        except Exception:
            # They are private: an untested release may raise anything. The training goes on.
            last = []
        text = json.dumps(last[:MOST_GROUPS], separators=(",", ":")) if last else ""
        write_text(self._fields, text, COLLECTIVES, COLLECTIVES_FIELDS)
        self._looked_at = time.monotonic_ns()
        self._may_look_at = begin + _LOOK_SHARE * (self._looked_at - begin)

    def _is_asleep(self) -> bool:
        # proc_pid_stat(5): the name, in parentheses, may contain anything.
        content = os.pread(self._state, 128, 0)
        return content[content.rindex(b")") + 2] in b"SD"

    def _awake_ns(self) -> int:
        """Return the time that the thread has run, or waited for a processor (kernel, scheduler/sched-stats.rst)."""
        run, waited = os.pread(self._times, 64, 0).split()[:2]
        return int(run) + int(waited)


def start_sampling(environ: Mapping[str, str]) -> None:
    """Have the calling thread looked at, for the agent whose control page the environment names; without one, nothing.

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
    """Have the calling thread looked at from now on, for as long as the process lives.

    Does nothing in a process that does so already, where the environment has ``SLURM_ELASTIC_TIME_USE=off``, or the
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
    atexit.register(_at_exit, sampler, thread, fields)
    os.register_at_fork(before=thread.end, after_in_parent=thread.begin)
    thread.begin()


class _SamplerThread:
    """The thread that looks. It ends before its process forks, and begins again in the parent after that.

    So a script that has no threads can fork as before: a child would inherit the locks that a thread holds at this
    moment, and Python warns of it (docs.python.org, os.fork, 3.12). It ends before Python does, too: Python would end
    it in the middle of a C++ function of torch, and then std::terminate ends the process by SIGABRT.
    """

    def __init__(self, sampler: Sampler, fields: Fields) -> None:
        self._sampler, self._fields = sampler, fields
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        # Two threads may fork at once.
        if self._thread is None and self._fields[SAMPLER] == os.getpid():
            self._over.clear()
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def end(self, timeout: float = _FORK_TIMEOUT) -> None:
        if self._thread is None:
            return
        self._over.set()
        # Not `join`, which returns before the kernel's thread is gone.
        task, by = f"/proc/self/task/{self._thread.native_id}", time.monotonic() + timeout
        while os.path.exists(task) and time.monotonic() < by:  # noqa: PTH110
            time.sleep(0.0001)
        self._thread = None

    def _run(self) -> None:
        while self._fields[SAMPLER] == os.getpid() and self._sampler.sample():
            if self._over.wait(self._sampler.pause()):
                return


def _at_exit(sampler: Sampler, thread: _SamplerThread, fields: Fields) -> None:
    """Leave the last collectives of a process that ends because one has failed, as by its time limit."""
    thread.end(_EXIT_TIMEOUT)
    # Set by Python for an exception that ends the program (docs.python.org, sys.last_traceback).
    last = getattr(sys, "last_traceback", None)
    if last is None or fields[SAMPLER] != os.getpid():
        return
    while last.tb_next is not None:
        last = last.tb_next
    if use_of_stack(last.tb_frame) == WAITING:
        sampler.look()
        write_dump(os.environ, stacks=False)
        # The agent waits for no dump of this process any more.
        fields[DUMPED] = LAST_DUMP
