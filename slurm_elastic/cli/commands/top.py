"""``slurm-elastic top``: a live view of a run."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import sys
import urllib.request
from collections.abc import Sequence
from typing import Any

from slurm_elastic import typed_json
from slurm_elastic.cli._command import Parser
from slurm_elastic.cli._run_view import Queue, ViewCommand, add_run, open_run
from slurm_elastic.errors import UsageError
from slurm_elastic.rundir import RunContents, RunDir
from slurm_elastic.text import printable

_TAIL = 32768
"""Bytes at the end of a log that are shown."""
_HTTP = 8.0
"""Seconds for the stacks of a node."""


class Top(ViewCommand):
    """Shows a run until the user has seen enough."""

    name = "top"
    summary = "watch a run: nodes, step times, events, logs; drain and requeue by a key"
    examples = """\
  slurm-elastic top 1234
  slurm-elastic top 1234 --interval 10
"""

    def add_options(self, parser: Parser) -> None:
        add_run(parser, or_newest=True)
        parser.add_argument(
            "--interval", metavar="SECONDS", type=float, default=2.0, help="between two updates, 1 to 3600 (default: 2)"
        )

    def show(self, arguments: Sequence[str]) -> int:
        options = self.parser().parse_args(arguments)
        if not 1 <= options.interval <= 3600:
            raise UsageError(f"--interval {options.interval:g}: give 1 to 3600 seconds")
        if importlib.util.find_spec("textual") is None:
            raise UsageError("top needs the package textual; pip install 'slurm_elastic[top]'")
        run_dir = open_run(options.run_dir, options.run_id, Queue())
        # textual writes to stderr.
        if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
            raise UsageError("top needs a terminal; for other programs there is slurm-elastic status --json")
        from slurm_elastic.cli._top_view import TopView

        TopView(run_dir, options.interval).run()
        return 0


def last_lines(run_dir: RunDir, round_number: int, rank: int) -> list[str]:
    """Return the last lines of what a worker has printed: of stderr first, then of stdout."""
    contents = RunContents(run_dir)
    lines: list[str] = []
    for log in contents.logs(round_number):
        if log.rank == rank:
            size, _time = contents.size_and_time(log.path)
            text = contents.read(log.path, max(0, size - _TAIL), _TAIL).decode(errors="replace").rstrip("\r\n")
            if text:
                lines += [f"--- {log.stream}", *(line.rpartition("\r")[2] for line in text.split("\n"))]
    return [printable(line.replace("\t", "        "), 4096) for line in lines]


def stacks(run_dir: RunDir, node: str) -> list[str]:
    """Return the stacks of a node's workers, from its health port; raises UsageError if that cannot be reached."""
    targets: list[str] = []
    for file in RunContents(run_dir).health():
        if file.stem.rpartition(".")[0] == node:
            with contextlib.suppress(typed_json.JSONError):
                groups = typed_json.decode(file.content, list[dict[str, Any]])
                targets += [target for group in groups for target in group.get("targets", ())]
    if not targets:
        raise UsageError(f"{node} has no health port; give its agent --health-port")
    if targets[-1].startswith(("127.", "[::1]", "localhost")) and node != socket.gethostname():
        # Another program may listen there on this machine, and would be shown the token.
        raise UsageError(
            f"the health port of {node} listens on its loopback alone; docs/howto/monitoring.md has the srun for it"
        )
    request = urllib.request.Request(f"http://{targets[-1]}/stacks")
    request.add_header("Authorization", f"Bearer {run_dir.health_token()}")
    try:
        # No proxy: it would be shown the token.
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=_HTTP) as answer:
            text = answer.read(1 << 22).decode(errors="replace")
    except (OSError, ValueError) as error:
        raise UsageError(f"the health port of {node} at {targets[-1]} cannot be reached from here: {error}") from None
    return [printable(line, 4096) for line in text.splitlines()]
