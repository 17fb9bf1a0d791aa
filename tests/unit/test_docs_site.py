"""The documentation as a site: its commands are real ones, no page is left out, and generated pages have everything."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from slurm_elastic.cli.agent_parser import agent_parser
from slurm_elastic.cli.main import commands

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *sorted(DOCS.glob("tutorial/*.md")),
    DOCS / "index.md",
    DOCS / "doctor.md",
    *sorted(DOCS.glob("howto/[mn]*.md")),
]


def blocks(page: Path) -> Iterator[str]:
    """The lines of all blocks of code of a page; one that ends with a backslash goes on."""
    for block in re.findall(r"^```(?:\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        yield from block.replace("\\\n", " ").splitlines()


def shell_commands() -> Iterator[tuple[str, list[str]]]:
    """Every command of ours, and the words that a batch script of ours passes on to the agent."""
    for page in PAGES:
        for line in blocks(page):
            words = (
                shlex.split(line.removeprefix("$ "), comments=True)
                if "slurm-elastic" in line or ".sbatch" in line
                else []
            )
            if words[:1] == ["slurm-elastic"]:
                end = next((index for index, word in enumerate(words) if word in (">", "|", "&&")), len(words))
                yield f"{page.name}: {line}", words[1:end]
            elif words[:1] == ["sbatch"]:
                script = next(index for index, word in enumerate(words) if word.endswith(".sbatch"))
                yield f"{page.name}: {line}", ["agent", *words[script + 1 :]]


def generated_pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generated_pages", DOCS / "site/generated_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("words", [pytest.param(words, id=where) for where, words in shell_commands()])
def test_commands_of_tutorials_are_taken_by_their_parsers(words: list[str]) -> None:
    name, *arguments = words
    if name == "agent":
        agent_parser().parse_args(arguments)
    elif name in ("doctor", "submit"):
        # They take the options of sbatch, too.
        next(command for command in commands() if command.name == name).parser().parse_known_args(arguments)
    else:
        next(command for command in commands() if command.name == name).parser().parse_args(arguments)


def test_there_are_commands_to_test() -> None:
    assert {"agent", "doctor", "drain", "logs", "report", "status", "template", "top"} - {
        words[0] for _, words in shell_commands()
    } == {"report"}


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
