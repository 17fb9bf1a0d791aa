"""The fork server: imports torch once per node, and forks the workers.

The fork server is a fresh interpreter, executed with the very command line of a worker (`python -u train.py ...`) and
stopped in the middle of Python's own start, while `site` runs (see `_boot`). There it imports torch and the preloads,
then waits. A worker is a fork that goes on from that point: the interpreter itself then builds `__main__`, sys.path[0]
and everything else from the script, handles its exceptions and finalizes. So the stack has no frame below the script's,
and nothing of Python's start is imitated.

`worker_command` says how the agent and the fork server share one import of torch; `client.ForkServer` is the agent's
side, and `worker_processes.WorkerProcesses` the workers of one round. The same process executes cold workers
(`--start cold`, or a fork is not possible), with the command and environment of torchrun's, so that all end alike:

- A worker leads its own session; the kernel kills it when the fork server ends (parent-death signal).
- When the agent ends, for whatever reason, the fork server kills all its descendants, and ends. It spares processes
  that it has forked for the agent itself (`ForkServer.fork_child`): they end when the agent closes their socket.
- When a round is closed, the fork server kills every descendant of its workers, whatever its process group.
- When the fork server itself is killed, the agent becomes the parent of its descendants (PR_SET_CHILD_SUBREAPER), and
  kills those that share a session with a worker or were given a worker's environment.

Differences that a script can notice: its parent is the fork server, which forwards signals to the agent;
`sys.stdout.seekable()` is the answer for the agent's output; the seed of Python's hashes is that of the fork server;
modules that were imported there are in sys.modules from the start, see docs/howto/learned-imports.md; seeds that a
preload sets at import are replaced; what preloads and learned modules print at import is dropped.
"""
