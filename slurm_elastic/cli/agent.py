"""``slurm-elastic agent``: one elastic agent on this node."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from slurm_elastic.cli._command import Verb, reported

if TYPE_CHECKING:
    from slurm_elastic.agent.forkserver import WarmProcess

__all__ = ["Agent", "go_on"]


class Agent(Verb):
    """Runs the agent of this node until the run, or its part in it, is over."""

    name = "agent"
    summary = "train with one elastic agent on this node; every option of torchrun works"

    def execute(self, arguments: Sequence[str]) -> None:
        """Import torch once for the agent and the process that starts workers, where that is possible."""
        from slurm_elastic.agent.forkserver.joint import can_be_joint, execute_jointly
        from slurm_elastic.agent.signals import RECORDED
        from slurm_elastic.rendezvous.secret_env import PRIVATE

        start = _WarmStart(arguments, {name: value for name, value in os.environ.items() if name not in PRIVATE})
        if start.warm and start.program is not None and can_be_joint(start.program):
            execute_jointly(
                start.program,
                start.preload,
                start.environment,
                workers=start.workers,
                go_on=f"{__name__}:{go_on.__name__}",
                arguments=arguments,
                signals=RECORDED,
            )

    def run(self, arguments: Sequence[str]) -> int:
        """Resolve the command line and Slurm's environment, and launch."""
        return _run(arguments, None)


def go_on(arguments: Sequence[str], warm: WarmProcess | None, mask: Sequence[int]) -> int:
    """Be the agent, after `Agent.execute` and the import of torch.

    Args:
        arguments: what follows the verb.
        warm: the process that starts workers; None to start one.
        mask: the signals that were blocked when this process was started.

    Returns:
        The exit code.
    """
    from slurm_elastic.agent.signals import record_signals

    record_signals()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return reported(lambda: _run(arguments, warm))


def _run(arguments: Sequence[str], warm: WarmProcess | None) -> int:
    from slurm_elastic.agent.signals import record_signals

    # First of all: until then a signal from Slurm has its default action and simply ends the process.
    record_signals()
    from slurm_elastic.agent.console_log import tell
    from slurm_elastic.agent.nonblocking_output import make_output_nonblocking

    make_output_nonblocking()
    tell(os.environ.get("SLURMD_NODENAME", "localhost"))
    from slurm_elastic.rendezvous.secret_env import take_private

    private = take_private(os.environ)
    # Its imports run while the agent does its own.
    warm = warm or _WarmStart(arguments, os.environ).process()
    try:
        with _quick_imports():
            # Slow: this imports torch.
            from slurm_elastic.agent.run import launch
            from slurm_elastic.agent.settings import resolve
            from slurm_elastic.agent.single_instance import claim
            from slurm_elastic.cli.agent_parser import agent_parser
        settings = resolve(agent_parser().parse_args(arguments), {**os.environ, **private})
        settings.run_dir.open()
        with claim(settings.run_dir.secret(), settings.node, settings.job):
            return int(launch(settings, warm))
    finally:
        warm.close()


class _WarmStart:
    """How the process that starts workers is to be started."""

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        from slurm_elastic.agent.forkserver.worker_command import Program, worker_environment
        from slurm_elastic.agent.option_table import scan

        found = scan(arguments, environ)
        self.program = Program.from_command_line(arguments)
        # Without a script there is only a help text or an error to come.
        self.warm = found.value("start") in (None, "warm") and found.script is not None
        self.preload = found.names("preload")
        self.workers = _local_world_size(found.value("nproc_per_node"), environ)
        self.environment = worker_environment(environ, self.workers)

    def process(self) -> WarmProcess:
        """Start it."""
        from slurm_elastic.agent.forkserver import WarmProcess

        return WarmProcess.start(self.program, warm=self.warm, preload=self.preload, environment=self.environment)


def _local_world_size(text: str | None, environ: Mapping[str, str]) -> int:
    if text is not None and text.isdecimal():
        return int(text)
    from slurm_elastic.slurm import SlurmJob

    job = SlurmJob.from_environment(environ)
    gpus = job.gpus_on_node if job else 0
    # What auto, cpu and gpu come to is known to torch; whether it is more than one is guessed well enough.
    return gpus or (1 if text is None else os.cpu_count() or 1)


_POOL = "OPENBLAS_NUM_THREADS"


@contextlib.contextmanager
def _quick_imports() -> Iterator[None]:
    """Around imports that the workers wait for.

    Garbage is not collected: what imports make stays, and looking through it again and again takes a tenth of their
    time. numpy's OpenBLAS starts no pool of threads, which spin for a while at first, on the cores on which the warm
    process imports torch; an agent has nothing for them to do.
    """
    gc.disable()
    given = _POOL in os.environ
    os.environ.setdefault(_POOL, "1")
    try:
        yield
    finally:
        if not given:
            del os.environ[_POOL]
        gc.freeze()
        gc.enable()
