"""The directory of what this user keeps beyond single runs. The fork server imports this before torch: no pathlib."""

from __future__ import annotations

import os


def state_directory() -> str:
    """Return the directory, which need not exist: XDG_STATE_HOME/slurm_elastic (XDG Base Directory Specification).

    Raises:
        FileNotFoundError: The user has no home directory. None is made: on compute nodes it may be a name alone.
    """
    base = os.environ.get("XDG_STATE_HOME")
    if base:
        return os.path.join(base, "slurm_elastic")  # noqa: PTH118
    home = os.path.expanduser("~")  # noqa: PTH111
    if not os.path.isdir(home):  # noqa: PTH112
        raise FileNotFoundError(2, "this user has no home directory; XDG_STATE_HOME may name another one", home)
    return os.path.join(home, ".local", "state", "slurm_elastic")  # noqa: PTH118
