"""Names in the code against docs/glossary.md."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import slurm_elastic

PACKAGE = Path(slurm_elastic.__file__).parent
TESTS = Path(__file__).parents[1]
GLOSSARY = TESTS.parent / "docs" / "glossary.md"
DOCSTRING = re.compile(r"(What|Who|Whom|Whose|Whether|Those|Says|Where|Why|How)\b")
"""A docstring begins with its subject or with a verb."""


@functools.cache
def unwanted() -> list[str]:
    """The words of the last table of the glossary."""
    rows = re.findall(r"^\| (.*?) \|", GLOSSARY.read_text().partition("| not | but |")[2], flags=re.MULTILINE)
    return [word for row in rows for word in re.findall(r"`(\w+)`", row)]


def sources() -> list[Path]:
    """The files of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def names(path: Path) -> Iterator[str]:
    """The names that a file defines: its own, and those of classes, functions, parameters, variables, attributes."""
    yield path.stem
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def parts(name: str) -> str:
    """A name in lower case with an underscore between its words, and around them."""
    return "_" + re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_") + "_"


def test_the_glossary_says_which_words_are_not_used() -> None:
    assert {"chair", "giving_up", "nobody"} <= set(unwanted())
    assert parts("OpenDoorNow") == "_open_door_now_"


def unwanted_names(path: Path) -> set[str]:
    words = re.compile(f"_({'|'.join(unwanted())})s?_")
    return {name for name in set(names(path)) if words.search(parts(name))}


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_names_are_those_of_the_glossary(path: Path) -> None:
    assert unwanted_names(path) == set()


def test_names_in_tests_are_those_of_the_glossary() -> None:
    """But for names of tests themselves, which are sentences."""
    found = {name for path in TESTS.rglob("*.py") for name in unwanted_names(path) if not name.startswith("test_")}
    assert found == set()


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_docstrings_begin_with_a_subject_or_a_verb(path: Path) -> None:
    tree = ast.parse(path.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented)]
    assert [text.splitlines()[0] for text in texts if DOCSTRING.match(text)] == []
