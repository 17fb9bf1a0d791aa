"""Work done while torch's libraries are loaded, a sixth of its import, without the lock of the interpreter.

The dynamic linker has a lock of its own: a module with parts in C waits for the libraries, and whatever comes after it.
So those are imported before, and only such as are in Python alone meanwhile: most of the agent's. What time is left is
for reading the modules that are imported next.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import os
import sys

from slurm_elastic.agent.forkserver._bytecode_prefetch import ReadAhead

__all__ = ["AGENT_PACKAGES", "READ_MEANWHILE", "forget_agent", "import_before", "import_meanwhile", "load_libraries"]

_LIBRARIES = (
    ("libtorch_global_deps.so", os.RTLD_GLOBAL | os.RTLD_NOW),
    ("libtorch_cpu.so", os.RTLD_LOCAL | os.RTLD_NOW),
)
"""In the order and with the flags of torch/__init__.py (_load_global_deps) and of Python's own imports, torch 2.13."""
_BEFORE = (
    *("_ctypes", "_json", "_ssl", "_hashlib", "_decimal", "_multiprocessing", "_posixshmem", "_queue", "_uuid", "_bz2"),
    *("_lzma", "_socket", "_struct", "_pickle", "_random", "_bisect", "_datetime", "_posixsubprocess", "mmap"),
    *("array", "binascii", "fcntl", "grp", "math", "resource", "select", "zlib", "asyncio", "msgspec"),
    *("_csv", "_blake2", "_sha2", "_sha512", "_contextvars", "_elementtree", "_heapq", "_opcode", "_statistics"),
    # Since Python 3.14.
    *("_hmac", "_zstd"),
)
"""With parts in C, where they are not built in, or of Python with such parts; torch or the agent import them. Debian
builds most of them into the interpreter; pyenv, conda and python.org's sources build them as files of their own."""
_MEANWHILE = (
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
"""What the agent needs of ours, and torch besides itself, without parts in C or anything that has."""
READ_MEANWHILE = (
    *("torch", "torch.nn.modules", "numpy._core", "numpy.lib", "torch._higher_order_ops", "torch.distributions"),
    *("torch.optim", "torch.fx", "torch.autograd", "torch.distributed", "torch._subclasses", "torch.jit", "torch.cuda"),
    *("torch.nn", "torch._refs", "torch._decomp", "torch.fx.passes", "torch.ao.quantization", "torch._library"),
    *("torch.nn.parallel", "torch.package", "torch.ao.nn.quantized.modules", "torch.xpu", "torch._prims"),
    *("numpy.linalg", "torch.masked", "torch.utils.data", "torch.linalg", "torch._prims_common"),
    *("torch.utils.data.datapipes.iter", "torch.testing", "torch._logging", "torch.utils._debug_mode", "numpy"),
    *("torch._native", "torch.compiler", "torch.ao.nn.quantized.dynamic.modules", "torch._custom_op"),
    "torch.ao.nn.quantized.reference.modules",
)
"""Packages that are imported with torch 2.13, nearly all of each; the largest first."""
AGENT_PACKAGES = frozenset({"slurm_elastic", "hostlist", "msgspec"})
"""What is imported here for the agent alone, besides the standard library."""


def load_libraries() -> ReadAhead:
    """Load torch's libraries, and do meanwhile what needs none of them.

    The libraries are loaded in this thread, and the imports are done in another: what a library allocates while it is
    loaded comes page by page from the kernel anywhere but in a process's first thread (malloc(3), arenas), which takes
    a tenth longer and keeps the other one from its memory, too.

    What fails is left to those who need it. Garbage is not collected from now on: what imports make stays.

    Returns:
        What was read of the modules that are imported next; to be closed then.
    """
    gc.disable()
    import_before()
    read_ahead = ReadAhead()
    loaded, done = _thread.allocate_lock(), _thread.allocate_lock()

    def work() -> None:
        try:
            with contextlib.suppress(Exception):
                import_meanwhile()
                read_ahead.read(READ_MEANWHILE, enough=lambda: not loaded.locked())
        finally:
            done.release()

    loaded.acquire()
    done.acquire()
    _thread.start_new_thread(work, ())
    try:
        _load()
    finally:
        loaded.release()
        done.acquire()
    return read_ahead


def import_before() -> None:
    """Import what would wait for the libraries."""
    for name in _BEFORE:
        # A Python may lack one.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def import_meanwhile() -> None:
    """Import what needs nothing of them."""
    for name in _MEANWHILE:
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
    """Leave nothing in the fork server that neither Python nor torch brought: a script may have modules so named."""
    for name in [name for name in sys.modules if name.partition(".")[0] in AGENT_PACKAGES]:
        # Not taken down: that would take as long as a fork.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(sys.modules.pop(name)))
    loggers = sys.modules["logging"].root.manager.loggerDict
    for name in [name for name in loggers if name.partition(".")[0] in AGENT_PACKAGES]:
        del loggers[name]
