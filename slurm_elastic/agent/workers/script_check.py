"""Checks before the start that the script or program of the workers exists."""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
from pathlib import Path

from slurm_elastic.errors import UsageError


def require_entry_point(options: argparse.Namespace, node: str) -> None:
    """Check the script or program; not a module, because finding that may import its packages.

    Args:
        options: The parsed command line.
        node: Slurm's name of this node, for the message.

    Raises:
        UsageError: It does not exist, or cannot be read or executed.
    """
    if options.module:
        return
    name: str = options.training_script
    if options.no_python and not options.run_path:
        if shutil.which(name) is None:
            raise UsageError(f"no program {name} on {node}; give a path, or a name that is in PATH there")
        return
    path = Path(name)
    if not os.path.lexists(path):
        raise UsageError(_missing(path, node))
    if path.is_dir():
        # Python runs a directory that holds a __main__.py, python(1).
        if not (path / "__main__.py").is_file():
            raise UsageError(f"{path.absolute()} is a directory without __main__.py; name the script in it")
    elif not os.access(path, os.R_OK):
        raise UsageError(f"{path.absolute()} cannot be read by this user on {node}; fix its permissions")


def _missing(path: Path, node: str) -> str:
    return f"no script {path.absolute()} on {node}; {_hint(path)}"


def _hint(path: Path) -> str:
    try:
        there = [entry.name for entry in path.absolute().parent.iterdir()]
    except OSError:
        return "its directory is not there; use one on a disk that all nodes share"
    near = difflib.get_close_matches(path.name, there, n=3)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return "give its path, on a disk that all nodes share"
