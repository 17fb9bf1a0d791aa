"""``slurm-elastic submit``: submits a script as an elastic run."""

from __future__ import annotations

import contextlib
import glob
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_elastic.cli._command import Command, Parser, with_sbatch_options
from slurm_elastic.errors import UsageError
from slurm_elastic.slurm import Controller, JobView
from slurm_elastic.submission.job_states import is_final

if TYPE_CHECKING:
    from slurm_elastic.submission.batch_script import BatchScript
    from slurm_elastic.submission.submit_options import CommandLine


_EPILOG = """\
Options of sbatch, such as --partition or --time, and options of the agents, such as --max-restarts, stand before the
script in any order. Single letters are options of sbatch, except -m MODULE, which is an option of the agents.
"""

_DECIDED = {
    "nnodes": "give --nodes, and --nnodes beside it only for a run that may get more nodes later",
    "standalone": "the nodes of a job find each other",
    "rdzv-backend": "slurm-elastic agent has one rendezvous",
    "node-rank": "Slurm gives it to the agents",
    "master-addr": "Slurm gives it to the agents",
    "master-port": "Slurm gives it to the agents",
}


class Submit(Command):
    """Makes a batch script from a template and passes it to sbatch."""

    name = "submit"
    summary = "submit a script; options of sbatch and of the agent before it"
    examples = """\
  slurm-elastic submit --nodes 2:4 --gpus-per-node=4 train.py --lr 1e-3
  slurm-elastic submit --shape array --nodes 2:8 --partition=low --time=4:00:00 --max-restarts=3 train.py
  slurm-elastic submit --template elastic.sbatch --nodes 4 --dry-run -m package.train
"""

    def add_options(self, parser: Parser) -> None:
        parser.usage = "slurm-elastic submit [options] train.py [arguments of train.py]"
        parser.epilog = f"{_EPILOG}\n{parser.epilog}"
        parser.add_argument(
            "--nodes",
            metavar="MIN:MAX",
            help="minimum and maximum of nodes; also N for both, and MIN-MAX as sbatch writes it",
        )
        parser.add_argument(
            "--shape",
            choices=("allocation", "array"),
            help="allocation: one job with all nodes (default); array: one job per node, which start and end alone",
        )
        parser.add_argument(
            "--template",
            metavar="FILE",
            help="a batch script with your site's lines (default: the file that SLURM_ELASTIC_TEMPLATE names, else the "
            "template of the package, which slurm-elastic template prints)",
        )
        parser.add_argument("--dry-run", action="store_true", help="print the batch script and submit nothing")
        parser.add_argument(
            "--follow",
            action="store_true",
            help="print the output of the job until it ends, and exit with its code; Ctrl-C leaves the job running",
        )

    def completion_parser(self) -> Parser:
        parser = self.parser()
        own_names = set(parser._option_string_actions)
        agent = _agent_parser()
        for action in agent._actions:
            names = own_names & set(action.option_strings)
            if not names and action.dest.replace("_", "-") not in _DECIDED:
                parser._add_action(action)
                own_names |= set(action.option_strings)
        return with_sbatch_options(parser)

    def run(self, arguments: Sequence[str]) -> int:
        from slurm_elastic.submission.submit_options import read_command_line

        # The parser of the agents' options imports torch; the help text does not need it.
        if not arguments or arguments[0] in ("-h", "--help"):
            self.parser().print_help()
            return 0
        if arguments[0].replace("_", "-").startswith("--print-completion"):
            self.parser().parse_args(arguments)
        agent = _agent_parser()
        options, switches = agent.long_options()
        line = read_command_line(arguments, options, {"-m", *switches})
        if "help" in line.own:
            self.parser().print_help()
            return 0
        _require_agent_options(agent, line)
        _warn_of_late_options(line)
        script = _script(line)
        if "dry-run" in line.own:
            sys.stdout.write(script.text())
            return 0
        if "follow" in line.own:
            return _follow(script)
        from slurm_elastic.submission.sbatch import submit

        job_id = submit(script=script.text())
        print(job_id)
        print(f"output: {_output(dict(script.options), job_id)}", file=sys.stderr)
        return 0


def _agent_parser() -> Parser:
    from slurm_elastic.agent.workers.torch_hooks import require_torch

    require_torch()
    # This imports torch, for its parser.
    from slurm_elastic.cli.commands.agent import agent_parser

    return agent_parser()


def _require_agent_options(parser: Parser, line: CommandLine) -> None:
    if line.script is None:
        raise UsageError("no script; give one, as in slurm-elastic submit --nodes 2:4 train.py")
    options = parser.parse_args([*line.agent, line.script, *line.arguments])
    for name in line.agent:
        dashed = name.partition("=")[0].lstrip("-").replace("_", "-")
        if name.startswith("--") and dashed in _DECIDED and not (dashed == "nnodes" and "nodes" in line.own):
            raise UsageError(f"{name} cannot be given here: {_DECIDED[dashed]}")
    from slurm_elastic.agent.option_values import require_entry_point

    if "chdir" not in line.sbatch:
        require_entry_point(options, os.uname().nodename)


