"""``slurm-elastic doctor``: checks a site before the first run."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_elastic.cli._command import Parser
from slurm_elastic.cli._run_view import Terminal, ViewCommand
from slurm_elastic.errors import UsageError
from slurm_elastic.text import counted

if TYPE_CHECKING:
    from slurm_elastic.doctor.facts import SiteFacts
    from slurm_elastic.finding import Finding


_EXAMPLES = """\
  slurm-elastic doctor                                        Slurm and this machine, in seconds
  slurm-elastic doctor --nodes 2 --partition=gpu --gpus-per-node=4      two nodes, in a short job of its own
  slurm-elastic doctor --partition=low --checkpoint 41        is the grace enough for a checkpoint of 41 s?

exit codes: 0 runs work, 1 they work with limits, 2 they do not work, or wrong usage
"""

_SWITCHES = ("--json", "--all")


class Doctor(ViewCommand):
    """Gathers facts about Slurm, the run directory, and with ``--nodes`` about nodes and their network; judges them."""

    name = "doctor"
    summary = "check Slurm, the run directory, nodes and their network before the first run"
    examples = _EXAMPLES

    def add_options(self, parser: Parser) -> None:
        """See base class."""
        parser.usage = "slurm-elastic doctor [options] [options of sbatch]"
        parser.add_argument("--nodes", metavar="N", help="check N nodes, too, in a short job of the doctor's own")
        parser.add_argument("--checkpoint", metavar="SECONDS", help="seconds that the script takes to save")
        parser.add_argument("--run-dir", metavar="DIR", help="as for the agent (default: the current directory)")
        parser.add_argument(
            "--template", metavar="FILE", help="the batch script whose options and site block the job gets"
        )
        parser.add_argument("--interface", metavar="NAME", help="as for the agent")
        parser.add_argument("--node-pattern", metavar="PATTERN", help="as for the agent")
        parser.add_argument("--rdzv-endpoint", metavar="URL", help="etcd://HOST:PORT: check this etcd, too")
        parser.add_argument("--json", action="store_true", help="JSON, with the schema in docs/doctor.md")
        parser.add_argument("--all", action="store_true", help="also show the checks that are ok")
        parser.add_argument(
            "--probe", metavar="RUN", help="for the nodes of the doctor's job: write what is found for this run"
        )

    def completion_parser(self) -> argparse.ArgumentParser:
        """Add the options of sbatch."""
        from slurm_elastic.submission.submit_options import SBATCH_OPTIONS

        parser = self.parser()
        for name in SBATCH_OPTIONS:
            if f"--{name}" not in parser._option_string_actions:
                parser.add_argument(f"--{name}", help="option of sbatch")
        return parser

    def show(self, arguments: Sequence[str]) -> int:
        """Gather, judge and show; or, on a node of the doctor's job, gather for it."""
        options, sbatch = self._parse(arguments)
        if options.probe:
            self._probe(options)
        site = _gather(options, sbatch)
        from slurm_elastic.doctor.checks import findings
        from slurm_elastic.finding import exit_code

        results = findings(site)
        if options.json:
            print(json.dumps(_json(site, results), indent=1))
        else:
            _show(results, Terminal(), everything=options.all)
        return exit_code(results)

    def _parse(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str | None]]:
        """Separate the doctor's options from those of sbatch."""
        from slurm_elastic.submission.submit_options import read_command_line

        parser = self.parser()
        if any(word in ("-h", "--help") or word.startswith("--print") for word in arguments):
            parser.parse_args(arguments)
        own = {name for name in parser._option_string_actions if name.startswith("--")} - {"--nodes", "--template"}
        line = read_command_line(arguments, own, _SWITCHES)
        words = [f"--{name}" if value is None else f"--{name}={value}" for name, value in line.own.items()]
        script = () if line.script is None else (line.script,)
        options = parser.parse_args([*words, *line.agent, *script])
        others = sorted(set(line.sbatch) - {"partition", "qos"})
        if others and options.nodes is None:
            raise UsageError(f"--{others[0]} is an option for the doctor's job; give --nodes N, too")
        return options, line.sbatch

    def _probe(self, options: argparse.Namespace) -> None:
        from slurm_elastic.doctor.probe import probe
        from slurm_elastic.slurm import AddressPreference

        probe(Path(options.run_dir), options.probe, AddressPreference(None, options.interface, options.node_pattern))
        sys.stdout.flush()
        # A thread may still be in a collective that never ends, and destructors would wait for it.
        os._exit(0)


