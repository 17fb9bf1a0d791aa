"""The environment with training frameworks, which `make setup` makes, and the tests that need it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

PYTHON = Path("/opt/slurm-elastic/frameworks/bin/python")
_RELEASE = (3, 11)
"""Of that Python."""


def require() -> None:
    """Fail the test without the environment; skip it in another Debian root, which lacks the environment's Python."""
    if os.access(PYTHON, os.X_OK):
        return
    if sys.version_info[:2] != _RELEASE and PYTHON.is_symlink():
        pytest.skip("the Python of the frameworks' environment is not in this Debian root")
    pytest.fail(f"{PYTHON} is missing: run `make setup` first", pytrace=False)
