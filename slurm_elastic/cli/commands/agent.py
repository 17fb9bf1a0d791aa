"""``slurm-elastic agent``: runs one elastic agent on this node. Torch is imported when that is due, and not before."""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from slurm_elastic._version import __version__
from slurm_elastic.cli._command import Command, Parser, add_print_completion, with_one_line_errors
from slurm_elastic.descriptors import raise_limit, require
from slurm_elastic.errors import SlurmElasticError, UsageError

if TYPE_CHECKING:
    from slurm_elastic.agent.forkserver.client import ForkServer
    from slurm_elastic.agent.job.replacement import Submission
    from slurm_elastic.agent.node.node_check import NodeCheck
    from slurm_elastic.agent.settings import AgentSettings
    from slurm_elastic.rundir import RunDir


_FILLED_IN = (
    *("nnodes", "nproc_per_node", "rdzv_backend", "rdzv_id", "rdzv_endpoint"),
    *("node_rank", "master_addr", "master_port", "redirects", "tee"),
)
"""Options of torchrun that Slurm fills in where they are not given."""

_EPILOG = """\
Slurm's environment gives nodes, workers per node (one per GPU), run id and endpoint. Every option may also be given
as PET_<OPTION> in the environment, as with torchrun.

examples:
  srun slurm-elastic agent train.py --lr 1e-3
  slurm-elastic agent --nnodes 2:4 --max-restarts 3 train.py
  slurm-elastic agent --nproc-per-node 2 -m package.train
  slurm-elastic agent --interface ib0 --preload numpy,transformers train.py
"""


class Agent(Command):
    """Runs the agent of this node until the run is over or the agent leaves it."""

    name = "agent"
    summary = "train with one elastic agent on this node; every option of torchrun works"
    _obstacle: str | None = None

    def execute(self, arguments: Sequence[str]) -> None:
        """Import torch once for the agent and its fork server where possible; see `forkserver.worker_command`."""
        _prepare_process()
        from slurm_elastic.agent.forkserver.worker_command import execute_jointly, obstacle_to_sharing
        from slurm_elastic.agent.option_values import refuse_early
        from slurm_elastic.agent.signals import RECORDED
        from slurm_elastic.environment import PRIVATE

        start = _ForkServerStart(arguments, {name: value for name, value in os.environ.items() if name not in PRIVATE})
        if not start.warm or start.program is None:
            return
        self._obstacle = obstacle_to_sharing(start.program)
        if self._obstacle is None:
            refuse_early(start.options)
            execute_jointly(
                start.program,
                start.preload,
                start.environment,
                imports=start.imports,
                agent_main=f"{__name__}:{run_after_import.__name__}",
                arguments=arguments,
                signals=RECORDED,
            )

    def parser(self) -> Parser:
        return agent_parser()

    def run(self, arguments: Sequence[str]) -> int:
        _prepare_process()
        return _run(arguments, None, self._obstacle)


def agent_parser() -> Parser:
    """Return torchrun's parser with the options of `agent.option_table`; imports torch.

    In its result, options that Slurm fills in are None where they are not given. Its defaults come from the PET_*
    variables of this moment. A wrong command line raises UsageError.
    """
    from torch.distributed.argparse_util import check_env, env
    from torch.distributed.run import get_args_parser

    from slurm_elastic.agent.option_table import GROUPS

    try:
        torchrun = get_args_parser()
    except ValueError as error:
        # A switch such as PET_STANDALONE, which torch reads by int().
        raise UsageError(f"a PET_ variable of a switch is neither 0 nor 1: {error}") from None
    parser = Parser(
        prog="slurm-elastic agent",
        usage="slurm-elastic agent [options] train.py [arguments of train.py]",
        description="Train with one elastic agent on every node. Every option of torchrun works.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[torchrun],
        add_help=False,
        # An option of the same name that a release of torch adds does not stop the agent; --print-completion is one.
        conflict_handler="resolve",
    )
    # A default of torchrun cannot be distinguished from a given value; a PET_* variable is a given value.
    parser.set_defaults(**{name: os.environ.get(f"PET_{name.upper()}") for name in _FILLED_IN})
    for title, options in GROUPS.items():
        group = parser.add_argument_group(title)
        for option in options:
            settings: dict[str, Any] = {"dest": option.torchrun, "metavar": option.metavar, "choices": option.choices}
            # The action of a switch does not accept the others.
            settings = {name: value for name, value in settings.items() if value is not None}
            action = check_env if option.switch else env
            group.add_argument(*option.spellings, action=action, help=option.help, **settings)
    add_print_completion(group)
    # argparse has had to be given torchrun's first, so that those of the same name are ours.
    parser._optionals.title = "options of torchrun (by default Slurm tells nodes and workers, and --max-restarts is 0)"
    parser._action_groups.sort(key=lambda group: group is parser._optionals)
    return parser


