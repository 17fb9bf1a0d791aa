"""What ``--nnodes`` means; without torch."""

from __future__ import annotations

import re

from slurm_elastic.errors import UsageError

__all__ = ["node_range"]

_NODES = re.compile(r"([0-9]{1,6})(?::([0-9]{1,6}))?")


def node_range(text: str | None, most: int) -> tuple[int, int]:
    """Return the least and the most nodes of ``--nnodes``; 1 to ``most`` if it is not given.

    Raises:
        UsageError: it is not ``N`` or ``MIN:MAX``, or nothing fits.
    """
    if text is None:
        return 1, most
    match = _NODES.fullmatch(text.strip())
    if not match:
        raise UsageError(f"--nnodes {text!r} is neither a number nor MIN:MAX; write it as in 4 or 2:4")
    least, most = int(match[1]), int(match[2] or match[1])
    if least == 0:
        raise UsageError(f"--nnodes {text}: a run needs at least one node; write it as in 1:{max(most, 1)}")
    if least > most:
        raise UsageError(f"--nnodes {text}: the minimum is above the maximum; write it as in {most}:{least}")
    return least, most
