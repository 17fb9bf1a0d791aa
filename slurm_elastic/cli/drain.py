"""``slurm-elastic drain``: makes nodes leave a run with notice."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_elastic.cli._command import Command, Parser
from slurm_elastic.cli._leave_request import find_run, request_leave
from slurm_elastic.cli._run_view import add_run
from slurm_elastic.errors import UsageError
from slurm_elastic.observe.records import read_records
from slurm_elastic.rundir import RunContents
from slurm_elastic.slurm import expand

_EXAMPLES = """\
  slurm-elastic drain 1234 node7
  slurm-elastic drain 1234 'node[7-9]' --run-dir /scratch/me
  slurm-elastic drain 1234 node7 --wait        returns when node7 has left
  slurm-elastic drain 1234 --all        the run stops with a checkpoint; its job ends and is not requeued
"""


class Drain(Command):
    """Asks the leader to make agents leave; the other agents go on training."""

    name = "drain"
    summary = "make nodes leave a run with notice, for instance before maintenance"
    examples = _EXAMPLES

    def add_options(self, parser: Parser) -> None:
        """See base class."""
        add_run(parser)
        parser.add_argument("nodes", metavar="NODE", nargs="*", default=(), help="Slurm's name; also node[1-3]")
        parser.add_argument("--all", action="store_true", help="every node of the run")
        parser.add_argument("--wait", action="store_true", help="return when the nodes have left, and say what it cost")
        parser.add_argument(
            "--timeout", metavar="SECONDS", type=float, help="with --wait, after this long say why they have not left"
        )

    def run(self, arguments: Sequence[str]) -> int:
        """Ask the leader, and print the nodes that will leave."""
        options = self.parser().parse_args(arguments)
        if options.all == bool(options.nodes):
            raise UsageError("name the nodes that have to leave, or give --all")
        nodes = tuple(dict.fromkeys(node for text in options.nodes for node in expand(text)))
        run_dir = find_run(options)
        before = read_records(RunContents(run_dir), run_dir.run_id)
        answer = request_leave(run_dir, nodes, "drained")
        if answer.unknown:
            plural = "are" if len(answer.unknown) > 1 else "is"
            raise UsageError(
                f"{', '.join(answer.unknown)} {plural} not in run {options.run_id}"
                + (f"; asked to leave: {', '.join(answer.nodes)}" if answer.nodes else "")
            )
        if answer.nodes:
            print(f"asked to leave: {', '.join(answer.nodes)}", flush=True)
            if options.wait:
                # It imports msgspec.
                from slurm_elastic.cli._departure import wait_until_left

                return wait_until_left(run_dir, answer.nodes, before, options.timeout)
        else:
            print(f"no agent of run {options.run_id} is running; nothing to drain")
        return 0