def _gather(options: argparse.Namespace, sbatch: dict[str, str | None]) -> SiteFacts:
    from slurm_elastic.agent.option_values import seconds_or_zero
    from slurm_elastic.doctor.facts import NodeFacts, SiteFacts
    from slurm_elastic.doctor.gather import (
        etcd_facts,
        last_stop,
        node_facts,
        require_possible,
        run_dir_facts,
        slurm_facts,
    )
    from slurm_elastic.doctor.probe_job import ProbeJob, node_count, removed_afterwards, template_options
    from slurm_elastic.rendezvous.records.api import etcd_wanted
    from slurm_elastic.rundir import RunDir
    from slurm_elastic.slurm import AddressPreference, Controller

    checkpoint = seconds_or_zero("--checkpoint", options.checkpoint) if options.checkpoint else None
    nodes = None if options.nodes is None else node_count(options.nodes)
    etcd = etcd_wanted(options.rdzv_endpoint, {}, os.environ)
    controller = Controller()
    slurm = slurm_facts(controller)
    sbatch_options = {**template_options(options.template), **sbatch}
    partition, qos = sbatch_options.get("partition") or "", sbatch_options.get("qos") or ""
    require_possible(slurm, partition, nodes)
    base = Path(options.run_dir or Path.cwd()).absolute()
    run_dir = RunDir.for_run(base, f"doctor-{secrets.token_hex(4)}")
    with removed_afterwards(run_dir):
        run_dir_found = run_dir_facts(run_dir)
        job = ProbeJob(run_dir, controller)
        results = None
        if nodes is not None and slurm.config is not None and not run_dir_found.error:
            job.submit(nodes, sbatch, _probe_arguments(options, base, run_dir.run_id), options.template)
            results = job.wait(lambda line: print(f"slurm-elastic: {line}", file=sys.stderr, flush=True))
        lines = job.last_lines()
    # This machine stands in for nodes that were not looked at; torch takes seconds.
    name = os.uname().nodename
    here = node_facts(name, AddressPreference(), controller) if results is None else NodeFacts(name)
    return SiteFacts(
        here=here,
        slurm=slurm,
        run_dir=run_dir_found,
        partition=job.partition or partition,
        qos=job.qos or qos,
        checkpoint=checkpoint,
        last_stop=last_stop(base) if checkpoint is None else None,
        expected=job.nodes,
        results=results or (),
        job=job.id,
        job_output=lines,
        etcd=etcd_facts(etcd) if etcd else None,
    )


def _probe_arguments(options: argparse.Namespace, base: Path, run_id: str) -> list[str]:
    probe_options = {"--interface": options.interface, "--node-pattern": options.node_pattern}
    passed = [f"{name}={value}" for name, value in probe_options.items() if value]
    return [f"--probe={run_id}", f"--run-dir={base}", *passed]


def _json(site: SiteFacts, results: Sequence[Finding]) -> dict[str, object]:
    from slurm_elastic.doctor.facts import encode
    from slurm_elastic.finding import exit_code, findings_json

    return {
        "schema": 2,
        "exit_code": exit_code(results),
        "job": site.job or None,
        "nodes": list(site.expected),
        "checks": findings_json(results),
        "facts": json.loads(encode(site)),
    }


def _show(results: Sequence[Finding], terminal: Terminal, *, everything: bool = False) -> None:
    from slurm_elastic.cli._run_view import show_findings
    from slurm_elastic.finding import exit_code

    shown = [result for result in results if everything or result.level.value != "ok"]
    if shown:
        show_findings(shown, terminal)
    if len(shown) < len(results):
        terminal.write(f"{counted(len(results) - len(shown), 'check')} ok (--all)")
    limits = sum(result.level.value == "limit" for result in results)
    broken = sum(result.level.value == "broken" for result in results)
    terminal.write(
        (
            "runs work here",
            f"runs work here, with {counted(limits, 'limit')}",
            f"runs do not work here: {counted(broken, 'check')} failed",
        )[exit_code(results)]
    )