def run_after_import(
    arguments: Sequence[str], fork_server: ForkServer | None, mask: Sequence[int], obstacle: str | None
) -> int:
    """Run the agent in a process that `Agent.execute` has made, after the import of torch.

    Args:
        fork_server: The fork server of the workers; None to start one.
        mask: The signals that were blocked when this process started.
        obstacle: Why `fork_server` is None, as from `obstacle_to_sharing`.
    """
    from slurm_elastic.agent.signals import record_signals

    record_signals()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return with_one_line_errors(lambda: _run(arguments, fork_server, obstacle))


def _run(arguments: Sequence[str], fork_server: ForkServer | None, obstacle: str | None) -> int:
    from slurm_elastic.agent.signals import record_signals

    # Before all imports: until then a signal of Slurm has its default action and ends the process.
    record_signals()
    from slurm_elastic.agent.console_log import LogFile, configure_logging
    from slurm_elastic.agent.option_table import scan
    from slurm_elastic.agent.workers.output import make_output_nonblocking

    make_output_nonblocking()
    scanned = scan(arguments, os.environ)
    configure_logging(os.environ.get("SLURMD_NODENAME", "localhost"), brief=scanned.value("console") != "full")
    log_file = LogFile()
    logging.getLogger("slurm_elastic").addHandler(log_file)
    if obstacle and os.environ.get("SLURM_NODEID", "0") == "0":
        logging.getLogger("slurm_elastic").info(
            "every node imports torch twice, for its agent and for its workers, and starts seconds later: %s", obstacle
        )
    from slurm_elastic.environment import take_private

    private = take_private(os.environ)
    # The fork server imports torch while the agent does its own imports.
    fork_server = fork_server or _ForkServerStart(arguments, os.environ).start()
    with contextlib.closing(fork_server):
        from slurm_elastic.agent.node.node_check import NodeCheck
        from slurm_elastic.agent.option_values import read_options, require_running_job

        # The check begins before torch's parser says what the command line means.
        values = read_options(lambda name: scanned.value(name) if name.startswith("node_check") else None)
        check = NodeCheck(values.node_check, values.node_check_timeout)
        # The fork server was started before, so its workers keep the original limit.
        raise_limit()
        with _fast_imports():
            # These import torch.
            from slurm_elastic.agent.workers.torch_hooks import require_torch

            require_torch()
            from slurm_elastic.agent.node.claims import claim
            from slurm_elastic.agent.run import join, launch
            from slurm_elastic.agent.settings import resolve
            from slurm_elastic.agent.snapshot_feature import SNAPSHOTS

            parser = agent_parser()
        options, environ = parser.parse_args(arguments), {**os.environ, **private}
        settings = resolve(options, environ)
        require_running_job(settings.job)
        # Any agent may become the leader, which has a descriptor for each agent.
        require(max(len(settings.expected_nodes), settings.launch_config.min_nodes))
        run_dir = join(settings, (options.training_script, *options.training_script_args))
        if run_dir.run_id != settings.run_id:
            settings = resolve(options, environ, run_dir.run_id)
        job = settings.job.job_id if settings.job is not None else "0"
        log_file.open(partial(settings.run_dir.append_agent_log, settings.node, job))
        with claim(settings.run_dir.secret(), settings.node, settings.job):
            _require_checked_node(check, settings)
            return int(launch(settings, fork_server, SNAPSHOTS, _summary, _submission))


def _summary(run_dir: RunDir) -> str:
    from slurm_elastic.observe.records import read_records
    from slurm_elastic.observe.report import summary

    return summary(read_records(run_dir), time.time())


