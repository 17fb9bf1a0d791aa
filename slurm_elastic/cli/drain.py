"""``slurm-elastic drain``: makes nodes leave a run with notice."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_elastic.cli._command import Verb
from slurm_elastic.cli._leave_request import find_run, request_leave
from slurm_elastic.errors import UsageError
from slurm_elastic.slurm import expand

__all__ = ["Drain"]

_EXAMPLES = """\
  slurm-elastic drain 1234 node7
  slurm-elastic drain 1234 'node[7-9]' --run-dir /scratch/me
  slurm-elastic drain 1234 --all        the run stops with a checkpoint; its job ends and is not requeued
"""


class Drain(Verb):
    """Asks the leader to make agents leave; the others train on."""

    name = "drain"
    summary = "make nodes leave a run with notice, as before a maintenance"

    def run(self, arguments: Sequence[str]) -> int:
        """Say which nodes will leave."""
        parser = self.parser(examples=_EXAMPLES)
        parser.add_argument("run_id", metavar="RUN", help="its id: of the job, of the array, or what --run-id says")
        parser.add_argument("nodes", metavar="NODE", nargs="*", default=(), help="as Slurm names it; also node[1-3]")
        parser.add_argument("--all", action="store_true", help="every node")
        parser.add_argument("--run-dir", metavar="DIR", help="as for the agent (default: the current directory)")
        options = parser.parse_args(arguments)
        if options.all == bool(options.nodes):
            raise UsageError("name the nodes that have to leave, or say --all")
        nodes = tuple(dict.fromkeys(node for text in options.nodes for node in expand(text)))
        run = find_run(options.run_id, options.run_dir)
        answer = request_leave(run, nodes, "drained")
        if answer.unknown:
            plural = "are" if len(answer.unknown) > 1 else "is"
            raise UsageError(
                f"{', '.join(answer.unknown)} {plural} not in run {options.run_id}"
                + (f"; asked to leave: {', '.join(answer.nodes)}" if answer.nodes else "")
            )
        print(f"asked to leave: {', '.join(answer.nodes) or 'nobody, no agent is there'}")
        return 0
