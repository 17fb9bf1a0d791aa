"""``slurm-elastic requeue``: makes a whole run save, give its nodes back and wait in the queue for new ones."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_elastic.cli._command import Command, Parser
from slurm_elastic.cli._leave_request import find_run, request_leave
from slurm_elastic.cli._run_view import add_run

_EXAMPLES = """\
  slurm-elastic requeue 1234
  slurm-elastic requeue my-run --run-dir /scratch/me
"""


class Requeue(Command):
    """Asks the leader to make all agents leave; then each of their jobs is requeued."""

    name = "requeue"
    summary = "make a run save, give its nodes back and start again when Slurm has new ones"
    examples = _EXAMPLES

    def add_options(self, parser: Parser) -> None:
        """See base class."""
        add_run(parser)

    def run(self, arguments: Sequence[str]) -> int:
        """Ask the leader, and print the nodes that the run will give back."""
        options = self.parser().parse_args(arguments)
        answer = request_leave(find_run(options), (), "requeued")
        if answer.nodes:
            print(f"asked to leave and come back: {', '.join(answer.nodes)}")
        else:
            print(f"no agent of run {options.run_id} is running; nothing to requeue")
        return 0
