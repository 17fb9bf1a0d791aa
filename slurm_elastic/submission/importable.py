"""Whether the workers will find the module of a function that is sent by its name."""

from __future__ import annotations

import sys
from pathlib import Path

import cloudpickle

from slurm_elastic.errors import UsageError

__all__ = ["require_importable"]


def require_importable(function: object) -> None:
    """Look for the one mistake that shows already here: a module beside the script that submits from elsewhere.

    Python looks for modules in the directory of its script (docs.python.org, sys.path); workers have the directory that
    the submission came from in its place. Whatever else nodes may lack shows only there.

    Raises:
        UsageError: that is so.
    """
    name = getattr(function, "__module__", None) or "__main__"
    top = name.partition(".")[0]
    if name == "__main__" or {name, top} & set(cloudpickle.list_registry_pickle_by_value()):
        return
    file = getattr(sys.modules.get(top), "__file__", None)
    if file is None:
        return
    path = Path(file).resolve()
    root = path.parent.parent if path.stem == "__init__" else path.parent
    beside_script, *others = (Path(entry).resolve() for entry in sys.path)
    if root == beside_script and root != Path.cwd() and root not in others:
        raise UsageError(
            f"module {name} lies beside the script, in {root}, where workers do not look; submit from there, or put "
            "that directory in PYTHONPATH"
        )
