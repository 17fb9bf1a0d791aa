"""The options of ``slurm-elastic agent``, in one table, and a scan of a command line without torch's parser.

torch's parser decides what a command line means. A wrong guess of the scan costs time and nothing else.

All workers wait for the imports of this module, so it defines no dataclasses: they import `inspect`, which takes as
long as everything else here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Option(NamedTuple):
    """An option of the agent that torchrun lacks."""

    usage: str
    """Its spelling with dashes, where underscores are accepted as well, and the name of its value in the help text. A
    switch has none, and neither has an option with `choices`."""
    help: str
    choices: tuple[str, ...] | None = None
    torchrun: str | None = None
    """Destination of the option of torchrun that this is another name of; None for one of its own."""

    @property
    def name(self) -> str:
        """Its spelling with dashes."""
        return self.usage.partition(" ")[0]

    @property
    def metavar(self) -> str | None:
        """Name of its value; None for a switch, or where `choices` stand there."""
        return self.usage.partition(" ")[2] or None

    @property
    def switch(self) -> bool:
        """True for an option without a value."""
        return self.metavar is None and self.choices is None

    @property
    def spellings(self) -> tuple[str, ...]:
        """The option as a command line may have it."""
        return tuple(dict.fromkeys((self.name, "--" + self.name[2:].replace("-", "_"))))


GROUPS = {
    "the run and its nodes": (
        Option(
            "--run-id RUN_ID",
            "same as --rdzv-id; jobs with the same run id and run directory are one run (default: one for each srun)",
            torchrun="rdzv_id",
        ),
        Option(
            "--run-dir DIR",
            "a directory that all nodes share; the run keeps its state and logs in DIR/elastic-runs/<run id> "
            "(default: the directory in which sbatch was called)",
        ),
        Option("--node-unit K", "rounds have a multiple of K nodes; the other nodes are spares (default: 1)"),
        Option(
            "--valid-nodes N,N,...",
            "rounds have one of these numbers of nodes, such as 2,4,8; the other nodes are spares (default: any "
            "number)",
        ),
        Option(
            "--segment K",
            "rounds have whole segments of K nodes of one failure domain, such as one NVLink domain; the other "
            "nodes are spares (default: 1)",
        ),
        Option(
            "--failure-domain DOMAIN",
            "what fails together, so that ranks of a domain are beside each other and copies of snapshots go to "
            "another one: element (of an array), switch, block, nvlink, none, or a command for the shell that "
            "prints a label (default: auto, the element and what Slurm's topology tells)",
        ),
        Option(
            "--leader-node NODE",
            "the agent on this node leads the run at first (default: the first node of the job; in an array the first "
            "element that starts)",
        ),
        Option(
            "--replace-lost SECONDS",
            "when the run has lacked nodes that it had for this long, submit a job like its first one for them; not "
            "for those that left by drain, shrink or scancel (default: never)",
        ),
        Option("--replace-limit N", "how many jobs --replace-lost submits in all (default: 10)"),
    ),
    "the network": (
        Option(
            "--interface NAME",
            "network interface by which other nodes reach this node, such as ib0 (default: from Slurm or the name "
            "service)",
        ),
        Option("--node-pattern PATTERN", "name of a node in the data network, such as {node}-ib (default: none)"),
    ),
    "workers": (
        Option(
            "--start",
            "warm: fork workers from a process that has imported torch; cold: start a fresh Python for each worker "
            "(default: warm)",
            choices=("warm", "cold"),
        ),
        Option(
            "--preload MODULES",
            "modules that a warm start imports besides torch, such as numpy,my.data (default: none)",
        ),
        Option(
            "--learn-imports",
            "on: fork the workers of later rounds and runs with what the script has imported; off: with torch and "
            "--preload alone (default: on)",
            choices=("on", "off"),
        ),
        Option(
            "--worker-signal NAME",
            "also send this signal, such as SIGUSR1, to the workers when a planned end of their round is "
            "announced; they then have --shutdown-timeout seconds to exit by themselves (default: none)",
        ),
        Option(
            "--shutdown-timeout SECONDS",
            "seconds from SIGTERM to SIGKILL for workers whose round ends as planned (default: 30)",
        ),
    ),
    "when the job has to end": (
        Option(
            "--warning SECONDS",
            "the time in sbatch --signal=USR2@SECONDS, and for the save before the limit (default: 120)",
        ),
        Option("--grace SECONDS", "seconds from SIGTERM to SIGKILL, if Slurm does not say (default: 30)"),
        Option(
            "--max-requeues N",
            "how often the job is requeued because of its time limit (default: 10); preemptions do not count",
        ),
    ),
    "failures, hangs and bad nodes": (
        Option(
            "--stop-on-same-failure",
            "on: end the run when a worker fails in the same way at the same step twice in a row, whatever "
            "restarts are left; off: restart all the same (default: on)",
            choices=("on", "off"),
        ),
        Option(
            "--hang-timeout SECONDS",
            "kill a worker that takes no step for this long, if its script uses slurm_elastic.trainer; auto: ten "
            "times the longest pause so far, at least 5 minutes (default: off)",
        ),
        Option("--first-step-timeout SECONDS", "the same for the time before its first step (default: 1800)"),
        Option(
            "--stacks-after SECONDS",
            "when some workers of a node have ended, seconds until the stacks of those that still run are written "
            "(default: 60)",
        ),
        Option("--no-watchdog", "do not watch for workers whose torch.distributed.elastic.timer expired"),
        Option(
            "--node-check COMMAND",
            "a command for the shell; a node on which it fails does not join the run. Before it the agent checks "
            "memory, directories for temporary files and GPUs; off: no check at all (default: these alone)",
        ),
        Option("--node-check-timeout SECONDS", "seconds after which --node-check has failed (default: 60)"),
        Option(
            "--on-bad-node COMMAND",
            "a command for the shell, run on a node that has failed its check, such as one that asks for its "
            "drain; its environment has SLURM_ELASTIC_NODE and SLURM_ELASTIC_BAD_NODE_REASON (default: none)",
        ),
        Option(
            "--max-excluded N",
            "how many nodes a requeued job excludes that were at fault several times (default: 2); 0 for none",
        ),
    ),
    "snapshots": (
        Option(
            "--snapshot-replicas",
            "copies on another node of what one rank alone has in slurm_elastic.snapshot, such as its shards, so "
            "that it outlives a lost node (default: 0)",
            choices=("0", "1"),
        ),
        Option(
            "--snapshot-slots",
            "snapshots that slurm_elastic.snapshot holds in the memory of this node; 2 need a third less, where "
            "each step has a collective of all ranks (default: 3)",
            choices=("2", "3"),
        ),
    ),
    "output": (
        Option(
            "--console",
            "brief: one line per fact on stderr, without the tracebacks of workers that fail because of another one; "
            "full: every line of agents and workers (default: brief). The run directory has all lines",
            choices=("brief", "full"),
        ),
        Option(
            "--notify COMMAND",
            "a command for /bin/sh, which gets JSON on stdin, or a URL, which gets it by POST, when the run has "
            "finished or failed, waits for nodes, or makes no progress (default: none)",
        ),
        Option("--notify-after SECONDS", "how long a wait is before --notify reports it (default: 600)"),
        Option("--health-bind ADDRESS", "address of the health port; 0.0.0.0 for all addresses (default: 127.0.0.1)"),
        Option(
            "--health-port PORT",
            "port that answers /healthz, /readyz, /status, /metrics and /stacks (default: a free one, see health/ "
            "in the run directory)",
        ),
        Option(
            "--health-token-file FILE",
            "file with the token that clients have to send, see the reference (default: health-token in the run "
            "directory)",
        ),
        Option("--no-health", "open no health port"),
    ),
}
"""The agent's options by the headings of the help text."""

