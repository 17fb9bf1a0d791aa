"""``slurm-elastic checkpoints``: reads the checkpoints of a directory, and says which are as they were written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slurm_elastic.cli._command import Command, Parser
from slurm_elastic.cli._terminal import table
from slurm_elastic.errors import ExitCode, UsageError
from slurm_elastic.text import printable


class Checkpoints(Command):
    """Compares all files of checkpoints with their digests."""

    name = "checkpoints"
    summary = "say which checkpoints of snapshot.to_disk are whole"
    examples = """\
  slurm-elastic checkpoints checkpoints      exit code 1 if one is damaged
"""

    def add_options(self, parser: Parser) -> None:
        parser.add_argument("directory", metavar="DIR", help="the directory that the script names in snapshot.to_disk")

    def run(self, arguments: Sequence[str]) -> int:
        # These import msgspec.
        from slurm_elastic.snapshot.disk.checkpoints import Checkpoints as Directory
        from slurm_elastic.snapshot.disk.stored import CheckpointError, Stored

        path = Path(self.parser().parse_args(arguments).directory)
        if not path.is_dir():
            raise UsageError(f"{path} is no directory; give the one that the script names in snapshot.to_disk")
        checkpoints, rows, damaged = Directory(path), [("CHECKPOINT", "STEP", "STATE")], False
        for checkpoint in sorted(checkpoints.present()):
            where = checkpoints.path_of(checkpoint)
            try:
                stored = Stored(where, load=False)
                stored.check()
                state = "whole" if stored.has_digests else "unknown: of an earlier release, without digests"
            except CheckpointError as error:
                state, damaged = printable(error), True
            rows.append((where.name, str(checkpoint.step), state))
        rows += [(name, "", "was found damaged, and set aside") for name in checkpoints.damaged()]
        if len(rows) == 1:
            raise UsageError(f"{path} has no checkpoints of snapshot.to_disk")
        print(*table(rows), sep="\n")
        return ExitCode.FAILED if damaged or checkpoints.damaged() else ExitCode.FINISHED
