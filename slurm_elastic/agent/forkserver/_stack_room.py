"""Lets imports call functions without a system call for each call.

Python keeps the frames of a thread in chunks of 16 KiB. A call that needs the next chunk gets it from the kernel, and
its return gives it back (Python/pystate.c, push_chunk and _PyThreadState_PopFrame, 3.11): where a loop at the end of a
chunk calls a function, each turn costs mmap(2), munmap(2) and a page fault. The import of lightning 2.6 made sixty
thousand of these calls, a sixth of its time; how many depends on how deep the stack is. A chunk is as large as a frame
that needs more, rounded up to a power of two, and what is left of it is for the frames above.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

__all__ = ["with_stack_room"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_WORDS = 1 << 16
"""The evaluation stack that a frame asks for, in words of 8 bytes. Python then takes a chunk of 1 MiB and leaves half
of it, 512 bytes for each frame up to the recursion limit of 1000. The kernel gives memory when it is first written."""


def with_stack_room(function: _Function) -> _Function:
    """Give the frames above this function's a chunk of their own; a decorator of a Python function."""
    # Python 3.10 has no chunks.
    if sys.version_info >= (3, 11):
        code = cast("FunctionType", function).__code__
        cast("FunctionType", function).__code__ = code.replace(co_stacksize=_WORDS)
    return function
