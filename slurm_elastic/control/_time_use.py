"""Looks at the stack of a worker's main thread, about 20 a second, from a thread of the worker itself.

A look says what the time since the last one counts as, and where the main thread is. A stack alone does not tell
whether a thread waits in a collective or computes in it (a backward pass does both), so time counts as waiting only if
the kernel says that the thread sleeps; on GPUs it waits for kernels of any kind, and nothing is known. The fork server
begins this in each worker that it forks, in others the trainer API does. Nothing in torch or in the script is replaced.
The thread also writes the dumps that the agent asks for: collectives, from torch's flight recorder, and Python stacks.
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
from collections.abc import Callable, Mapping
from types import CodeType, FrameType

from slurm_elastic.control import _shared_page as page
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
    """Looks at one thread of this process from another, and writes its use of time to the control page.

    The thread that looks ends before its process forks, and begins again in the parent after that: so a script that has
    no threads can fork as before. A child would inherit the locks that a thread holds at this moment, and Python warns
    of it (docs.python.org, os.fork, 3.12). It ends before Python does, too: Python would end it in the middle of a C++
    function of torch, and then std::terminate ends the process by SIGABRT.

    Args:
        ident: Python's number of the thread.
        task: The kernel's number of the thread.

    Raises:
        OSError: The kernel does not tell the times of threads (no /proc, or built without CONFIG_SCHED_INFO).
    """

    def __init__(self, fields: page.Fields, ident: int, task: int) -> None:
        self._fields, self._ident = fields, ident
        self._times = os.open(f"/proc/self/task/{task}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._state = os.open(f"/proc/self/task/{task}/stat", os.O_RDONLY | os.O_CLOEXEC)
        self._begin = self._last = time.monotonic_ns()
        self._awake = self._awake_ns()
        self._uses = [0, 0, 0, 0]
        self._instruction: tuple[CodeType, int] | None = None
        self._still = self._may_look_at = 0
        self._looked_at = _NEVER
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        for use in page.USES:
            fields[use] = 0
        fields[page.SAMPLED] = 1

    def begin(self) -> None:
        """Start the thread, unless it runs, as when two threads fork at once."""
        if self._thread is None and self._fields[page.SAMPLER] == os.getpid():
            self._over.clear()
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def end(self, timeout: float = _FORK_TIMEOUT) -> None:
        """End the thread, and wait that long for it."""
        if self._thread is None:
            return
        self._over.set()
        # Not `join`, which returns before the kernel's thread is gone.
        task, by = f"/proc/self/task/{self._thread.native_id}", time.monotonic() + timeout
        while os.path.exists(task) and time.monotonic() < by:  # noqa: PTH110
            time.sleep(0.0001)
        self._thread = None

    def at_exit(self) -> None:
        """Leave the last collectives of a process that ends because one has failed, as by its time limit."""
        self.end(_EXIT_TIMEOUT)
        # Set by Python for an exception that ends the program (docs.python.org, sys.last_traceback).
        last = getattr(sys, "last_traceback", None)
        if last is None or self._fields[page.SAMPLER] != os.getpid():
            return
        while last.tb_next is not None:
            last = last.tb_next
        if use_of_stack(last.tb_frame) == WAITING:
            self.look()
            write_dump(stacks=False)
            # The agent waits for no dump of this process any more.
            self._fields[page.DUMPED] = page.LAST_DUMP

    def _run(self) -> None:
        while self._fields[page.SAMPLER] == os.getpid() and self.sample():
            # 30 to 70 ms by chance, so that looks never have a script's rhythm.
            if self._over.wait(0.03 + time.monotonic_ns() % 1000 * 4e-5):
                return

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
        for field, nanoseconds in zip(page.USES, self._uses, strict=True):
            fields[field] = nanoseconds
        # The other thread sleeps for moments while this one has Python's lock; the kernel knows how long in all.
        fields[page.USES[0]] = page.NONE if on_gpu else min(self._uses[0], max(0, slept))
        fields[page.SAMPLED] = now - self._begin
        page.write_text(fields, place_of_stack(frame), page.PLACE)
        # On a GPU the main thread may stand anywhere while its kernels wait in a collective.
        fields[page.IN_COLLECTIVE] = 1 if use == WAITING else page.NONE if on_gpu else 0
        fields[page.IN_COLLECTIVE_TIME] = now
        self._note_collectives(None if frame is None else (frame.f_code, frame.f_lasti), now)
        return True

    def _note_collectives(self, instruction: tuple[CodeType, int] | None, now: int) -> None:
        self._still = self._still + 1 if instruction == self._instruction else 0
        self._instruction = instruction
        asked = self._fields[page.DUMP]
        if asked > self._fields[page.DUMPED]:
            self.look()
            write_dump()
            self._fields[page.DUMPED] = asked
        elif self._still == _LOOK_SAMPLES and now >= self._may_look_at:
            self.look()
        elif self._still < _LOOK_SAMPLES and now > self._looked_at + _VALID_NS:
            page.write_text(self._fields, "", page.COLLECTIVES, page.COLLECTIVES_FIELDS)
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
        page.write_text(self._fields, text, page.COLLECTIVES, page.COLLECTIVES_FIELDS)
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
            start(page.map_page(path))
        except (OSError, ValueError, page.PageError):
            # Only a script that attaches has to know.
            return


def start(fields: page.Fields) -> None:
    """Have the calling thread looked at from now on, for as long as the process lives.

    Does nothing in a process that does so already, where the environment has ``SLURM_ELASTIC_TIME_USE=off``, or the
    kernel does not tell the times.
    """
    if fields[page.SAMPLER] == os.getpid() or os.environ.get(SWITCH) == "off":
        return
    try:
        sampler = Sampler(fields, _thread.get_ident(), _thread.get_native_id())
    except (OSError, ValueError):
        return
    fields[page.SAMPLER] = os.getpid()
    atexit.register(sampler.at_exit)
    os.register_at_fork(before=sampler.end, after_in_parent=sampler.begin)
    sampler.begin()


# Dumps.
#
# torch's flight recorder has the last 2,000 collectives (FlightRecorder.hpp and ProcessGroupNCCL.hpp, torch 2.12 to
# 2.15), with TORCH_FR_BUFFER_SIZE=0 none. The functions that return them also work while the main thread blocks in a
# collective; that of NCCL exists in builds with CUDA. Both have a variant that returns a pickle, which is never read.
MOST_BYTES = 1 << 18
"""Size of the file with a dump of the flight recorder, at most: some 500 collectives."""
MOST_GROUPS = 4
"""Process groups of which the last collective is told: 512 bytes have room for them."""
_FUNCTIONS = {"flight_recorder.json": "_dump_fr_trace_json", "flight_recorder_nccl.json": "_dump_nccl_trace_json"}
"""Functions of torch._C._distributed_c10d (torch 2.12 to 2.15), by the file for what they return."""
_ENTRY = '{"collective_seq_id":'
"""The beginning of an entry: keys are sorted (nlohmann::json, torch 2.13)."""
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def dumps() -> dict[str, bytes]:
    """Return what the flight recorders hold, by the name of the file for it; nothing without a process group.

    Before the first process group, a script may still set the recorder's variables.
    """
    distributed = sys.modules.get("torch.distributed")
    c10d = sys.modules.get("torch._C._distributed_c10d")
    if distributed is None or c10d is None or not distributed.is_initialized():
        return {}
    cuda = sys.modules.get("torch.cuda")
    contents = {}
    for name, function in _FUNCTIONS.items():
        if "nccl" not in function or (cuda is not None and cuda.is_initialized()):
            dump: Callable[[bool, bool], bytes] | None = getattr(c10d, function, None)
            content = b"" if dump is None else dump(True, False)
            if _ENTRY.encode() in content:
                contents[name] = content
    return contents


def collectives(content: bytes) -> tuple[page.Collective, ...]:
    """Return the last collective of each process group in a dump, of at most four, that with the newest first.

    Args:
        content: A dump; one that cannot be read has none.
    """
    try:
        entries = json.loads(content)["entries"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ()
    last: dict[str, page.Collective] = {}
    for entry in entries if isinstance(entries, list) else ():
        match entry:
            case {
                "is_p2p": False,
                "process_group": [str(group), *_],
                "collective_seq_id": int(number),
                "profiling_name": str(name),
            }:
                last.pop(group, None)
                last[group] = group[:40], number, name.rpartition(":")[2][:40]
    return tuple(reversed(last.values()))[:MOST_GROUPS]


def shortened(content: bytes, most: int = MOST_BYTES) -> bytes:
    """Return a dump without its oldest entries, as JSON of the same shape with at most `most` bytes."""
    if len(content) <= most:
        return content
    try:
        dump = json.loads(content)
        entries = dump["entries"]
        kept = entries
        while kept and len(content) > most:
            kept = kept[len(kept) // 2 + 1 :]
            content = json.dumps({**dump, "entries": kept}, separators=(",", ":")).encode()
    except (ValueError, TypeError, KeyError, RecursionError):
        return b""
    return content if len(content) <= most else b""


def write_dump(*, stacks: bool = True) -> None:
    """Write the dump of this process, and the stacks of all threads, beside its logs; nothing if the disk is full."""
    # The directory of torch's error file, see `slurm_elastic.agent.workers.logs`.
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        return
    directory = os.path.dirname(error_file)  # noqa: PTH120 (pathlib takes milliseconds to import)
    try:
        if stacks:
            _write_stacks(f"{directory}/stacks.txt")
        for name, content in dumps().items():
            _write(f"{directory}/{name}", shortened(content))
    except Exception:
        # A full disk, or functions of torch that have changed. The training goes on.
        return


def _write_stacks(path: str) -> None:
    import faulthandler

    descriptor = os.open(path, _FLAGS | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, f"== Python, process {os.getpid()}\n".encode())
        # At most 100 threads, with 100 frames each (Python/traceback.c).
        faulthandler.dump_traceback(descriptor, all_threads=True)
    finally:
        os.close(descriptor)


def _write(path: str, content: bytes) -> None:
    # Under its name when it is complete: the process may be killed meanwhile.
    descriptor = os.open(f"{path}.new", _FLAGS | os.O_TRUNC, 0o600)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)
    os.replace(f"{path}.new", path)  # noqa: PTH105
