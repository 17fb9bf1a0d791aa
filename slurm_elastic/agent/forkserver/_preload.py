"""Imports modules in the fork server, and checks whether it may still be forked after them."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from slurm_elastic.agent.node.devices import cuda_is_open

REQUIRED = ("torch", "torch.distributed", "torch.distributed.elastic.multiprocessing.errors")
"""Imported before the first worker starts."""
_THREADS_END = 0.3
"""Seconds for threads to end whose library ends them before a fork."""
_JEMALLOC = "jemalloc_bg_thd"
"""The name of a thread that jemalloc starts again in a forked process (background_thread_postfork_child in
src/background_thread.c, 5.3); Arrow has it built in, under pyarrow."""


class BrokenPreloadError(Exception):
    """A module cannot be imported. The message is one line with its name and the error."""

    def __init__(self, module: str, error: BaseException) -> None:
        self.module = module
        why = traceback.format_exception_only(type(error), error)[-1].strip()
        super().__init__(f"{module} cannot be imported: {why}")


def import_module(name: str) -> None:
    """Import one module.

    Raises:
        BrokenPreloadError: The import failed.
    """
    try:
        with uncollected():
            importlib.import_module(name)
    except BaseException as error:
        raise BrokenPreloadError(name, error) from error


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage meanwhile, and leave what was made out of later collections: imports keep nearly all of it."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collecting:
            gc.enable()


def import_required(about_to: Callable[[str], None]) -> tuple[str | None, int | None]:
    """Import the modules of `REQUIRED`.

    Args:
        about_to: Called with each name before its import.

    Returns:
        Why this process cannot be forked after them, for people (None if it can); and torch's first seed.

    Raises:
        BrokenPreloadError: An import failed.
    """
    seed = None
    for name in REQUIRED:
        about_to(name)
        import_module(name)
        if name == "torch":
            # A torch that is none, or broken, may lack it: the agent says so, in one line.
            seed = getattr(sys.modules[name], "initial_seed", lambda: None)()
    obstacle = obstacle_to_forking()
    return None if obstacle is None else f"after importing {REQUIRED[-1]} {obstacle.state}", seed


def script_directory(options: list[str]) -> list[str]:
    """Return the entries that Python will put in front of sys.path for this program (docs.python.org, sys.path).

    The fork server imports with them, too, so that it finds the same modules as a worker: a script's directory may hold
    modules to preload, or one that hides another.
    """
    if getattr(sys.flags, "safe_path", False):  # Python 3.11
        return []
    target = Path(options[-1])
    if "-c" in options or "-m" in options:
        return [str(Path.cwd())] if "-m" in options else []
    return [str(target.resolve() if target.is_dir() else target.resolve().parent)]


class Obstacle(NamedTuple):
    """A reason why a fork of a process would not work like a fresh interpreter, for people."""

    state: str
    """As a sentence about the process."""
    deed: str
    """The same after "importing it": as a sentence about the import that has led there."""


_BAD_FORK = "CUDA was used, and cannot be used after a fork"
BAD_FORK = Obstacle(_BAD_FORK, _BAD_FORK)


def obstacle_to_forking() -> Obstacle | None:
    """Return why a fork of this process would not work like a fresh interpreter; None if it would. Forks once."""
    pid = os.fork()
    if pid == 0:
        # torch marks a child in which CUDA cannot be used any more, also where CUDA was only asked for its devices
        # (torch/csrc/cuda/Module.cpp, poison_fork, 2.13).
        os._exit(1 if torch_says("_is_in_bad_fork") else 0)
    if os.waitpid(pid, 0)[1] != 0 or torch_says("_is_in_bad_fork"):
        return BAD_FORK
    if names := threads_after_fork():
        named = ", ".join(names)
        return Obstacle(f"threads are running: {len(names)} named {named}", f"starts a thread ({named})")
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return Obstacle("child processes are running", "starts a process")
    # It has used a device, or asked more than their number.
    if cuda_is_open() or torch_says("is_initialized"):
        return Obstacle("CUDA is initialized", "initializes CUDA")
    return None


def threads_after_fork() -> list[str]:
    """Return the names of the threads, beside the first, that a process forked a moment ago lacks.

    Libraries that handle forks end their threads at that moment and start them again where they are needed, as OpenBLAS
    does under numpy and scipy (openblas_fork_handler in driver/others/memory.c, 0.3.30).
    """
    end = time.monotonic() + _THREADS_END
    while (names := _threads()) and time.monotonic() < end:
        # The kernel lists a thread a little longer than it lives.
        time.sleep(0.001)
    return names


def _threads() -> list[str]:
    names = []
    for task in os.listdir("/proc/self/task"):  # noqa: PTH208
        if int(task) != os.getpid():
            with contextlib.suppress(OSError):
                names.append(Path(f"/proc/self/task/{task}/comm").read_text(errors="replace").strip())
    return sorted(name for name in names if name != _JEMALLOC)


def torch_says(question: str) -> bool:
    """Return the answer of a function of torch.cuda; False where that is not imported."""
    cuda = sys.modules.get("torch.cuda")
    return cuda is not None and bool(getattr(cuda, question)())
