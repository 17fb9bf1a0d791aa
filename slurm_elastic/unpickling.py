"""The one function by which this project unpickles what another process has written: a pickle can run any code.

It takes a descriptor that this process was given, or a file that no other user can have written or put in its place.
docs/security.md lists who calls it. The fork server (agent/forkserver) has memory files that only its agent gives it.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

from slurm_elastic.ownership import open_trusted


def unpickle(source: int | Path) -> Any:
    """Return the object whose pickle is in a file.

    Args:
        source: A descriptor that was inherited or made here, which is closed; or a path, see `open_trusted`.

    Raises:
        PermissionError: Another user can have written the file.
        OSError: There is none, or it cannot be read.
        Exception: It is no pickle, or names what cannot be imported here.
    """
    with os.fdopen(source if isinstance(source, int) else open_trusted(source), "rb") as file:
        return pickle.load(file)