def _submission() -> Submission:
    from slurm_elastic.submission.resize import ReplacementJobs

    return ReplacementJobs()


def _require_checked_node(check: NodeCheck, settings: AgentSettings) -> None:
    from slurm_elastic.agent.event_log import EventLog
    from slurm_elastic.agent.node.node_check import tell_site
    from slurm_elastic.agent.signals import record_signals
    from slurm_elastic.rendezvous.run_events import Entry

    problem = check.problem(record_signals())
    if not problem:
        return
    text = f"{settings.node} does not join the run, as it failed its check: {problem}"
    events = EventLog(settings.run_dir, settings.node)
    events.add(Entry("node_check_failed", text, {"nodes": [settings.node], "why": problem}), logging.DEBUG)
    events.close()
    tell_site(settings.values.on_bad_node, settings.node, settings.run_id, problem)
    raise SlurmElasticError(text)


BATCH_VERSION = "SLURM_ELASTIC_BATCH_VERSION"
"""The output of ``slurm-elastic --version`` in the batch script, if the agents may run in an image."""


def require_version(environ: MutableMapping[str, str]) -> None:
    """Raise UsageError in an image with another version than that of the batch script, whose job-end reads the run."""
    outside = environ.pop(BATCH_VERSION, "").removeprefix("slurm-elastic ")
    if outside not in ("", __version__):
        raise UsageError(
            f"the agents are of version {__version__}, and the batch script has slurm-elastic {outside}; install the "
            "same version in the image of the agents and outside"
        )


def _prepare_process() -> None:
    """Drop what is not for this agent, before torch is imported and before workers inherit it; check its limits."""
    require_version(os.environ)
    from slurm_elastic.slurm import Reader, drop_foreign

    drop_foreign(os.environ, Reader.TASK)
    require(1)


class _ForkServerStart:
    """The settings of the fork server, from a scan of the command line before torch is imported."""

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        from slurm_elastic.agent.forkserver.worker_command import Program, worker_environment
        from slurm_elastic.agent.option_table import scan

        self.options = options = scan(arguments, environ)
        self.program = Program.from_command_line(arguments)
        # Without a script the agent prints help or an error, and starts no workers.
        self.warm = options.value("start") in (None, "warm") and options.script is not None
        self.preload = options.names("preload")
        learns = options.value("learn_imports") != "off"
        self.imports = _import_lists(options.value("run_dir"), environ) if learns else None
        self.environment = worker_environment(environ, _local_world_size(options.value("nproc_per_node"), environ))

    def start(self) -> ForkServer:
        from slurm_elastic.agent.forkserver.client import ForkServer

        return ForkServer(
            self.program, warm=self.warm, preload=self.preload, environment=self.environment, imports=self.imports
        )


def _import_lists(run_dir: str | None, environ: Mapping[str, str]) -> str:
    base = run_dir or environ.get("SLURM_SUBMIT_DIR") or os.getcwd()  # noqa: PTH109  pathlib takes long to import
    return os.path.join(os.path.abspath(base), "elastic-runs", ".imports")  # noqa: PTH100, PTH118


def _local_world_size(text: str | None, environ: Mapping[str, str]) -> int:
    if text is not None and text.isdecimal():
        return int(text)
    from slurm_elastic.slurm import SlurmJob

    job = SlurmJob.from_environment(environ)
    gpus = job.gpus_on_node if job else 0
    # torch resolves auto, cpu and gpu; the fork server needs to know only whether there are several workers.
    return gpus or (1 if text is None else os.cpu_count() or 1)


_POOL = "OPENBLAS_NUM_THREADS"


@contextlib.contextmanager
def _fast_imports() -> Iterator[None]:
    """Speed up the agent's imports, which the workers wait for, during a with block.

    The garbage collector is off: modules stay, and searching them again and again takes a tenth of the time. numpy's
    OpenBLAS starts no thread pool: its threads would spin on the cores on which the fork server imports torch, and an
    agent computes nothing.
    """
    from slurm_elastic.environment import changed_environment

    gc.disable()
    try:
        with changed_environment({_POOL: os.environ.get(_POOL, "1")}):
            yield
    finally:
        gc.freeze()
        gc.enable()
