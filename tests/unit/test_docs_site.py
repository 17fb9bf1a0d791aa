"""The documentation as a site: its commands are real ones, no page is left out, and generated pages have everything."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from slurm_elastic.cli.commands.agent import agent_parser
from slurm_elastic.cli.main import commands
from tests.docs_commands import ELSEWHERE, HERE, shell_commands

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def parsed_commands() -> Iterator[tuple[str, list[str]]]:
    """The words of every command of ours, and those that a batch script of ours passes on to the agent."""
    for page, command in shell_commands():
        words = shlex.split(command)
        if words[0] == "slurm-elastic":
            end = next((index for index, word in enumerate(words) if word in (">", "|", "&&")), len(words))
            yield f"{page}: {command}", words[1:end]
        elif words[0] == "sbatch":
            scripts = [index for index, word in enumerate(words) if word.endswith(("elastic.sbatch", "array.sbatch"))]
            if scripts:
                yield f"{page}: {command}", ["agent", *words[scripts[-1] + 1 :]]


def generated_pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generated_pages", DOCS / "site/generated_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("words", [pytest.param(words, id=where) for where, words in parsed_commands()])
def test_commands_of_tutorials_are_taken_by_their_parsers(words: list[str]) -> None:
    name, *arguments = words
    if name == "agent":
        agent_parser().parse_args(arguments)
    elif name in ("doctor", "grow", "resize", "submit"):
        # They take the options of sbatch, too.
        next(command for command in commands() if command.name == name).parser().parse_known_args(arguments)
    else:
        next(command for command in commands() if command.name == name).parser().parse_args(arguments)


def test_each_command_is_run_by_a_test() -> None:
    """tests/docs_commands.py says by which one."""
    commands = {command for _, command in shell_commands()}
    assert commands == {*HERE, *ELSEWHERE}
    for test in ELSEWHERE.values():
        file, name = test.split("::")
        assert f"def {name}(" in (ROOT / file).read_text(), test


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"^ +- (?:.*: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    written = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert named == written | {f"generated/{name}.md" for name in generated_pages().pages()}


def test_generated_pages_have_every_command_option_metric_and_code() -> None:
    pages = generated_pages().pages()
    for command in commands():
        assert f"## slurm-elastic {command.name}\n" in pages["commands"]
        for action in command.completion_parser()._actions:
            names = [name for name in action.option_strings if "_" not in name]
            assert action.help == "==SUPPRESS==" or all(f"`{name}" in pages["commands"] for name in names)
    golden = (ROOT / "tests/goldens/run_pages.json").read_text()
    metrics = {re.sub("_total$", "", name) for name in re.findall(r'"(slurm_elastic_\w+) ', golden)}
    shown = {re.sub("_total$", "", name) for name in re.findall(r"^\| `(\w+)` ", pages["metrics"], re.MULTILINE)}
    assert shown == metrics
    assert "| 75 | left |" in pages["exit-codes"]
