"""Warm workers: torch is imported once per node; workers are forked from the process that did.

The fork server is a fresh interpreter, executed with the very command line of a worker (`python -u train.py ...`) and
stopped in the middle of Python's own start, while `site` runs (see `_boot`). There it imports torch and the preloads,
then waits. A worker is a fork that goes on from that point: the interpreter itself then builds `__main__`, sys.path[0]
and everything else from the script, handles its exceptions and finalizes. So there is no frame of ours under the
script, and nothing to imitate. A fork of the agent, however early, would carry the agent's modules, exit handlers and
flags; a process that ran the script through runpy would show its frames to inspect, faulthandler and profilers.

The command line imports torch once for both (see `joint`). Who cannot, or has no process of its own to give for it,
uses it so::

    from slurm_elastic.agent.forkserver import Program, ForkServer            # needs no torch

    program = Program.from_command_line(arguments)                       # or Program.script(...), FUNCTION, None
    warm = ForkServer.start(program, preload=["numpy"], local_world_size=8)
    ...                                                                  # import torch, rendezvous
    from slurm_elastic.agent.forkserver.torch_context import start_workers    # needs torch

    context = start_workers(name, entrypoint, args, envs, logs_specs, ..., warm=warm)
    select(context.exit_fds()); context.exits(); context.signal(SIGTERM); context.close(SIGTERM, 30)
    warm.close()

Cold workers (`--start cold`, or something that speaks against a fork) are executed by the same process, from the same
command and environment as torchrun's, so that what holds for the ends of workers holds for both:

- The worker leads its own session, and dies with the fork server (parent-death signal).
- The fork server sees the end of the agent, however it came, kills every descendant, and ends.
- When a round is closed, every descendant of its workers is killed, also one that left the process group.
- When the fork server itself is killed, the agent inherits what it leaves (PR_SET_CHILD_SUBREAPER), and kills what
  shares a session with a worker or was given a worker's environment. A descendant that took an own session and was
  executed with an environment that was emptied first is out of reach then, and only then.

What a script can notice: its parent is the fork server, which passes signals on to the agent;
hash randomization is that of the fork server (one seed for all workers and rounds, as with PYTHONHASHSEED);
modules that were imported there are in sys.modules from the start, see
docs/howto/learned-imports.md; seeds that a preload sets at import for `random` and numpy are replaced by seeds from the
system; what preloads and learned modules print at import is dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_elastic._lazy import lazy

if TYPE_CHECKING:
    from slurm_elastic.agent.forkserver._protocol import StartInterruptedError, State
    from slurm_elastic.agent.forkserver.client import ForkServer
    from slurm_elastic.agent.forkserver.worker_command import FUNCTION, Program
else:
    # The first steps of a start are on the way of every worker: no more than is asked for.
    __getattr__ = lazy(
        __name__,
        {
            "FUNCTION": "worker_command",
            "Program": "worker_command",
            "StartInterruptedError": "_protocol",
            "State": "_protocol",
            "ForkServer": "client",
        },
    )

__all__ = ["FUNCTION", "Program", "StartInterruptedError", "State", "ForkServer"]
