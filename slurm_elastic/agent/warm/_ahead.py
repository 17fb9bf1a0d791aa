"""What can be done while torch's libraries are loaded, a sixth of its import, without the lock of the interpreter.

The dynamic linker has a lock of its own: a module with parts in C waits for the libraries, and whatever comes after it.
So those are imported before, and only such as are in Python alone meanwhile: most of the agent's.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable

__all__ = ["AGENT_PACKAGES", "forget_agent", "import_before", "import_meanwhile", "load_libraries"]

_LIBRARIES = (
    ("libtorch_global_deps.so", os.RTLD_GLOBAL | os.RTLD_NOW),
    ("libtorch_cpu.so", os.RTLD_LOCAL | os.RTLD_NOW),
)
"""In the order and with the flags of torch/__init__.py (_load_global_deps) and of Python's own imports, torch 2.13."""
_BEFORE = (
    *("_ctypes", "_json", "_ssl", "_hashlib", "_decimal", "_multiprocessing", "_posixshmem", "_queue", "_uuid", "_bz2"),
    *("_lzma", "_socket", "_struct", "_pickle", "_random", "_bisect", "_datetime", "_posixsubprocess", "mmap"),
    *("array", "binascii", "fcntl", "grp", "math", "resource", "select", "zlib", "asyncio", "msgspec"),
)
"""With parts in C, where they are not built in, or of Python with such parts; torch or the agent import them."""
_MEANWHILE = (
    *("slurm_elastic.agent.warm._zygote", "slurm_elastic.agent.warm.process"),
    *("slurm_elastic.rendezvous.coordination", "slurm_elastic.rendezvous.journal", "slurm_elastic.rendezvous.keeping"),
    *("slurm_elastic.rendezvous.options", "slurm_elastic.rendezvous.seat", "slurm_elastic.rendezvous.etcd"),
    *("slurm_elastic.cli.agent", "slurm_elastic.agent.claim", "slurm_elastic.agent.story"),
    *("slurm_elastic.agent.abandoned", "slurm_elastic.agent.agreement", "slurm_elastic.agent.asker"),
    *("slurm_elastic.agent.departure", "slurm_elastic.agent.events", "slurm_elastic.agent.inquiry"),
    *("slurm_elastic.agent.leader_node", "slurm_elastic.agent.location", "slurm_elastic.agent.outcome"),
    *("slurm_elastic.agent.health._connection", "slurm_elastic.agent.health._node"),
    *("slurm_elastic.agent.requeue", "slurm_elastic.agent.root_cause", "slurm_elastic.agent.warm._tail"),
    *("torchgen.model", "unittest.mock", "importlib.metadata", "typing_extensions", "urllib.request"),
    "tarfile",
)
"""What the agent needs of ours, and torch besides itself, without parts in C or anything that has."""
AGENT_PACKAGES = frozenset({"slurm_elastic", "hostlist", "msgspec"})
"""What is imported here for the agent alone, besides the standard library."""


def load_libraries() -> Callable[[], None]:
    """Begin to load them in a thread; returns what waits for its end, which has to come before a fork.

    What cannot be loaded so is left to torch.
    """
    import_before()
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations or os.environ.get("TORCH_USE_RTLD_GLOBAL"):
        return lambda: None
    directory = os.path.join(found.submodule_search_locations[0], "lib")  # noqa: PTH118
    libc = ctypes.CDLL(None)
    libc.dlopen.argtypes, libc.dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    done = _thread.allocate_lock()

    def load() -> None:
        try:
            for name, flags in _LIBRARIES:
                if not libc.dlopen(os.fsencode(os.path.join(directory, name)), flags):  # noqa: PTH118
                    break
        finally:
            done.release()

    done.acquire()
    _thread.start_new_thread(load, ())

    def wait() -> None:
        done.acquire()

    return wait


def import_before() -> None:
    """Import what would wait for them."""
    for name in _BEFORE:
        # A Python may lack one.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def import_meanwhile() -> None:
    """Import what needs nothing of them."""
    for name in _MEANWHILE:
        importlib.import_module(name)


def forget_agent() -> None:
    """Leave nothing in the warm process that neither Python nor torch brought: a script may have modules so named."""
    for name in [name for name in sys.modules if name.partition(".")[0] in AGENT_PACKAGES]:
        # Not taken down: that would take as long as a fork.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(sys.modules.pop(name)))
    loggers = sys.modules["logging"].root.manager.loggerDict
    for name in [name for name in loggers if name.partition(".")[0] in AGENT_PACKAGES]:
        del loggers[name]
