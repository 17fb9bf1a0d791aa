"""Imports the agent's modules while torch's libraries are loaded, a sixth of its import, which needs no GIL.

The dynamic linker has a lock of its own: an extension module waits until the libraries are loaded, and so does every
import after it. So extension modules are imported before, and pure Python modules, most of the agent's, meanwhile.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import importlib
import importlib.util
import os
import sys

__all__ = [
    "AGENT_PACKAGES",
    "forget_agent",
    "import_extension_modules",
    "import_pure_modules",
    "load_libraries",
]

_LIBRARIES = (
    ("libtorch_global_deps.so", os.RTLD_GLOBAL | os.RTLD_NOW),
    ("libtorch_cpu.so", os.RTLD_LOCAL | os.RTLD_NOW),
)
"""In the order and with the flags of torch/__init__.py (_load_global_deps) and of Python's own imports, torch 2.13."""
_EXTENSION_MODULES = (
    *("_ctypes", "_json", "_ssl", "_hashlib", "_decimal", "_multiprocessing", "_posixshmem", "_queue", "_uuid", "_bz2"),
    *("_lzma", "_socket", "_struct", "_pickle", "_random", "_bisect", "_datetime", "_posixsubprocess", "mmap"),
    *("array", "binascii", "fcntl", "grp", "math", "resource", "select", "zlib", "asyncio", "msgspec"),
    *("_csv", "_blake2", "_sha2", "_sha512", "_contextvars", "_elementtree", "_heapq", "_opcode", "_statistics"),
    # Since Python 3.14.
    *("_hmac", "_zstd"),
)
"""Extension modules, and packages with some, that torch or the agent import. Debian builds most of those of Python into
the interpreter; pyenv, conda and python.org's sources build them as files of their own."""
_PURE_MODULES = (
    *("slurm_elastic.agent.forkserver._server", "slurm_elastic.agent.forkserver.client"),
    *(
        "slurm_elastic.rendezvous.thread",
        "slurm_elastic.rendezvous.run_events",
        "slurm_elastic.rendezvous.records.open",
    ),
    *("slurm_elastic.rendezvous.options", "slurm_elastic.rendezvous.connect"),
    *("slurm_elastic.cli.agent", "slurm_elastic.agent.single_instance", "slurm_elastic.agent.console_log"),
    *("slurm_elastic.agent.job_end_effects", "slurm_elastic.agent.scratch_dir"),
    *("slurm_elastic.agent.features", "slurm_elastic.agent.event_log", "slurm_elastic.agent.preemption"),
    "slurm_elastic.agent.progress_log",
    *("slurm_elastic.agent.health._connection", "slurm_elastic.agent.health._agent_pages"),
    *("slurm_elastic.agent.root_cause", "slurm_elastic.agent.log_tail"),
    *("torchgen.model", "unittest.mock", "importlib.metadata", "typing_extensions", "urllib.request"),
    "tarfile",
)
"""Modules that the agent and torch import, without extension modules and without imports of any."""
AGENT_PACKAGES = frozenset({"slurm_elastic", "hostlist", "msgspec"})
"""Packages, besides the standard library, that are imported here for the agent alone."""


def load_libraries() -> None:
    """Load torch's libraries, and import meanwhile what needs none of them.

    This thread loads the libraries, and another one imports: outside of a process's first thread a library gets its
    memory page by page from the kernel (malloc(3), arenas), which takes a tenth longer and delays the other thread.

    Errors are ignored: the later import raises them.
    """
    import_extension_modules()
    done = _thread.allocate_lock()

    def import_meanwhile() -> None:
        try:
            with contextlib.suppress(Exception):
                import_pure_modules()
        finally:
            done.release()

    done.acquire()
    _thread.start_new_thread(import_meanwhile, ())
    try:
        _load()
    finally:
        done.acquire()


def import_extension_modules() -> None:
    """Import the extension modules, which would wait for the libraries."""
    for name in _EXTENSION_MODULES:
        # Some builds of Python lack one.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def import_pure_modules() -> None:
    """Import modules that need neither the libraries nor extension modules."""
    for name in _PURE_MODULES:
        importlib.import_module(name)


def _load() -> None:
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations or os.environ.get("TORCH_USE_RTLD_GLOBAL"):
        return
    directory = os.path.join(found.submodule_search_locations[0], "lib")  # noqa: PTH118
    libc = ctypes.CDLL(None)
    libc.dlopen.argtypes, libc.dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for name, flags in _LIBRARIES:
        if not libc.dlopen(os.fsencode(os.path.join(directory, name)), flags):  # noqa: PTH118
            break


def forget_agent() -> None:
    """Remove the agent's modules and loggers from the fork server: a script may have modules with the same names."""
    for name in [name for name in sys.modules if name.partition(".")[0] in AGENT_PACKAGES]:
        # The module is kept, not cleared: that would take as long as a fork.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(sys.modules.pop(name)))
    loggers = sys.modules["logging"].root.manager.loggerDict
    for name in [name for name in loggers if name.partition(".")[0] in AGENT_PACKAGES]:
        del loggers[name]
