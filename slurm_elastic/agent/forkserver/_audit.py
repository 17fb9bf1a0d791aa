"""One audit hook of this process (sys.addaudithook), for those that want to know of imports and changes of the process.

A hook cannot be removed, and processes that are forked inherit it: it passes events on to the listener of the moment.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

Listener = Callable[[str, tuple[Any, ...]], None]
"""Called with the name of an event and its arguments (docs.python.org, Audit events table)."""

_listener: Listener | None = None
_hooked = False


def listen(listener: Listener | None) -> None:
    """Pass events to this listener from now on, in place of the one before; None for nobody."""
    global _listener, _hooked
    _listener = listener
    if not _hooked:
        _hooked = True
        sys.addaudithook(_hook)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    # Called for every `id`, too.
    if _listener is not None:
        _listener(event, arguments)
