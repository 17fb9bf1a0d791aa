"""Functions that are called in a loop, at any depth of the stack, get no memory from the kernel for each call."""

from __future__ import annotations

import resource
import sys

import pytest

from slurm_elastic.agent.forkserver import _preload as preload
from slurm_elastic.agent.forkserver._stack_room import with_stack_room

_CALLS = 200
_DEPTH = 300
"""Frames that fill several chunks of 16 KiB."""


def _leaf(number: int) -> int:
    # More than what frames that only call need: chunks end in a frame of this function at some depth.
    first, second, third, fourth = number, number + 1, number + 2, number + 3
    return first + second + third + fourth


def _call_at_each_depth(depth: int) -> None:
    for number in range(_CALLS):
        _leaf(number)
    if depth:
        _call_at_each_depth(depth - 1)


@with_stack_room
def _call_with_room() -> None:
    _call_at_each_depth(_DEPTH)


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 keeps frames on the heap")
def test_no_call_takes_memory_from_the_kernel_and_gives_it_back() -> None:
    before = _page_faults()
    _call_with_room()
    assert _page_faults() - before < _CALLS


def test_a_function_with_room_is_the_same_function() -> None:
    def function(first: int, *, second: int) -> int:
        """Multiply."""
        return first * second

    roomy = with_stack_room(function)
    assert roomy is function
    assert roomy(6, second=7) == 42
    assert roomy.__doc__ == "Multiply."


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 keeps frames on the heap")
def test_modules_are_imported_with_room() -> None:
    assert preload.import_module.__code__.co_stacksize * 8 > 16 << 10
