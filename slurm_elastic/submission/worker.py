"""``python -m slurm_elastic.submission.worker``: a worker of a submitted function, before the slow imports.

Until the function runs, this only records the signal for a planned end: there is nothing to save then, and ending by
the signal would be a failure. The warning before the time limit is for the agent, though Slurm sends it to every
process of the job under proctrack/linuxproc.
"""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the function that the command line names."""
    signals: list[int] = []
    signal.signal(signal.SIGHUP, lambda number, _frame: signals.append(number))
    # Not SIG_IGN: programs that the function starts would inherit it (execve(2)).
    signal.signal(signal.SIGUSR2, lambda _number, _frame: None)
    from slurm_elastic.submission.run_function import run_function

    folder, uid = sys.argv[1:]
    run_function(folder, uid, signals)


if __name__ == "__main__":
    main()
