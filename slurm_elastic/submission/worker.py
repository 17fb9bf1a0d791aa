"""``python -m slurm_elastic.submission.worker``: one worker of a submitted function.

Here is what cannot wait for slow imports. Until the function runs, the signal for a planned end is only recorded: there
is nothing to save then, and dying of it would be a failure. Slurm's warning before the time limit is for the agent,
though proctrack/linuxproc gives it to every process of the job.
"""

from __future__ import annotations

import signal
import sys

__all__ = ["main"]


def main() -> None:
    """Call the function that the command line names."""
    signals: list[int] = []
    signal.signal(signal.SIGHUP, lambda number, _frame: signals.append(number))
    # Not SIG_IGN, which programs that the function starts would inherit.
    signal.signal(signal.SIGUSR2, lambda _number, _frame: None)
    from slurm_elastic.submission.run_function import call

    folder, uid = sys.argv[1:]
    call(folder, uid, signals)


if __name__ == "__main__":
    main()
