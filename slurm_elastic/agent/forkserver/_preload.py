"""Imports modules in the fork server, and checks whether it may still be forked after them."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from slurm_elastic.agent.forkserver._linux import children

REQUIRED = ("torch", "torch.distributed", "torch.distributed.elastic.multiprocessing.errors")
"""Imported before the first worker starts."""


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


def import_required(about_to: Callable[[str], None], *, tried: bool) -> tuple[str | None, int | None]:
    """Import the modules of `REQUIRED`.

    Args:
        about_to: Called with each name before its import.
        tried: True if this process was forked after these imports.

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
    obstacle = obstacle_to_forking(tried=tried)
    return None if obstacle is None else f"after importing {REQUIRED[-1]} {obstacle}", seed


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


def obstacle_to_forking(*, tried: bool = False) -> str | None:
    """Return why a fork of this process would not work like a fresh interpreter, for people; None if it would.

    Forks once to find out. Pools that handle forks end their threads at that moment (OpenBLAS does, under numpy) and
    start them again where they are needed; a worker would lack the threads that are left.

    Args:
        tried: True if this process was itself forked after all imports, and has no children yet.
    """
    trouble = _fork_trouble(_in_bad_fork()) if tried else _try_fork()
    if trouble is not None:
        return trouble
    threads = [task for task in os.listdir("/proc/self/task") if int(task) != os.getpid()]  # noqa: PTH208
    if threads:
        names = sorted({_read_text(f"/proc/self/task/{task}/comm") for task in threads})
        return f"threads are running: {len(threads)} named {', '.join(names)}"
    # Reads /proc/*/stat of all processes of the machine, which takes milliseconds on a large node.
    if not tried and children(os.getpid()):
        return "child processes are running"
    if torch_says("is_initialized"):
        return "CUDA is initialized"
    if any(target.startswith("/dev/nvidia") for target in _open_files()):
        return "a GPU device is open"
    return None


def _try_fork() -> str | None:
    pid = os.fork()
    if pid == 0:
        # torch marks a child in which CUDA cannot be used any more, also where CUDA was only asked for its devices
        # (torch/csrc/cuda/Module.cpp, poison_fork, 2.13).
        os._exit(_in_bad_fork())
    _pid, status = os.waitpid(pid, 0)
    return _fork_trouble(os.waitstatus_to_exitcode(status))


def _in_bad_fork() -> int:
    return 1 if torch_says("_is_in_bad_fork") else 0


def _fork_trouble(code: int) -> str | None:
    if code == 0:
        return None
    return "CUDA was used, and cannot be used after a fork" if code == 1 else f"a forked process ended with {code}"


def torch_says(question: str) -> bool:
    cuda = sys.modules.get("torch.cuda")
    return cuda is not None and bool(getattr(cuda, question)())


def _open_files() -> Iterator[str]:
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            yield os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
        except FileNotFoundError:
            continue


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except FileNotFoundError:
        return "?"
