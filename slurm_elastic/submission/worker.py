"""``python -m slurm_elastic.submission.worker``: one worker of a submitted function.

Here is what cannot wait for slow imports: until the function runs, the signal for a planned end is only recorded. There
is nothing to save then, and dying of it would be a failure.
"""

from __future__ import annotations

import signal
import sys

__all__ = ["main"]


def main() -> None:
    """Call the function that the command line names."""
    signals: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, _frame: signals.append(number))
    from slurm_elastic.submission.calling import call

    folder, uid = sys.argv[1:]
    call(folder, uid, signals)


if __name__ == "__main__":
    main()
