"""Turns a forked copy of the fork server into a process that works for the agent, with the agent's own modules."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
from collections.abc import Sequence

from slurm_elastic.agent.forkserver._linux import set_title

_PACKAGE_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))  # noqa: PTH100, PTH118, PTH120


def run_agent_child(module: str, descriptor: int, signal_mask: Sequence[int]) -> None:
    """Send the agent a handle of this process, call ``main(descriptor)`` of a module, and end this process.

    Args:
        module: Of this package; its main function begins with the signals that Slurm sends to jobs blocked.
        descriptor: The socket to the agent. Its first message is the process id, with a pidfd.
        signal_mask: The signals that are blocked in the agent besides.
    """
    code = 1
    try:
        os.setsid()
        handle = os.pidfd_open(os.getpid())
        agent = socket.socket(fileno=descriptor)
        socket.send_fds(agent, [str(os.getpid()).encode()], [handle])
        agent.detach()
        os.close(handle)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1):
            os.dup2(nothing, stream)
        os.close(nothing)
        blocked = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
        signal.pthread_sigmask(signal.SIG_SETMASK, {*signal_mask, *blocked})
        # The fork server has forgotten this package, and a script's directory may have modules of the same names.
        sys.path[:] = [_PACKAGE_ROOT, *filter(None, sys.path)]
        set_title(f"slurm-elastic {module.rpartition('.')[2]}", "SLURM_ELASTIC_WARM")
        importlib.import_module(module).main(descriptor)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        # Python would go on to run the script.
        os._exit(code)
