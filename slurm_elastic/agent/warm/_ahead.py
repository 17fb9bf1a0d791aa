"""What can be done while torch's libraries are loaded, a sixth of its import, without the lock of the interpreter."""

from __future__ import annotations

import _thread
import ctypes
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["AGENT_PACKAGES", "forget_agent", "import_meanwhile", "load_libraries"]

_LIBRARIES = (
    ("libtorch_global_deps.so", os.RTLD_GLOBAL | os.RTLD_NOW),
    ("libtorch_cpu.so", os.RTLD_LOCAL | os.RTLD_NOW),
)
"""In the order and with the flags of torch/__init__.py (_load_global_deps) and of Python's own imports, torch 2.13."""
_BEFORE = (
    *("ssl", "hashlib", "asyncio", "decimal", "multiprocessing.connection", "pickle", "queue", "tempfile", "uuid"),
    "zipfile",
)
"""What torch imports of the standard library, with parts in C: those would wait for the dynamic linker meanwhile."""
_MEANWHILE = (
    *("slurm_elastic.rendezvous.membership", "slurm_elastic.slurm", "slurm_elastic.rendezvous.etcd"),
    *("slurm_elastic.rendezvous.participant", "slurm_elastic.rundir", "slurm_elastic.control"),
    *("torchgen.model", "unittest.mock", "importlib.metadata", "typing_extensions", "urllib.request", "tarfile"),
)
"""What the agent needs of ours, and torch besides itself, without parts in C or anything that has."""
AGENT_PACKAGES = frozenset({"slurm_elastic", "hostlist"})
"""What is imported here for the agent alone, besides the standard library."""


def load_libraries() -> Callable[[], None]:
    """Begin to load them in a thread; returns what waits for that.

    What cannot be loaded so is left to torch.
    """
    for name in _BEFORE:
        importlib.import_module(name)
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations or os.environ.get("TORCH_USE_RTLD_GLOBAL"):
        return lambda: None
    directory = Path(found.submodule_search_locations[0]) / "lib"
    libc = ctypes.CDLL(None)
    libc.dlopen.argtypes, libc.dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    done = _thread.allocate_lock()

    def load() -> None:
        try:
            for name, flags in _LIBRARIES:
                if not libc.dlopen(os.fsencode(directory / name), flags):
                    break
        finally:
            done.release()

    done.acquire()
    _thread.start_new_thread(load, ())

    def wait() -> None:
        done.acquire()

    return wait


def import_meanwhile() -> None:
    """Import what needs nothing of them."""
    for name in _MEANWHILE:
        importlib.import_module(name)


def forget_agent() -> None:
    """Leave no module in the warm process that neither Python nor torch brought: a script may have one of that name."""
    for name in [name for name in sys.modules if name.partition(".")[0] in AGENT_PACKAGES]:
        del sys.modules[name]
