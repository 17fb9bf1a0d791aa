"""Variables of this process, which the processes that it starts inherit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

__all__ = ["changed_environment", "set_variable"]


@contextlib.contextmanager
def changed_environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Give variables other values meanwhile; None takes one away."""
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        set_variable(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            set_variable(name, value)


def set_variable(name: str, value: str | None) -> None:
    """Set a variable; None takes it away."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
