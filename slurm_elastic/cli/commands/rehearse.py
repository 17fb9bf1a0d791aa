"""``slurm-elastic rehearse``: runs a script on this machine through mishaps, and judges what it makes of them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_elastic.cli._command import Parser
from slurm_elastic.cli._run_view import ViewCommand, signals_as_ctrl_c
from slurm_elastic.cli._terminal import show_findings
from slurm_elastic.errors import UsageError
from slurm_elastic.text import counted

if TYPE_CHECKING:
    from slurm_elastic.rehearsal.runner import Options, Rehearsal


class Rehearse(ViewCommand):
    """Runs a script without and with mishaps, and shows what has to be fixed in it."""

    name = "rehearse"
    summary = "run a script on this machine through preemptions, losses and joins, and say what to fix in it"
    examples = """\
  slurm-elastic rehearse train.py --epochs 1                     a preemption, a node that joins, a node that is killed
  slurm-elastic rehearse --nodes 4 --mishaps kill,leader train.py
  slurm-elastic rehearse --scenario mishaps.txt train.py         with lines such as: at step 30 preempt node 2 with 20 s

exit codes: 0 nothing to fix, 1 findings, 2 the script cannot be rehearsed, or wrong usage
"""

    def add_options(self, parser: Parser) -> None:
        parser.usage = "slurm-elastic rehearse [options] train.py [arguments]"
        parser.add_argument("--nodes", metavar="N", default="3", help="nodes at the start (default: 3)")
        parser.add_argument("--scenario", metavar="FILE", help="file with mishaps, one a line; - for stdin")
        text = "one of each, over the training (default: preempt,join,kill)"
        parser.add_argument("--mishaps", metavar="KINDS", help=text)
        parser.add_argument("--nproc-per-node", metavar="N", help="workers of each node (default: 1)")
        text = "part by which losses may differ (default: 0.02)"
        parser.add_argument("--tolerance", metavar="PART", default="0.02", help=text)
        text = "end a run that takes no step so long (default: 300)"
        parser.add_argument("--timeout", metavar="SECONDS", default="300", help=text)
        text = "the script finds this file in its directory"
        parser.add_argument("--link", metavar="PATH", action="append", default=[], help=text)
        parser.add_argument("--keep", metavar="DIR", help="keep everything in this new directory")
        parser.add_argument("--report", metavar="FILE", help="also write a page with the findings and the run")
        parser.add_argument("--json", action="store_true", help="JSON, with the schema in docs/rehearse.md")
        parser.add_argument("script", metavar="train.py", help="the script, and its arguments")
        parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    def show(self, arguments: Sequence[str]) -> int:
        options = self.parser().parse_args(arguments)
        wishes = _options(options)
        if options.report:
            _require_directory(options.report)
        from slurm_elastic.rehearsal.runner import rehearse

        # No process of the rehearsal is left behind.
        with signals_as_ctrl_c():
            outcome = rehearse(wishes)
        if options.report:
            from slurm_elastic.cli.commands.report import write_file
            from slurm_elastic.observe.page import html_page

            write_file(options.report, html_page(outcome.report, outcome.findings))
        if options.json:
            print(json.dumps(_json(outcome), indent=1))
        else:
            _show(outcome)
        return 0 if outcome.ok else 1


def _options(parsed: argparse.Namespace) -> Options:
    from slurm_elastic.rehearsal.runner import Options
    from slurm_elastic.rehearsal.scenario import parse_kinds, parse_scenario

    if parsed.scenario and parsed.mishaps:
        raise UsageError("--scenario and --mishaps both say what happens; give one of them")
    kinds = parse_kinds(parsed.mishaps or "preempt,join,kill")
    mishaps = parse_scenario(_read(parsed.scenario)) if parsed.scenario else None
    workers = () if parsed.nproc_per_node is None else (f"--nproc-per-node={parsed.nproc_per_node}",)
    return Options(
        command=(parsed.script, *parsed.arguments),
        nodes=int(_number("--nodes", parsed.nodes, whole=True)),
        mishaps=mishaps,
        kinds=kinds,
        tolerance=_number("--tolerance", parsed.tolerance),
        agent_options=workers,
        links=tuple(Path(name) for name in parsed.link),
        keep=Path(parsed.keep) if parsed.keep else None,
        timeout=_number("--timeout", parsed.timeout),
        say=lambda line: print(f"slurm-elastic: {line}", file=sys.stderr, flush=True),
    )


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--scenario {name} cannot be read: {error}; name a text file") from None


def _number(option: str, text: str, *, whole: bool = False) -> float:
    try:
        value = float(int(text) if whole else text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise UsageError(f"{option} {text!r} is no number above 0; give one")
    return value


def _require_directory(name: str) -> None:
    """Refuse a page that could not be written, before minutes of rehearsal."""
    directory = Path(name).absolute().parent
    if not directory.is_dir() or not os.access(directory, os.W_OK) or Path(name).is_dir():
        raise UsageError(f"--report {name}: no file can be written there; name a file in a directory that exists")


def _json(rehearsal: Rehearsal) -> dict[str, object]:
    from slurm_elastic.agent.event_log import json_number
    from slurm_elastic.finding import findings_json

    return {
        "schema": 2,
        "ok": rehearsal.ok,
        "nodes": rehearsal.plan.nodes,
        "mishaps": [str(mishap) for mishap in rehearsal.plan.mishaps],
        "steps": rehearsal.undisturbed.last_step,
        "steps_lost": rehearsal.steps_lost,
        "checks": findings_json(rehearsal.findings),
        "losses": {str(step): json_number(loss) for step, loss in rehearsal.losses.items()},
    }


def _show(rehearsal: Rehearsal) -> None:
    show_findings(rehearsal.findings)
    wrong = sum(finding.level.value in ("limit", "broken") for finding in rehearsal.findings)
    found = f"{counted(wrong, 'finding')} in {rehearsal.undisturbed.last_step} steps"
    print("nothing to fix" if rehearsal.ok else found)
