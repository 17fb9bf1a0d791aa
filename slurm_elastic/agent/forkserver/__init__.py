"""The fork server: imports torch once per node, and forks the workers.

The fork server is a fresh interpreter, executed with the very command line of a worker (`python -u train.py ...`) and
stopped in the middle of Python's own start, while `site` runs (see `_boot`). There it imports torch and the preloads,
then waits. A worker is a fork that goes on from that point: the interpreter itself then builds `__main__`, sys.path[0]
and everything else from the script, handles its exceptions and finalizes. So the stack has no frame below the script's,
and nothing of Python's start is imitated. A fork of the agent, however early, would have the agent's modules, exit
handlers and flags; a process that ran the script through runpy would show its frames to inspect, faulthandler and
profilers.

The command line imports torch once for the agent and the fork server (see `worker_command`). A Python program that
starts an agent itself uses it so::

    from slurm_elastic.agent.forkserver.client import ForkServer              # needs no torch
    from slurm_elastic.agent.forkserver.worker_command import Program, worker_environment

    program = Program.from_command_line(arguments)                        # or Program.script(...), FUNCTION, None
    fork_server = ForkServer(program, preload=["numpy"], environment=worker_environment(os.environ, 8))
    ...                                                                   # import torch, rendezvous
    from slurm_elastic.agent.forkserver.worker_processes import WorkerProcesses    # needs torch

    workers = WorkerProcesses(spec, envs, fork_server=fork_server, logs_specs=logs_specs)    # torch's WorkerSpec
    select(workers.exit_fds()); workers.exits(); workers.signal(SIGTERM); workers.close(SIGTERM, 30)
    fork_server.close()

The same process executes cold workers (`--start cold`, or a fork is not possible), with the command and environment of
torchrun's, so that warm and cold workers end in the same way:

- A worker leads its own session; the kernel kills it when the fork server ends (parent-death signal).
- When the agent ends, for whatever reason, the fork server kills all its descendants, and ends. It spares processes
  that it has forked for the agent itself (`ForkServer.fork_child`): they end when the agent closes their socket.
- When a round is closed, the fork server kills every descendant of its workers, whatever its process group.
- When the fork server itself is killed, the agent becomes the parent of its descendants (PR_SET_CHILD_SUBREAPER), and
  kills those that share a session with a worker or were given a worker's environment. Only a descendant with a session
  of its own and an emptied environment survives then.

Differences that a script can notice: its parent is the fork server, which forwards signals to the agent;
`sys.stdout.seekable()` is the answer for the agent's output, also where that of workers goes to files; the seed of
Python's hashes is that of the fork server (one for all workers and rounds, as with PYTHONHASHSEED); modules that were
imported there are in sys.modules from the start, see docs/howto/learned-imports.md; seeds that a preload sets at import
for `random` and numpy are replaced by seeds from the system; what preloads and learned modules print at import is
dropped.
"""
