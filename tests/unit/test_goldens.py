"""Options, public names, exit codes, variables and the wire protocol's number, read from the product itself."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

import slurm_elastic
from slurm_elastic import snapshot, trainer
from slurm_elastic.cli import main
from slurm_elastic.errors import ExitCode
from slurm_elastic.rendezvous.options import RendezvousOptions
from tests.conftest import Cli
from tests.goldens import check, golden

PACKAGE = Path(slurm_elastic.__file__).parent
TEMPLATES = PACKAGE.parent / "sbatch_templates"


class _ParserMadeError(Exception):
    """Carries the parser of a command out of its `parse_args`."""


@pytest.fixture(autouse=True)
def _no_defaults_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("PET_", "SLURM", "TORCHELASTIC"))]:
        monkeypatch.delenv(name)


def commands(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The commands that `slurm-elastic --help` lists, and those of the golden file, which may be older names."""
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    start = next(number for number, line in enumerate(lines) if line in ("verbs:", "commands:"))
    listed = [line.split()[0] for line in lines[start + 1 : lines.index("", start)]]
    return sorted({*listed, *golden("options")})


def parser_of(command: str, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """The parser that a command makes, taken at the moment in which the command parses its arguments with it."""

    def stop(parser: argparse.ArgumentParser, *_: object) -> None:
        raise _ParserMadeError(parser)

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises(_ParserMadeError) as caught:
            main([command, "--nodes=1", "train.py"])
    parser = caught.value.args[0]
    assert isinstance(parser, argparse.ArgumentParser)
    return parser


def described(action: argparse.Action) -> dict[str, Any]:
    """An option or a positional argument, as far as a command line can tell."""
    return {
        "names": sorted(action.option_strings),
        "takes": action.nargs if action.nargs is None else str(action.nargs),
        "default": None if action.default is None else str(action.default),
        "choices": None if action.choices is None else [str(choice) for choice in action.choices],
        "required": action.required,
        "type": getattr(action.type, "__name__", None),
    }


def test_options(capsys: pytest.CaptureFixture[str], cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    for name in commands(capsys):
        if name == "agent":
            # `submit` checks the agents' options with the parser of the agent itself.
            found[name] = agent_options(parser_of("submit", monkeypatch))
        elif name == "submit":
            found[name] = sorted(set(re.findall(r"^  (--[a-z-]+)", cli(0, "submit --help").out, flags=re.MULTILINE)))
        else:
            found[name] = {each.dest: described(each) for each in parser_of(name, monkeypatch)._actions}
    check("options", found)


def agent_options(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The agent's options beside those of torchrun, which are those of torch's release."""
    # torch 2.14 has --print-completion, too, for torchrun.
    torchrun = {action.dest: action for action in get_args_parser()._actions if action.dest != "print_completion"}
    own = [action for action in parser._actions if set(action.option_strings) - _names(torchrun.get(action.dest))]
    # torch 2.11 lacks --shutdown-timeout, and has a default for --master-port.
    own = [action for action in own if action.dest != "shutdown_timeout"]
    no_default = [
        action.dest
        for action in parser._actions
        if action.dest in torchrun and action.default is None and torchrun[action.dest].default not in (None, 29500)
    ]
    return {**{action.dest: described(action) for action in own}, "torchrun's without default": sorted(no_default)}


def _names(action: argparse.Action | None) -> set[str]:
    return set() if action is None else set(action.option_strings)


def signature(thing: Any) -> Any:
    """The parameters of a function or class: names, kinds and defaults; for anything else its type."""
    if isinstance(thing, type) and issubclass(thing, BaseException):
        return "exception"
    if not callable(thing):
        return type(thing).__name__
    if isinstance(thing, enum.EnumMeta):
        # What its constructor takes depends on Python's release.
        return {"attributes": sorted(thing.__members__)}
    parameters = inspect.signature(thing).parameters.values()
    shown = [str(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in parameters]
    attributes = sorted(name for name in vars(thing) if not name.startswith("_")) if isinstance(thing, type) else []
    return {"parameters": shown, "attributes": attributes} if attributes else {"parameters": shown}


def test_public_names() -> None:
    public = {"slurm_elastic": slurm_elastic, "slurm_elastic.snapshot": snapshot, "slurm_elastic.trainer": trainer}
    check(
        "public_names",
        {
            name: {each: signature(getattr(module, each)) for each in module.__all__ if each != "trainer"}
            for name, module in public.items()
        },
    )


def test_exit_codes() -> None:
    check("exit_codes", {code.name: int(code) for code in ExitCode})


def texts(tree: ast.AST) -> Iterator[str]:
    """The string constants of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_variables() -> None:
    """Each name of an environment variable that the code has as a string, and those that batch scripts set."""
    pattern = re.compile(r"(SLURM_ELASTIC|TORCHELASTIC|SLURM_ELASTIC_ETCD)_[A-Z_]+")
    code = {
        text for path in PACKAGE.rglob("*.py") for text in texts(ast.parse(path.read_text())) if pattern.fullmatch(text)
    }
    scripts = {
        f"{path.name}: {match[0]}"
        for path in TEMPLATES.glob("*.sbatch")
        for match in pattern.finditer(path.read_text())
    }
    check("variables", {"code": sorted(code), "batch scripts": sorted(scripts)})


def test_every_event_is_in_the_golden_file_of_a_run() -> None:
    """The run in tests/local/agent/test_goldens.py has to bring about every event that the code can write."""
    written = {
        node.args[0].value
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Entry"
        if node.args and isinstance(node.args[0], ast.Constant)
    }
    assert sorted(written) == sorted(golden("run_events"))


@pytest.mark.parametrize("name", ["run_events", "run_progress"])
def test_the_page_about_events_has_every_field(name: str) -> None:
    page = (PACKAGE.parent / "docs" / "events.md").read_text()
    chapter = page.partition("## events/" if name == "run_events" else "## progress/")[2].partition("\n## ")[0]
    everywhere = {"time", "event", "node", "schema", "text", "agent"}
    for event, fields in golden(name).items():
        row = chapter if ":" in event else next(line for line in chapter.splitlines() if f"`{event}`" in line)
        assert set(fields) - everywhere <= set(re.findall(r"`(\w+)`", row)), event


def test_rendezvous_options() -> None:
    found = {
        field.name: str(getattr(RendezvousOptions(), field.name)) for field in dataclasses.fields(RendezvousOptions)
    }
    check("rendezvous_options", found)


def test_wire_protocol() -> None:
    """The number by which agents of different releases refuse each other, and control pages likewise."""
    found = {}
    for path in sorted((*PACKAGE.glob("rendezvous/**/*.py"), *PACKAGE.glob("control/*.py"))):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if name in ("PROTOCOL", "_VERSION_VALUE"):
                    found[name] = ast.literal_eval(node.value)
    check("wire_protocol", found)


def test_entry_points_and_templates() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 or later")
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    points = {group: sorted(names) for group, names in project["entry-points"].items()}
    scripts = sorted(path.name for path in TEMPLATES.glob("*.sbatch"))
    check("entry_points", {"commands": sorted(project["scripts"]), "entry points": points, "templates": scripts})
