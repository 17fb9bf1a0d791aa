"""``slurm-elastic submit``: submits a script as an elastic run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_elastic.cli._command import Verb
from slurm_elastic.errors import UsageError

if TYPE_CHECKING:
    import argparse

    from slurm_elastic.submission.plan import Plan
    from slurm_elastic.submission.submit_options import CommandLine

__all__ = ["Submit"]

_EPILOG = """\
Options of sbatch, as --partition or --time, and of the agents, as --max-restarts, stand before the script in any
order. Single letters are sbatch's, but -m MODULE is the agents'.

  --nodes MIN:MAX    least and most nodes; also N, and as sbatch writes it, MIN-MAX
  --shape SHAPE      allocation: one job of all nodes (default); array: a job for each node, which come and go alone
  --template FILE    a batch script with your site's lines (default: what SLURM_ELASTIC_TEMPLATE names, else the
                     package's own; slurm-elastic template prints it)
  --dry-run          print the batch script and submit nothing
"""

_EXAMPLES = """\
  slurm-elastic submit --nodes 2:4 --gpus-per-node=4 train.py --lr 1e-3
  slurm-elastic submit --shape array --nodes 2:8 --partition=low --time=4:00:00 --max-restarts=3 train.py
  slurm-elastic submit --template elastic.sbatch --nodes 4 --dry-run -m package.train
"""

_DECIDED = {
    "nnodes": "--nodes says it",
    "standalone": "the nodes of a job find each other",
    "rdzv-backend": "slurm-elastic agent has one rendezvous",
    "node-rank": "Slurm says it",
    "master-addr": "Slurm says it",
    "master-port": "Slurm says it",
}


class Submit(Verb):
    """Makes a batch script from a template and gives it to sbatch."""

    name = "submit"
    summary = "submit a script; options of sbatch and of the agent before it"

    def run(self, arguments: Sequence[str]) -> int:
        """Check everything, submit, and say where the output goes."""
        from slurm_elastic.submission.plan import read_template
        from slurm_elastic.submission.submit_options import read_command_line

        # Before the import of torch that the agents' options take.
        if not arguments or arguments[0] in ("-h", "--help"):
            self._help()
            return 0
        agent = _agent_parser()
        options, switches = _options(agent)
        line = read_command_line(arguments, options, switches)
        if "help" in line.own:
            self._help()
            return 0
        _require_agent_options(agent, line)
        plan = _plan(line)
        script = plan.script(read_template(line.own.get("template"), plan.shape))
        if "dry-run" in line.own:
            sys.stdout.write(script.text())
            return 0
        from slurm_elastic.submission.sbatch import submit

        job_id = submit(script=script.text())
        print(job_id)
        print(f"output: {_output(dict(script.options), job_id)}", file=sys.stderr)
        return 0

    def _help(self) -> None:
        parser = self.parser(examples=_EXAMPLES)
        parser.usage = "slurm-elastic submit [options] train.py [arguments of train.py]"
        parser.epilog = f"{_EPILOG}\n{parser.epilog}"
        parser.print_help()


def _agent_parser() -> argparse.ArgumentParser:
    # Slow: this imports torch, for its parser.
    from slurm_elastic.cli.agent_parser import agent_parser

    return agent_parser()


def _options(parser: argparse.ArgumentParser) -> tuple[set[str], set[str]]:
    """The agents' options, spelled out, and those of them without a value."""
    options, switches = set(), {"-m"}
    for action in parser._actions:
        for name in action.option_strings:
            if name.startswith("--") and name != "--help":
                dashed = "--" + name[2:].replace("_", "-")
                options.add(dashed)
                if action.nargs == 0:
                    switches.add(dashed)
    return options, switches


def _require_agent_options(parser: argparse.ArgumentParser, line: CommandLine) -> None:
    """Let the agents' own parser look at their options."""
    if line.script is None:
        raise UsageError("no script; give one, as in slurm-elastic submit --nodes 2:4 train.py")
    options = parser.parse_args([*line.agent, line.script, *line.arguments])
    for name in line.agent:
        dashed = name.partition("=")[0].lstrip("-").replace("_", "-")
        if name.startswith("--") and dashed in _DECIDED:
            raise UsageError(f"{name} has no place here: {_DECIDED[dashed]}")
    from slurm_elastic.agent.script_check import require_entry_point

    if "chdir" not in line.sbatch:
        require_entry_point(options, os.uname().nodename)


def _plan(line: CommandLine) -> Plan:
    from slurm_elastic.submission.plan import NodeRange, Plan, Shape, environment_lines

    assert line.script is not None
    nodes = line.own.get("nodes")
    return Plan(
        shape=Shape.parse(line.own.get("shape") or "allocation"),
        nodes=None if nodes is None else NodeRange.parse(nodes),
        options=line.sbatch,
        # As with submitit's parameters: part of a node is asked for.
        without=("exclusive",) if "cpus-per-task" in line.sbatch and "exclusive" not in line.sbatch else (),
        agent=line.agent,
        entry=(line.script, *line.arguments),
        setup=environment_lines(),
    )


def _output(options: dict[str, str | None], job_id: str) -> Path:
    """Where the job's output goes, as far as it is known now (sbatch(1), "filename pattern")."""
    name = options.get("output") or "slurm-%j.out"
    for mark, text in (("%j", job_id), ("%A", job_id), ("%a", "*"), ("%x", options.get("job-name") or "%x")):
        name = name.replace(mark, text)
    return Path(options.get("chdir") or Path.cwd()) / name
