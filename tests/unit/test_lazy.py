from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

LAZY = {
    "slurm_elastic": ("submission", "errors", "launcher", "trainer"),
    "slurm_elastic.submission": ("executor", "job"),
}
"""Packages that import their parts when these are asked for, and the parts."""


@pytest.mark.parametrize("name", LAZY)
def test_every_public_name_is_found(name: str) -> None:
    package = importlib.import_module(name)
    assert all(getattr(package, public) is not None for public in package.__all__)
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nobody'"):
        _ = package.nobody
    with pytest.raises(ImportError, match="cannot import name 'nobody'"):
        exec(f"from {name} import nobody")


def test_a_part_is_imported_when_it_is_asked_for() -> None:
    parts = {f"{package}.{part}" for package, parts in LAZY.items() for part in parts} - {"slurm_elastic.submission"}
    program = f"""
import importlib, sys

for package in {list(LAZY)}:
    importlib.import_module(package)
print({parts} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
