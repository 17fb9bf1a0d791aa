"""The recipes of other package managers, and what else repeats pyproject.toml."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from slurm_elastic import __version__

CHECKOUT = Path(__file__).parents[2]
CONDA = (CHECKOUT / "docs/packaging/conda/recipe.yaml").read_text()
SPACK = (CHECKOUT / "docs/packaging/spack/packages/py_slurm_elastic/package.py").read_text()


def requirements() -> dict[str, str]:
    """What pyproject.toml requires, with the oldest version."""
    text = (CHECKOUT / "pyproject.toml").read_text()
    listed = text[text.index("\ndependencies = [") : text.index("[project.optional-dependencies]")]
    python = re.search(r'requires-python = ">=([0-9.]+)"', text)
    assert python
    return {"python": python[1], **dict(re.findall(r'"([\w-]+)>=([0-9.]+)"', listed))}


def test_conda_requires_the_same() -> None:
    run = CONDA[CONDA.index("  run:") : CONDA.index("\ntests:")]
    found = dict(re.findall(r"    - ([\w-]+) >=([0-9.]+)", run))
    assert {name.replace("pytorch", "torch"): oldest for name, oldest in found.items()} == requirements()


def test_spack_requires_the_same() -> None:
    found = dict(re.findall(r'depends_on\("(?:py-)?([\w-]+)@([0-9.]+):', SPACK))
    del found["hatchling"], found["shtab"]
    wanted = {name.replace("_", "-"): oldest for name, oldest in requirements().items()}
    assert found == wanted
    compile(SPACK, "package.py", "exec")


def test_pages_name_the_same_oldest_releases() -> None:
    pages = [CHECKOUT / "README.md", *(CHECKOUT / "docs").rglob("*.md")]
    found = re.findall(r"\b(Python|torch)\s+([0-9.]+) or later", "\n".join(page.read_text() for page in pages))
    oldest = requirements()
    assert set(found) == {("Python", oldest["python"]), ("torch", oldest["torch"])}


def test_everything_names_this_version() -> None:
    for name, text, line in (
        ("conda", CONDA, f"  version: {__version__}"),
        ("spack", SPACK, f'    version("{__version__}")'),
        ("CITATION.cff", (CHECKOUT / "CITATION.cff").read_text(), f"version: {__version__}"),
    ):
        assert line in text.splitlines(), name
    # The first section with a version is this one.
    sections = re.findall(r"^## (\d\S*) - (\S+)$", (CHECKOUT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert sections[0][0] == __version__
    assert f'date-released: "{sections[0][1]}"' in (CHECKOUT / "CITATION.cff").read_text()


OPTIONAL = {
    "pytest": "rehearsal/pytest_plugin.py",
    "textual": "cli/_top_view.py",
    "accelerate": "integrations",
    "lightning": "integrations",
    "transformers": "integrations",
}
"""Packages that users of one part install, and the only files that import them."""


def test_every_imported_package_is_required() -> None:
    modules = {"python_hostlist": "hostlist"}
    required = {modules.get(name, name) for name in (each.replace("-", "_") for each in requirements())}
    package = CHECKOUT / "slurm_elastic"
    missing = set()
    for path in package.rglob("*.py"):
        file = path.relative_to(package).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"slurm_elastic"}:
                if name not in required and not (name in OPTIONAL and file.startswith(OPTIONAL[name])):
                    missing.add(f"{file} imports {name}")
    assert missing == set()
