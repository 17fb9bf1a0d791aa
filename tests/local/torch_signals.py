"""torch's own start of processes replaces signal handlers, which a test has to keep."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def signal_handlers_kept() -> Iterator[None]:
    """Keep the signal handlers of this process: PContext.start replaces them (torch 2.15)."""
    kept = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
