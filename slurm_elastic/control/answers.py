"""Answers the agent from a thread of the worker: where the main thread is, and what its collectives are.

The fork server begins the thread in each worker that it forks, in others the trainer API does. It looks at the control
page 20 times a second, and at nothing else until the agent asks, as when a worker hangs or a collective has timed out.
Then it says on the page whether the main thread is in a collective, at which line of the script, and which collectives
it has begun last by torch's flight recorder, and writes both to files. Nothing in torch or in the script is replaced.
"""

from __future__ import annotations

import _thread
import atexit
import faulthandler
import functools
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence

from slurm_elastic.control import shared_page as page
from slurm_elastic.control.worker_side import SWITCH, VARIABLE, is_on_gpu

_POLL = 0.05
"""Seconds between two looks at the page."""
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "/slurm_elastic/")
"""Parts of the paths of files that are not the script's own."""
_FORK_TIMEOUT, _EXIT_TIMEOUT = 0.1, 1.0
"""Seconds that a fork and the end of the process wait for the thread, which may be writing a dump."""

PLACES: tuple[tuple[str, str, bool | None], ...] = (
    # The end of a file's path, or a directory in it; the name of a function, empty for all; whether it is a collective,
    # None for a function between a collective and its caller.
    # torch 2.12 to 2.15. tests/unit/control/test_answers.py looks for these places in the installed release.
    ("torch/autograd/graph.py", "_engine_run_backward", True),
    ("torch/nn/parallel/distributed.py", "", True),
    ("torch/distributed/elastic/", "", False),
    ("torch/distributed/", "", True),
    ("slurm_elastic/control/worker_side.py", "_wait", True),
    ("torch/_ops.py", "", None),
)


@functools.lru_cache(maxsize=1000)
def _is_collective(path: str, name: str) -> bool | None:
    """Return what the first of `PLACES` says that fits to a function, else False."""
    path = path.replace(os.sep, "/")
    for place, function, collective in PLACES:
        fits = f"/{place}" in path if place.endswith("/") else path.endswith(f"/{place}")
        if fits and function in ("", name):
            return collective
    return False


_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)", re.MULTILINE)
_FRAME = re.compile(r' +File "(.*)", line (\d+) in (.*)')
Stack = Sequence[tuple[str, str, str]]
"""File, number of the line, and name of each function, the innermost first."""


def stack_of(stacks: str, thread: int) -> Stack:
    """Return the stack of a thread, by Python's number of it, in a text of faulthandler; empty if it is not there."""
    _, *sections = _THREAD.split(stacks)
    for number, text in zip(sections[::2], sections[1::2], strict=True):
        if int(number, 16) == thread:
            return [(match[1], match[2], match[3]) for match in _FRAME.finditer(text)]
    return []


def is_in_collective(stack: Stack) -> bool:
    """Return True if the innermost function of a stack is a collective: all the training may run inside of one."""
    for path, _, name in stack:
        collective = _is_collective(path, name)
        if collective is not None:
            return collective
    return False


def place_of_stack(stack: Stack) -> str:
    """Return the innermost line of a stack that is the script's own, as ``train.py:12 in step``; empty if none is."""
    for path, line, name in stack:
        if not path.startswith("<") and not any(part in path for part in _LIBRARIES):
            return f"{os.path.basename(path)}:{line} in {name}"  # noqa: PTH119
    return ""


def _stacks() -> str:
    """Return the stacks of all threads as Python writes them, at most 100 frames of 100 threads (Python/traceback.c).

    Empty if the process has no descriptor left. The frames of a thread that runs are not read here: in Python 3.11.2
    `f_back` may then be no frame.
    """
    try:
        with open(os.memfd_create("stacks"), "w+", errors="replace") as file:  # noqa: PTH123 (a descriptor)
            faulthandler.dump_traceback(file.fileno(), all_threads=True)
            file.seek(0)
            return file.read()
    except OSError:
        return ""


