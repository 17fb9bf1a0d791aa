"""``slurm-elastic requeue``: a whole run saves, gives its nodes back and waits for new ones."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_elastic.cli._command import Verb
from slurm_elastic.cli._leave_request import find_run, request_leave

__all__ = ["Requeue"]

_EXAMPLES = """\
  slurm-elastic requeue 1234
  slurm-elastic requeue my-run --run-dir /scratch/me
"""


class Requeue(Verb):
    """Asks the leader to make all agents leave; then each of their jobs is requeued."""

    name = "requeue"
    summary = "make a run save, give its nodes back and start again when Slurm has new ones"

    def run(self, arguments: Sequence[str]) -> int:
        """Say which nodes will be given back."""
        parser = self.parser(examples=_EXAMPLES)
        parser.add_argument("run_id", metavar="RUN", help="its id: of the job, of the array, or what --run-id says")
        parser.add_argument("--run-dir", metavar="DIR", help="as for the agent (default: the current directory)")
        options = parser.parse_args(arguments)
        answer = request_leave(find_run(options.run_id, options.run_dir), (), "requeued")
        print(f"asked to leave and come back: {', '.join(answer.nodes) or 'nobody, no agent is there'}")
        return 0
