"""Imports torch, forks the fork server and becomes the agent, if both share one import (see `worker_command`)."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from slurm_elastic.agent.forkserver import _imports as imports
from slurm_elastic.agent.forkserver._processes import ForkedProcess
from slurm_elastic.agent.forkserver.client import ForkServer
from slurm_elastic.agent.forkserver.linux import flush_c_streams, read_memory_file, set_title
from slurm_elastic.agent.forkserver.protocol import Channel
from slurm_elastic.agent.forkserver.worker_command import Program

_AGENT_PACKAGES = frozenset({"slurm_elastic", "hostlist", "msgspec"})
"""Packages, besides the standard library, that are imported here for the agent alone."""


def import_and_fork(settings: dict[str, Any], modules_before: set[str]) -> dict[str, Any]:
    """Import torch, fork the fork server, and run the agent in this process, which ends with it.

    Args:
        modules_before: The modules that were imported before anything was for torch or the agent.

    Returns:
        The settings of the fork server, in the forked process.
    """
    before = dict(os.environ)
    obstacle, child = _import_required(settings, modules_before), None
    if obstacle is None:
        near_end, far_end = Channel.pair()
        pid = _fork(settings)
        if pid == 0:
            near_end.close()
            # As when it is executed on its own (subprocess, close_fds and start_new_session).
            for descriptor in settings["inherited"]:
                os.close(descriptor)
            os.setsid()
            return {**settings, "channel": far_end.detach(), "environment": before}
        far_end.close()
        child = near_end, ForkedProcess(pid, os.pidfd_open(pid))
    code = 1
    try:
        code = _run_agent(settings, before, child, obstacle)
    except SystemExit as end:
        # argparse ends a process so, with a number.
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        _exit(code)
    raise AssertionError


def _import_required(settings: dict[str, Any], modules_before: set[str]) -> str | None:
    """Import what the agent and the fork server need.

    Returns:
        None, or why the fork server cannot be forked from this process, for people: threads, say, or a file beside the
        script that hides one of these modules from workers. Empty if torch cannot be imported: the agent then fails
        with that error itself.
    """
    try:
        if obstacle := imports.import_required():
            return obstacle
        beside = [
            entry.name for directory in imports.script_directory(settings["options"]) for entry in os.scandir(directory)
        ]
    except (ImportError, OSError, imports.BrokenPreloadError):
        return ""
    imported = {name.partition(".")[0] for name in set(sys.modules) - modules_before} - _AGENT_PACKAGES
    # A name without a module's suffix may be the directory of a package.
    hidden = min((name for name in beside if (inspect.getmodulename(name) or name) in imported), default=None)
    return None if hidden is None else f"{hidden} beside the script has the name of a module that torch imports"


def _fork(settings: dict[str, Any]) -> int:
    """Return what os.fork returns."""
    gc.freeze()
    flush_c_streams()
    # The fork server never takes a signal, see ForkServer.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    settings["agent"] = os.getpid()
    pid = os.fork()
    if pid != 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def forget_agent(modules_before: set[str]) -> None:
    """Remove the agent's modules from the fork server: a script may have modules with the same names."""
    for name in [name for name in sys.modules.keys() - modules_before if name.partition(".")[0] in _AGENT_PACKAGES]:
        # The module is kept, not cleared: that would take as long as a fork.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(sys.modules.pop(name)))


def _run_agent(
    settings: dict[str, Any], before: dict[str, str], child: tuple[Channel, ForkedProcess] | None, obstacle: str | None
) -> int:
    """Restore environment, arguments and title that the agent was started with, run it, and return its exit code."""
    state = json.loads(read_memory_file(settings["joint"]))
    options = tuple(settings["options"])
    # This process was executed as a worker is.
    program = Program(sys.executable, options, tuple(sys.orig_argv[1 + len(options) :]))
    by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
    os.environ.clear()
    os.environ.update({**state["environment"], **by_imports})
    sys.path[:], sys.argv[:], sys.orig_argv[:] = state["path"], state["argv"], state["orig_argv"]
    set_title(" ".join(state["orig_argv"]))
    fork_server = None
    if child is not None:
        learned = settings["imports"]
        fork_server = ForkServer(program, preload=settings["preload"], environment=before, imports=learned, child=child)
    module, _colon, function = state["agent_main"].partition(":")
    agent_main: Callable[[list[str], ForkServer | None, list[int], str | None], int]
    agent_main = getattr(importlib.import_module(module), function)
    return agent_main(state["arguments"], fork_server, settings["signal_mask"], obstacle)


def _exit(code: int) -> None:
    """End as Py_FinalizeEx does (Python/pylifecycle.c, 3.11); if this returned, Python would run the script."""
    # All threads of the agent are daemons: none has to be waited for.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    flush_c_streams()
    os._exit(code)
