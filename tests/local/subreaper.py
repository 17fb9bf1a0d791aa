"""Takes back what a fork server has made of the process of the tests."""

from __future__ import annotations

import ctypes

_PR_SET_CHILD_SUBREAPER = 36


def be_no_subreaper() -> None:
    """Leave orphans of other tests to init again (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0)
