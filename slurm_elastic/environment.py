"""The environment of this process, which the processes that it starts inherit, and its user's directory.

Imports nothing slow: an agent uses it before it starts the process of its workers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

PRIVATE = ("SLURM_ELASTIC_ETCD_PASSWORD", "SLURM_ELASTIC_HEALTH_TOKEN")
"""Variables that no worker may inherit."""


def take_private(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Take out of an environment what workers must not inherit, and return it."""
    return {name: environ.pop(name) for name in PRIVATE if name in environ}


@contextlib.contextmanager
def changed_environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Give variables other values meanwhile; None takes one away."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def state_directory() -> Path:
    """Return the directory of what this user keeps beyond single runs, which need not exist.

    That is XDG_STATE_HOME/slurm_elastic (XDG Base Directory Specification).

    Raises:
        FileNotFoundError: The user has no home directory. None is made: on compute nodes it may be a name alone.
    """
    if base := os.environ.get("XDG_STATE_HOME"):
        return Path(base, "slurm_elastic")
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 (Path.expanduser raises a RuntimeError without a home)
    if not home.is_dir():
        raise FileNotFoundError(2, "this user has no home directory; XDG_STATE_HOME may name another one", str(home))
    return home / ".local/state/slurm_elastic"
