"""The environment that tells a Python to stop in the middle of its start (see `_boot`)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

_BOOT = os.path.join(os.path.dirname(__file__), "_boot")  # noqa: PTH118, PTH120  pathlib takes long to import


def boot_environment(environment: Mapping[str, str], settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment to execute the Python with. The settings come first, which `set_title` relies on."""
    python_path = environment.get("PYTHONPATH")
    return {
        "SLURM_ELASTIC_WARM": json.dumps(settings),
        **environment,
        "PYTHONPATH": os.pathsep.join([_BOOT, python_path] if python_path else [_BOOT]),
    }
