"""The pages of the site that are made from the code: commands, metrics, exit codes, Python API. A hook of mkdocs.

It also makes the search work on a site that is opened from the disk, and adds a style sheet.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_elastic import errors
from slurm_elastic._version import __version__
from slurm_elastic.agent.health.metrics import metrics_page
from slurm_elastic.agent.health.state import AgentState, Readings, RoundInfo, Stage, enter
from slurm_elastic.cli.main import commands
from slurm_elastic.control.agent_side import WorkerProgress
from slurm_elastic.observe.views import RunState
from slurm_elastic.rendezvous.membership.agents import Reason
from slurm_elastic.rendezvous.membership.assignment import Place
from slurm_elastic.rendezvous.transport.messages import Assignment

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

__all__ = ["on_config", "on_files", "on_page_markdown", "on_post_build", "pages"]

_ASSETS = {"file_search.js": "assets/javascripts/file_search.js", "site.css": "assets/stylesheets/site.css"}
"""Files beside this one, and their places in the site."""

_API = {
    "slurm_elastic.elastic_state": "State and loop of a training script: [how](../tutorial/elastic-script.md).",
    "slurm_elastic.trainer": "For training scripts: [how](../howto/trainer.md).",
    "slurm_elastic.data": "Samples and batches for a number of ranks that changes: [how](../howto/data.md).",
    "slurm_elastic.snapshot": "Training state in memory: [how](../snapshots.md).",
    "slurm_elastic.launcher": "An agent from a Python program.",
    "slurm_elastic.submission": "Submission with submitit: [how](../tutorial/submitit.md).",
}


def on_config(config: MkDocsConfig) -> None:
    """Say at the foot of each page which version it is of."""
    config.copyright = f"slurm_elastic {__version__}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages to the site."""
    from mkdocs.structure.files import File

    for name, content in pages().items():
        files.append(File.generated(config, f"generated/{name}.md", content=content))
    for name, place in _ASSETS.items():
        files.append(File.generated(config, place, content=Path(__file__).with_name(name).read_text()))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    r"""Return the page without the ``\|`` in backticks of tables: GitHub needs it, and Python-Markdown shows it."""
    rows = re.compile(r"^\|.*$", re.MULTILINE)
    return rows.sub(lambda row: re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), row[0]), markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Write the index of the search as a script, too: a browser reads no JSON from a file: URL."""
    directory = Path(config.site_dir, "search")
    index = (directory / "search_index.json").read_text()
    (directory / "search_index.js").write_text(f"var __index = {index}")


def pages() -> dict[str, str]:
    """Return the pages as Markdown, by their names."""
    return {
        "commands": "\n".join(_commands()),
        "metrics": "\n".join(_metrics()),
        "exit-codes": "\n".join(_exit_codes()),
        "python": "\n".join(_python()),
    }


def _commands() -> Iterable[str]:
    yield "# Commands and options\n"
    yield "Made from the parsers of the commands. `slurm-elastic COMMAND --help` prints the same.\n"
    for command in commands():
        parser = command.completion_parser()
        yield f"## slurm-elastic {command.name}\n"
        yield f"{command.summary[0].upper()}{command.summary[1:]}.\n"
        yield "| option | |\n|---|---|"
        for action in parser._actions:
            if action.help != argparse.SUPPRESS:
                yield f"| {_names(action)} | {_cell(_help(parser, action))} |"
        if command.examples:
            yield f"\n```\n{command.examples.rstrip()}\n```"
        yield ""


def _names(action: argparse.Action) -> str:
    value = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    if isinstance(value, tuple):
        value = " ".join(value)
    if not action.option_strings:
        return f"`{value}`"
    shown = [name for name in action.option_strings if "_" not in name] or list(action.option_strings)
    takes = "" if action.nargs == 0 else f" `{'|'.join(map(str, action.choices)) if action.choices else value}`"
    return ", ".join(f"`{name}`{takes}".replace("|", "\\|") for name in shown)


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = action.help or ""
    return text % {**vars(action), "prog": parser.prog} if "%(" in text else text.replace("%%", "%")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _metrics() -> Iterable[str]:
    yield "# Metrics\n"
    yield "On the page `/metrics` of a [health port](../reference.md#the-health-port); made from the code.\n"
    yield "| metric | type | labels | |\n|---|---|---|---|"
    place = Place("node/job.0/1", "node", 0, 0, 2, "default", 0, 2)
    assignment = Assignment(0, place, 0, Reason.START, 2, 2, "node", 1, 0, members="n[1-2]")
    info = RoundInfo(assignment, {0: 1})
    start = AgentState(
        "run", "node", "job", "node/job.0/1", 0.0, round_info=info, notices=("preempted",), changing_since=0.0
    )
    progress = WorkerProgress(0, True, 1, 1, None, 1.0, False, loss=1.0)
    readings = Readings(1.0, watchdog_age=0.0, progress=(progress,))
    text = metrics_page(enter(start, Stage.TRAINING, 1.0), readings).decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    for name, help_ in re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE):
        labels = re.search(rf"^{name}(?:_bucket|_total)?\{{(.*)\}} ", text, re.MULTILINE)
        names = ", ".join(re.findall(r"(\w+)=\"", labels[1])) if labels else ""
        yield f"| `{name}` | {kinds.get(name, '')} | {names} | {_cell(help_)} |"


def _exit_codes() -> Iterable[str]:
    yield "# Exit codes\n\nMade from the code; [Behaviour](../reference.md#exit-codes-of-an-agent) says more.\n"
    of_agent = {code.name.lower(): code.value for code in errors.ExitCode}
    of_status = {state.value: state.exit_code for state in sorted(RunState, key=lambda state: state.exit_code)}
    for title, codes in (("An agent", of_agent), ("slurm-elastic status", of_status)):
        yield f"## {title}\n\n| code | |\n|---|---|"
        yield from (f"| {code} | {name} |" for name, code in codes.items())
        yield ""


def _python() -> Iterable[str]:
    yield "# Python API\n"
    for module, text in _API.items():
        yield f"## {module}\n\n{text}\n\n::: {module}\n    options:\n      show_root_heading: false\n"
