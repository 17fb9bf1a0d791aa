"""``slurm-elastic doctor``: checks a site before the first run."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from slurm_elastic.cli._command import Parser, with_sbatch_options
from slurm_elastic.cli._run_view import ViewCommand, signals_as_ctrl_c
from slurm_elastic.cli._terminal import show_findings
from slurm_elastic.errors import UsageError
from slurm_elastic.finding import Finding, exit_code, findings_json
from slurm_elastic.text import counted

if TYPE_CHECKING:
    from slurm_elastic.doctor.facts import SiteFacts


class Doctor(ViewCommand):
    """Gathers facts about Slurm, the run directory, and with ``--nodes`` about nodes and their network; judges them."""

    name = "doctor"
    summary = "check Slurm, the run directory, nodes and their network before the first run"
    examples = """\
  slurm-elastic doctor                                        Slurm and this machine, in seconds
  slurm-elastic doctor --nodes 2 --partition=gpu --gpus-per-node=4      two nodes, in a short job of its own
  slurm-elastic doctor --partition=low --checkpoint 41        is the grace enough for a checkpoint of 41 s?

exit codes: 0 runs work, 1 they work with limits, 2 they do not work, or wrong usage
"""

    def add_options(self, parser: Parser) -> None:
        parser.usage = "slurm-elastic doctor [options] [options of sbatch]"
        parser.add_argument("--nodes", metavar="N", help="check N nodes, too, in a short job of the doctor's own")
        parser.add_argument("--checkpoint", metavar="SECONDS", help="seconds that the script takes to save")
        parser.add_argument("--run-dir", metavar="DIR", help="as for the agent (default: the current directory)")
        text = "the batch script whose options and site block the job gets"
        parser.add_argument("--template", metavar="FILE", help=text)
        parser.add_argument("--interface", metavar="NAME", help="as for the agent")
        parser.add_argument("--node-pattern", metavar="PATTERN", help="as for the agent")
        parser.add_argument("--rdzv-endpoint", metavar="URL", help="etcd://HOST:PORT: check this etcd, too")
        parser.add_argument("--json", action="store_true", help="JSON, with the schema in docs/doctor.md")
        parser.add_argument("--all", action="store_true", help="also show the checks that are ok")
        text = "for the nodes of the doctor's job: write what is found for this run"
        parser.add_argument("--probe", metavar="RUN", help=text)

    def completion_parser(self) -> Parser:
        return with_sbatch_options(self.parser())

    def show(self, arguments: Sequence[str]) -> int:
        options, sbatch = self.parser().parse_with_sbatch(arguments)
        others = sorted(set(sbatch) - {"partition", "qos"})
        if others and options.nodes is None:
            raise UsageError(f"--{others[0]} is an option for the doctor's job; give --nodes N, too")
        if options.probe:
            _probe(options)
        from slurm_elastic.doctor.checks import findings
        from slurm_elastic.doctor.probe_job import gather_site

        # No job that waits in the queue is left behind.
        with signals_as_ctrl_c():
            site = gather_site(options, sbatch)
        results = findings(site)
        if options.json:
            print(json.dumps(_json(site, results), indent=1))
        else:
            _show(results, everything=options.all)
        return exit_code(results)


def _probe(options: argparse.Namespace) -> NoReturn:
    from slurm_elastic.doctor.probe import probe
    from slurm_elastic.slurm import AddressPreference

    probe(Path(options.run_dir), options.probe, AddressPreference(None, options.interface, options.node_pattern))
    sys.stdout.flush()
    # A thread may still be in a collective that never ends, and destructors would wait for it.
    os._exit(0)


def _json(site: SiteFacts, results: Sequence[Finding]) -> dict[str, object]:
    return {
        "schema": 2,
        "exit_code": exit_code(results),
        "job": site.job or None,
        "nodes": site.expected,
        # No finding has a place.
        "checks": [{name: value for name, value in row.items() if name != "place"} for row in findings_json(results)],
        "facts": asdict(site),
    }


def _show(results: Sequence[Finding], *, everything: bool = False) -> None:
    shown = [result for result in results if everything or result.level.value != "ok"]
    show_findings(shown)
    if len(shown) < len(results):
        print(f"{counted(len(results) - len(shown), 'check')} ok (--all)")
    levels = Counter(result.level.value for result in results)
    last = (
        "runs work here",
        f"runs work here, with {counted(levels['limit'], 'limit')}",
        f"runs do not work here: {counted(levels['broken'], 'check')} failed",
    )
    print(last[exit_code(results)])
