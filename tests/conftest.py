"""What tests take for granted of the process that runs them."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    # What a shell without job control starts in the background ignores both (POSIX, Shell Command Language, 2.11), and
    # so would all that the tests start.
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, default)