class Answerer:
    """Answers for one thread of this process from another.

    The thread that answers ends before its process forks, and begins again in the parent after that: so a script that
    has no threads can fork as before. A child would inherit the locks that a thread holds at this moment, and Python
    warns of it (docs.python.org, os.fork, 3.12). It ends before Python does, too: Python would end it in the middle of
    a C++ function of torch, and then std::terminate ends the process by SIGABRT.

    Args:
        ident: Python's number of the thread.
    """

    def __init__(self, fields: page.Fields, ident: int) -> None:
        self._fields, self._ident = fields, ident
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start the thread, unless it runs, as when two threads fork at once."""
        if self._thread is None and self._fields[page.ANSWERER] == os.getpid():
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
        """Answer for a process that ends because a collective has failed, as by its time limit."""
        self.end(_EXIT_TIMEOUT)
        # Set by Python for an exception that ends the program (docs.python.org, sys.last_traceback).
        frames = [*traceback.walk_tb(getattr(sys, "last_traceback", None))]
        stack = [(frame.f_code.co_filename, str(line), frame.f_code.co_name) for frame, line in reversed(frames)]
        if self._fields[page.ANSWERER] == os.getpid() and is_in_collective(stack):
            # The agent waits for no answer of this process any more.
            self.answer(stack, page.LAST_ANSWER)

    def _run(self) -> None:
        fields = self._fields
        while fields[page.ANSWERER] == os.getpid():
            asked = fields[page.ASKED]
            if asked > fields[page.DUMPED]:
                stacks = _stacks()
                self.answer(stack_of(stacks, self._ident), asked, stacks)
            if self._over.wait(_POLL):
                return

    def answer(self, stack: Stack, number: int, stacks: str = "") -> None:
        """Write to the page where a stack is, and then the dumps.

        Args:
            stack: Empty if it is unknown.
            number: The number of the question.
            stacks: The stacks of all threads, for a dump; empty for none.
        """
        fields = self._fields
        page.write_text(fields, place_of_stack(stack), page.PLACE)
        # On a GPU the main thread may stand anywhere while its kernels wait in a collective.
        elsewhere = page.NONE if is_on_gpu() or not stack else 0
        fields[page.IN_COLLECTIVE] = 1 if is_in_collective(stack) else elsewhere
        page.write_text(fields, "", page.COLLECTIVES, page.COLLECTIVES_FIELDS)
        fields[page.ANSWERED] = number
        # This takes 0.1 s when the recorder is full.
        try:
            contents = dumps()
            last = [collective for content in contents.values() for collective in collectives(content)]
        except Exception:
            # torch's functions are private: an untested release may raise anything. The training goes on.
            contents, last = {}, []
        if last:
            text = json.dumps(last[:MOST_GROUPS], separators=(",", ":"))
            page.write_text(fields, text, page.COLLECTIVES, page.COLLECTIVES_FIELDS)
        write_dump(contents, stacks)
        fields[page.DUMPED] = number


def start_answering(environ: Mapping[str, str]) -> None:
    """Answer for the calling thread to the agent whose control page the environment names; without one, do nothing.

    The script can still attach to the page, or a program that it starts.
    """
    path = environ.get(VARIABLE)
    if path:
        try:
            start(page.map_page(path))
        except (OSError, ValueError):
            # Only a script that attaches has to know.
            return


def start(fields: page.Fields) -> None:
    """Answer for the calling thread from now on, for as long as the process lives.

    Does nothing in a process that does so already, and where the environment has ``SLURM_ELASTIC_TIME_USE=off``.
    """
    if fields[page.ANSWERER] == os.getpid() or os.environ.get(SWITCH) == "off":
        return
    answerer = Answerer(fields, _thread.get_ident())
    fields[page.ANSWERER] = os.getpid()
    atexit.register(answerer.at_exit)
    os.register_at_fork(before=answerer.end, after_in_parent=answerer.begin)
    answerer.begin()


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
_ENTRY = b'{"collective_seq_id":'
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
    contents = {}
    for name, function in _FUNCTIONS.items():
        if "nccl" not in function or is_on_gpu():
            dump: Callable[[bool, bool], bytes] | None = getattr(c10d, function, None)
            content = b"" if dump is None else dump(True, False)
            if _ENTRY in content:
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
    oldest = content.find(_ENTRY)
    first_kept = content.find(_ENTRY, len(content) - most + oldest)
    return content[:oldest] + content[first_kept:] if 0 <= oldest < first_kept else b""


def write_dump(contents: Mapping[str, bytes], stacks: str) -> None:
    """Write dumps and stacks beside the worker's logs, as far as the disk allows.

    Args:
        contents: Dumps by the names of their files.
    """
    # The directory of torch's error file, see `slurm_elastic.agent.workers.logs`.
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        return
    directory = os.path.dirname(error_file)  # noqa: PTH120 (pathlib takes milliseconds to import)
    try:
        if stacks:
            head = f"== Python, process {os.getpid()}\n"
            # The agent adds to it, too.
            descriptor = os.open(f"{directory}/stacks.txt", _FLAGS | os.O_APPEND, 0o600)
            with open(descriptor, "w", errors="replace") as file:  # noqa: PTH123 (a descriptor)
                file.write(head + stacks)
        for name, content in contents.items():
            # Under its name when it is complete: the process may be killed meanwhile.
            new = f"{directory}/{name}.new"
            with open(os.open(new, _FLAGS | os.O_TRUNC, 0o600), "wb") as dump:  # noqa: PTH123 (a descriptor)
                dump.write(shortened(content))
            os.replace(new, f"{directory}/{name}")  # noqa: PTH105
    except OSError:
        # A full disk. The training goes on.
        return