def _warn_of_late_options(line: CommandLine) -> None:
    """Name words of the script that look like options of this command: with one of these it would do another thing."""
    from slurm_elastic.submission.submit_options import OWN

    late = [word for word in line.arguments if word.startswith("--") and word[2:].partition("=")[0] in OWN]
    if late:
        print(
            f"slurm-elastic: warning: {', '.join(late)} after {line.script} goes to the script; options of submit "
            "stand before it",
            file=sys.stderr,
        )


def _script(line: CommandLine) -> BatchScript:
    from slurm_elastic.submission.batch_script import BatchScript, NodeRange, Shape, environment_lines, read_template

    assert line.script is not None
    shape = Shape(line.own.get("shape") or "allocation")
    text = line.own.get("nodes")
    nodes = None if text is None else NodeRange.parse(text)
    # As with submitit's parameters: cpus-per-task asks for a part of a node.
    without = ("exclusive",) if "cpus-per-task" in line.sbatch and "exclusive" not in line.sbatch else ()
    template = BatchScript.from_template(read_template(line.own.get("template"), shape))
    return replace(
        template.with_options(line.sbatch, nodes, shape, without),
        arguments=(*((nodes.for_agents,) if nodes else ()), *line.agent, line.script, *line.arguments),
        setup=environment_lines(),
    )


def _follow(script: BatchScript) -> int:
    from slurm_elastic.cli._run_view import until_seen_enough
    from slurm_elastic.slurm import Controller
    from slurm_elastic.submission.sbatch import submit

    options = dict(script.options)
    streams = [name for name in ("output", "error") if name == "output" or options.get(name)]
    unknown = [str(path) for name in streams if "%" in (path := _output(options, "1", name)).name]
    if unknown:
        raise UsageError(f"--follow cannot tell the path of {unknown[0]}; of the patterns it knows %j, %A, %a and %x")
    output = Output([str(_output(options, "", name)) for name in streams])
    job_id = submit(script=script.text())
    output.patterns = [str(_output(options, job_id, name)) for name in streams]
    print(f"job {job_id}, output: {', '.join(output.patterns)}", file=sys.stderr, flush=True)
    return until_seen_enough(lambda: follow(job_id, output, Controller()))


def _output(options: dict[str, str | None], job_id: str, stream: str = "output") -> Path:
    """Return the path of the job's output, as far as it is known now (sbatch(1), "filename pattern")."""
    name = options.get(stream) or "slurm-%j.out"
    for mark, text in (("%j", job_id), ("%A", job_id), ("%a", "*"), ("%x", options.get("job-name") or "%x")):
        name = name.replace(mark, text)
    return Path(options.get("chdir") or Path.cwd()) / name


_PAUSE = 0.3
"""Seconds between two looks at the output."""
_ASK_SLURM = 2.0
"""Seconds between two questions to Slurm."""


class Output:
    """Copies what is new in files, whose paths may have ``*`` for any text, to stdout, in whole lines."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = patterns
        self._shown = {path: Path(path).stat().st_size for path in self._paths()}

    def show(self, *, last: bool = False) -> None:
        """Show what is new, with `last` also a line that has not ended."""
        for path in self._paths():
            begin, data = self._shown.get(path, 0), b""
            with contextlib.suppress(OSError), Path(path).open("rb") as file:
                # The job may begin its file anew.
                begin = begin if begin <= os.fstat(file.fileno()).st_size else 0
                file.seek(begin)
                data = file.read()
            if not last:
                data = data[: max(data.rfind(b"\n"), data.rfind(b"\r")) + 1]
            sys.stdout.buffer.write(data)
            self._shown[path] = begin + len(data)
        sys.stdout.buffer.flush()

    def _paths(self) -> list[str]:
        globs = (glob.escape(pattern).replace("[*]", "*") for pattern in self.patterns)
        return sorted({path for pattern in globs for path in glob.glob(pattern)})  # noqa: PTH207 (absolute)


def follow(job: str, output: Output, controller: Controller) -> int:
    """Print the output of a job or array until it has ended; return its exit code, 0 if one element has finished."""
    waits, asked, over = "", float("-inf"), False
    views: tuple[JobView, ...] = ()
    try:
        while not over:
            if time.monotonic() - asked >= _ASK_SLURM:
                answer, asked = controller.elements(job), time.monotonic()
                views = answer or views
                # Minutes after its end Slurm does not know a job any more.
                over = all(is_final(view.state) for view in answer) if answer else controller.is_queued(job) is False
                before, waits = waits, next((view.reason or "" for view in views if view.state == "PENDING"), "")
                if waits not in ("", before):
                    print(f"job {job} is pending ({waits})", file=sys.stderr, flush=True)
            output.show(last=over)
            time.sleep(0 if over else _PAUSE)
    except KeyboardInterrupt:
        print(f"job {job} goes on: slurm-elastic status {job}, scancel {job}", file=sys.stderr)
        raise
    if any(view.state == "COMPLETED" for view in views):
        return 0
    return max((view.exit_code for view in views), default=0) or 1