OPTIONS = tuple(option for group in GROUPS.values() for option in group)

_TORCHRUN_SWITCHES = ("--standalone", "--module", "--no-python", "--run-path", "--virtual-local-rank", "--help")
"""Options of torchrun without a value (torch/distributed/run.py, get_args_parser, 2.13)."""
_OFTEN_GIVEN = {"nnodes", "nproc_per_node", "max_restarts", "module", "rdzv_conf", "rdzv_endpoint", "redirects", "tee"}
"""Destinations of options of torchrun."""
_LETTERS = {"-m": "--module", "-h": "--help", "-r": "--redirects", "-t": "--tee"}
"""torchrun's single letters. Those of options with a value may have it attached: -r3."""

_SWITCHES = (*_TORCHRUN_SWITCHES, *(option.name for option in OPTIONS if option.switch))
_OTHER_NAMES = {option.name: option.torchrun for option in OPTIONS if option.torchrun}


class Scan(NamedTuple):
    """A command line of the agent, as far as it can be understood without torch's parser."""

    values: Mapping[str, str]
    """Values that the command line gives, by the destinations of torchrun's parser; empty for a switch."""
    environ: Mapping[str, str]
    """The environment, where PET_<DESTINATION> gives values that the command line does not give."""
    script: str | None
    """The script, module or program; None if there is none, or with --help."""
    arguments: tuple[str, ...]
    """The script's arguments."""

    @property
    def is_understood(self) -> bool:
        """True if each option is one of the table, or one of torchrun's that are often given."""
        own = {option.torchrun or option.name[2:].replace("-", "_") for option in OPTIONS}
        return self.values.keys() <= own | _OFTEN_GIVEN

    def value(self, destination: str) -> str | None:
        """Return the value of an option; None if neither the command line nor the environment gives one."""
        return self.values.get(destination) or self.environ.get(f"PET_{destination.upper()}") or None

    def names(self, destination: str) -> tuple[str, ...]:
        """Return the elements of a value that is a list with commas."""
        return tuple(name for name in (self.value(destination) or "").split(",") if name)

    def has(self, switch: str) -> bool:
        """Return True if a switch is on."""
        return switch in self.values or self.environ.get(f"PET_{switch.upper()}", "0") not in ("0", "")


def scan(arguments: Sequence[str], environ: Mapping[str, str]) -> Scan:
    """Scan a command line of the agent. An option that the table lacks is taken to have a value."""
    values: dict[str, str] = {}
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        name, value = _split(word)
        if name == "--help":
            rest = []
        elif name not in _SWITCHES and value is None:
            value = rest.pop(0) if rest else ""
        values[_OTHER_NAMES.get(name) or name[2:].replace("-", "_")] = value or ""
    return Scan(values, environ, rest[0] if rest else None, tuple(rest[1:]))


def _split(word: str) -> tuple[str, str | None]:
    """Return the option's full name with dashes, and the value that is attached to it, None for none."""
    if not word.startswith("--"):
        name, value = _LETTERS.get(word[:2], word[:2]), word[2:].removeprefix("=")
        return name, value or None
    name, sign, value = word.replace("_", "-").partition("=")[0], *word.partition("=")[1:]
    if name not in _SWITCHES:
        # argparse accepts the beginning of an option where only one option begins so.
        meant = [switch for switch in _SWITCHES if switch.startswith(name)]
        name = meant[0] if len(meant) == 1 else name
    return name, value if sign else None
