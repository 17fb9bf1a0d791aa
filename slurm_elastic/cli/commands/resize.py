"""``slurm-elastic resize``, ``grow`` and ``shrink``: give a run another number of nodes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import ClassVar

from slurm_elastic.cli._command import Command, Parser
from slurm_elastic.cli._run_view import add_run, open_running
from slurm_elastic.errors import UsageError
from slurm_elastic.text import counted


def number(name: str, text: str) -> int:
    """Return a number of nodes; raises UsageError for a text that is none."""
    if not (text.isascii() and text.isdecimal() and len(text) < 7 and int(text)):
        raise UsageError(f"{name} {text!r} is no number of nodes; give one from 1 on")
    return int(text)


def resize_run(
    run: argparse.Namespace, options: dict[str, str | None], *, change: int | None = None, size: int = 0
) -> int:
    """Resize a run, and print what was asked for."""
    run_dir = open_running(run)
    from slurm_elastic.submission.resize import resize

    done = resize(run_dir, change=change, size=size, options=options)
    if done.cancel:
        print(f"cancelled before their start: {', '.join(done.cancel)}")
    for job, nodes in done.leave:
        print(f"asked to leave: {', '.join(nodes)} (job {job.partition('.')[0]})")
    if done.job:
        join = "it joins" if done.submit == 1 else "they join"
        print(f"submitted job {done.job} for {counted(done.submit, 'more node')}; {join} run {run_dir.run_id}")
    if not (done.job or done.cancel or done.leave):
        print(f"run {run_dir.run_id} has this size")
    return 0


class Resize(Command):
    """Does what ``grow`` or ``shrink`` would do."""

    name = "resize"
    summary = "grow or shrink a run to a number of nodes; further options are for sbatch"
    examples = """\
  slurm-elastic resize 1234 6
  slurm-elastic resize 1234 6 --partition=low
"""

    def add_options(self, parser: Parser) -> None:
        add_run(parser)
        parser.add_argument("size", metavar="N", help="nodes that the run is to have, with those that it waits for")

    def run(self, arguments: Sequence[str]) -> int:
        namespace, options = self.parser().parse_with_sbatch(arguments)
        return resize_run(namespace, options, size=number("N", namespace.size))


class Grow(Command):
    """Submits a job whose agents join the run, with the batch script, options and arguments of the first one."""

    name = "grow"
    summary = "submit a job whose nodes join a run that trains; further options are for sbatch"
    examples = """\
  slurm-elastic grow 1234 --nodes 2
  slurm-elastic grow 1234 --nodes 8 --partition=low --time=4:00:00
"""

    nodes_help: ClassVar[str] = "number of nodes to add"

    def add_options(self, parser: Parser) -> None:
        add_run(parser)
        parser.add_argument("--nodes", required=True, metavar="N", help=self.nodes_help)

    def run(self, arguments: Sequence[str]) -> int:
        namespace, options = self.parser().parse_with_sbatch(arguments)
        return resize_run(namespace, options, change=number("--nodes", namespace.nodes))


class Shrink(Grow):
    """Cancels jobs of ``grow`` that have not started, and makes nodes leave with notice, those of the newest job first.

    A job ends when all of its nodes have left; until then it keeps those that have.
    """

    name = "shrink"
    summary = "give nodes of a run back without losing a step, those of the newest job first"
    examples = """\
  slurm-elastic shrink 1234 --nodes 2
"""

    nodes_help = "number of nodes to give back"

    def run(self, arguments: Sequence[str]) -> int:
        namespace = self.parser().parse_args(arguments)
        return resize_run(namespace, {}, change=-number("--nodes", namespace.nodes))
