"""Real agents on this machine, each told by its environment that it is alone on a node of a Slurm allocation.

The nodes are named by addresses of the loopback network, 127.0.0.1 and so on, so that their names resolve. Slurm itself
is not asked: PATH leads nowhere. Agents are forked from a process that has torch imported, which saves seconds for
each; `command` starts one by the command line instead.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import late
from tests.local.waiting import HANG, eventually
from tests.planted_faults import Action, action

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("worker.py")
WARM = "--start=warm"

_fork = multiprocessing.get_context("forkserver")
_fork.set_forkserver_preload(["slurm_elastic.agent.run", "slurm_elastic.cli.commands.agent", "torch.distributed.run"])


class Agent:
    """One agent. `err` is what it says on stderr, `out` what its workers show on stdout."""

    def __init__(self, node: str, pid: int, files: Path, wait: Callable[[float], int | None]) -> None:
        self.node, self.pid, self._files, self._wait = node, pid, files, wait

    @property
    def err(self) -> str:
        return self._files.with_suffix(".err").read_text()

    @property
    def out(self) -> str:
        return self._files.with_suffix(".out").read_text()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def running(self) -> bool:
        return self._wait(0) is None

    def wait(self) -> int:
        """Its exit code."""
        code = self._wait(HANG)
        if code is None:
            pytest.fail(f"the agent on {self.node} does not end:\n{self.err}")
        return code

    def expect(self, text: str) -> None:
        """Wait until it says this."""
        eventually(lambda: text in self.err, lambda: f"{text!r} on {self.node} in:\n{self.err}")


class Allocation:
    """An allocation of nodes, and the agents on them.

    Args:
        directory: where the job was submitted and its workers run; the run directory is made in it.
        size: number of nodes.
        job_id: of the job.
        restart_count: how often it was requeued.
        network: the first three numbers of the nodes' addresses, which are their names.
    """

    def __init__(
        self, directory: Path, size: int, *, job_id: str = "7", restart_count: int = 0, network: str = "127.0.0"
    ) -> None:
        self.directory, self.size, self.job_id, self.restart_count = directory, size, job_id, restart_count
        self.nodes = tuple(f"{network}.{number}" for number in range(1, size + 1))
        self._node_list = f"{network}.[1-{size}]"
        self.run_dir = directory / "elastic-runs" / job_id
        self.agents: list[Agent] = []
        # Agents that a test kills leave the pipes of their watchdogs behind.
        self._temporary = tempfile.mkdtemp(prefix="slurm-elastic-test-")
        self._mark = f"{os.getpid()}.{id(self)}"

    def environment(self, number: int) -> dict[str, str]:
        """What Slurm and the test give to the agent on a node, counted from 1."""
        inherited = ("HOME", "LANG", "PYTHONWARNINGS", "USER", "XDG_STATE_HOME")
        return {
            **{name: os.environ[name] for name in inherited if name in os.environ},
            "PATH": "/nonexistent",
            "TMPDIR": self._temporary,
            "PYTHONPATH": str(ROOT),
            **late.environment(str(ROOT)),
            "OMP_NUM_THREADS": "1",
            # Who is silent for long is lost; tests that are not about that hold on a machine that stands still, too.
            "PET_RDZV_CONF": "heartbeat_limit=20",
            # Tests look at every line.
            "PET_CONSOLE": "full",
            "SLURM_ELASTIC_TEST": self._mark,
            "SLURM_JOB_ID": self.job_id,
            "SLURM_JOB_NODELIST": self._node_list,
            "SLURM_JOB_NUM_NODES": str(self.size),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": self._node_list,
            "SLURM_NODEID": str(number - 1),
            "SLURMD_NODENAME": self.nodes[number - 1],
            "SLURM_SUBMIT_DIR": str(self.directory),
            **({"SLURM_RESTART_COUNT": str(self.restart_count)} if self.restart_count else {}),
        }

    def start(
        self,
        number: int,
        *arguments: str,
        script: Sequence[str] = (str(WORKER),),
        constants: Mapping[str, object] | None = None,
        **variables: str,
    ) -> Agent:
        """Start the agent on a node, counted from 1, with these options.

        `constants` are other values for it of what modules have under these names, ``package.module.NAME``. Workers
        start cold, as most of them are no training; :data:`WARM` is for those that import torch in several rounds.
        """
        argv = ["agent", "--start=cold", f"--local-addr={self.nodes[number - 1]}", *arguments, *script]
        files = self._files(number)
        environ = {**self.environment(number), **variables}
        process = _fork.Process(target=_run, args=(argv, environ, str(self.directory), str(files), constants or {}))
        process.start()

        def wait(timeout: float) -> int | None:
            process.join(timeout)
            return process.exitcode

        return self._add(Agent(self.nodes[number - 1], process.pid or 0, files, wait))

    def start_all(self, *arguments: str, **options: Any) -> list[Agent]:
        """Start one agent on each node."""
        return [self.start(number, *arguments, **options) for number in range(1, self.size + 1)]

    def start_led(self, *arguments: str, nodes: int | None = None, **options: Any) -> list[Agent]:
        """Start one agent on each node, or on as many, the others when the first one leads.

        The first one leads if it comes within the 10 s for which the others wait for it: for tests in which it matters
        who leads.
        """
        agents = [self.start(1, *arguments, **options)]
        eventually(self.is_led, self.log)
        return [*agents, *(self.start(number, *arguments, **options) for number in range(2, (nodes or self.size) + 1))]

    def is_led(self) -> bool:
        """Return whether an agent leads the run, or has led it."""
        return (self.run_dir / "endpoints" / f"{self.job_id}.{self.restart_count}.json").exists()

    def command(self, number: int, *command: str, **variables: str) -> Agent:
        """Start a whole command line on a node, as srun would."""
        files = self._files(number)
        with files.with_suffix(".out").open("w") as out, files.with_suffix(".err").open("w") as err:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=self.directory,
                env={**self.environment(number), **variables},
                start_new_session=True,
            )

        def wait(timeout: float) -> int | None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout)
            return process.returncode

        return self._add(Agent(self.nodes[number - 1], process.pid, files, wait))

    def touch(self, name: str, content: str = "") -> None:
        """Tell the workers something, see worker.py."""
        part = self.directory / f".{name}"
        part.write_text(content)
        part.rename(self.directory / name)

    def finish(self, *agents: Agent) -> None:
        """Tell the workers to end well, and see these agents end with 0."""
        self.touch("finish")
        assert [agent.wait() for agent in agents] == [0] * len(agents), self.log()

    def seen(self, round_: int) -> dict[int, dict[str, Any]]:
        """What the workers of a round saw, by rank; waits until all of them have started."""
        found: dict[int, dict[str, Any]] = eventually(
            lambda: self._seen(round_), lambda: f"round {round_}\n{self.log()}"
        )
        return found

    def nodes_of(self, round_: int) -> list[str]:
        """The nodes of a round, in the order of ranks."""
        seen = self.seen(round_)
        return [seen[rank]["env"]["SLURM_ELASTIC_NODE"] for rank in sorted(seen)]

    def nodes_of_round(self, round_: int) -> list[str]:
        """The nodes of a round on record, in the order of ranks."""
        record = json.loads((self.run_dir / "rounds" / f"{round_:06d}.json").read_text())
        return [place["node"] for place in record["places"]]

    def comes_to(self, nodes: Sequence[str], after: int) -> int:
        """Wait for a round on just these nodes whose workers have started, and return its number.

        There may be others between round `after` and it: in how many steps several nodes change is not promised.
        """

        def found() -> list[int]:
            rounds = range(after + 1, self.rounds())
            return [number for number in rounds if self.nodes_of_round(number) == list(nodes) and self._seen(number)]

        return int(eventually(found, lambda: f"no round of {nodes} after {after}\n{self.log()}")[0])

    def leader(self) -> str:
        """The node of whoever formed the newest round."""
        newest = max((self.run_dir / "rounds").glob("*.json"))
        return str(json.loads(newest.read_text())["leader"]).split("/")[0]

    def records(self) -> list[dict[str, Any]]:
        """The records of the rounds, in their order."""
        return [json.loads(path.read_text()) for path in sorted((self.run_dir / "rounds").glob("*.json"))]

    def action(self, of_round: int | None = None) -> Action:
        """What the run has done with the fault that the test has planted, in one round if it is given."""
        return action(self.records(), sorted(self.events(), key=lambda event: str(event["time"])), of_round)

    def rounds(self) -> int:
        """How many rounds there were."""
        return len(list((self.run_dir / "rounds").glob("*.json")))

    def events(self) -> list[dict[str, Any]]:
        """The events in the run directory, in the order of their times: each leader has a file of its own."""
        paths = sorted((self.run_dir / "events").glob("*.jsonl"))
        events = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
        return sorted(events, key=lambda event: event["time"])

    def formed(self, round_: int) -> None:
        """Wait until the events tell that a round has formed, and what led to it."""
        wanted = ("round_formed", round_)
        eventually(lambda: any((event["event"], event.get("round")) == wanted for event in self.events()), self.log)

    def log(self) -> str:
        """What all agents said so far."""
        return "\n".join(agent.err for agent in self.agents)

    def processes(self, containing: str = "") -> dict[int, str]:
        """Command lines of all processes that were started below an agent here, by process id."""
        found = {}
        agents = {agent.pid for agent in self.agents}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and int(entry.name) not in agents:
                    environ = (entry / "environ").read_bytes()
                    command = (entry / "cmdline").read_text(errors="replace").replace("\0", " ")
                    if f"SLURM_ELASTIC_TEST={self._mark}\0".encode() in environ and containing in command:
                        found[int(entry.name)] = command
        return found

    def close(self) -> None:
        """End everything that was started here."""
        for agent in self.agents:
            if agent.running():
                agent.signal(signal.SIGKILL)
                agent.wait()
        while processes := self.processes():
            for pid in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _seen(self, round_: int) -> dict[int, dict[str, Any]] | None:
        paths = (self.directory / "seen").glob(f"{round_}.*.json")
        records = [json.loads(path.read_text()) for path in paths]
        if not records or len(records) != int(records[0]["env"]["WORLD_SIZE"]):
            return None
        return {int(record["env"]["RANK"]): record for record in records}

    def _files(self, number: int) -> Path:
        directory = self.directory / "agents"
        directory.mkdir(exist_ok=True)
        files = directory / f"{self.job_id}-{self.restart_count}-{len(self.agents)}-node{number}"
        for suffix in (".out", ".err"):
            files.with_suffix(suffix).touch()
        return files

    def _add(self, agent: Agent) -> Agent:
        self.agents.append(agent)
        return agent


@contextlib.contextmanager
def allocation(directory: Path, size: int, **options: Any) -> Iterator[Allocation]:
    """An allocation that is cleaned up."""
    made = Allocation(directory, size, **options)
    try:
        yield made
    finally:
        made.close()


def agent_command(*arguments: str) -> list[str]:
    """The command line of an agent."""
    return [sys.executable, "-m", "slurm_elastic", "agent", "--start=cold", *arguments]


def _run(argv: list[str], environ: dict[str, str], directory: str, files: str, constants: Mapping[str, object]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(directory)
    for descriptor, suffix in ((1, ".out"), (2, ".err")):
        opened = os.open(files + suffix, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    for name, value in constants.items():
        module, _, constant = name.rpartition(".")
        setattr(importlib.import_module(module), constant, value)
    from slurm_elastic.agent.workers.output import NonblockingStream
    from slurm_elastic.cli import main

    code = main(argv)
    for stream in (sys.stdout, sys.stderr):
        # multiprocessing calls no exit functions.
        if isinstance(stream, NonblockingStream):
            stream.finish()
    sys.exit(code)
