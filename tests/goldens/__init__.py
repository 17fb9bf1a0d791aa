"""Golden files: everything that users, their scripts and their programs can see of a release.

A test collects what the product shows and compares it with the file of that name in this folder. To change a golden
file on purpose, run the tests with WRITE_GOLDENS=1 and review the difference: a line that goes away
breaks somebody's script; a new line belongs into CHANGELOG.md and docs/reference.md.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["check", "golden"]

_FOLDER = Path(__file__).parent
_WRITE = "WRITE_GOLDENS"


def golden(name: str) -> Any:
    """Return the content of a golden file."""
    return json.loads((_FOLDER / f"{name}.json").read_text())


def check(name: str, found: Any) -> None:
    """Compare what the product shows with its golden file.

    Args:
        name: Name of the golden file, without suffix.
        found: What the product shows now; JSON is made of it.

    Raises:
        AssertionError: They differ.
    """
    path = _FOLDER / f"{name}.json"
    text = json.dumps(found, indent=1, sort_keys=True) + "\n"
    if _WRITE in os.environ:
        path.write_text(text)
    assert json.loads(text) == golden(name), f"see {path} and tests/goldens/__init__.py"
