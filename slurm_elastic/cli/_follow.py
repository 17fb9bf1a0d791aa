"""Prints the output of a job until the job has ended."""

from __future__ import annotations

import contextlib
import glob
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from slurm_elastic.slurm import Controller, JobView
from slurm_elastic.submission.job_states import is_final

_PAUSE = 0.3
"""Seconds between two looks at the output."""
_ASK_SLURM = 2.0
"""Seconds between two questions to Slurm."""


class Output:
    """Copies what is new in the files of a job's output to stdout, in whole lines.

    Args:
        patterns: Paths of the files, where ``*`` stands for any text. What is in them now is not of the job.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = patterns
        self._shown = {path: Path(path).stat().st_size for path in self._paths()}

    def show(self, *, last: bool = False) -> None:
        """Show what is new, with `last` also a line that has not ended."""
        for path in self._paths():
            begin, data = self._shown.get(path, 0), b""
            with contextlib.suppress(OSError), Path(path).open("rb") as file:
                # The job may begin its file anew.
                begin = begin if begin <= os.fstat(file.fileno()).st_size else 0
                file.seek(begin)
                data = file.read()
            if not last:
                data = data[: max(data.rfind(b"\n"), data.rfind(b"\r")) + 1]
            sys.stdout.buffer.write(data)
            self._shown[path] = begin + len(data)
        sys.stdout.buffer.flush()

    def _paths(self) -> list[str]:
        globs = (glob.escape(pattern).replace("[*]", "*") for pattern in self.patterns)
        return sorted({path for pattern in globs for path in glob.glob(pattern)})  # noqa: PTH207 (absolute)


def follow(job: str, output: Output, controller: Controller) -> int:
    """Print the output of a job or array until it has ended.

    Returns:
        Its exit code; 0 if an element of an array has finished the run.
    """
    waits, asked, over = "", float("-inf"), False
    views: tuple[JobView, ...] = ()
    try:
        while not over:
            if time.monotonic() - asked >= _ASK_SLURM:
                answer, asked = controller.elements(job), time.monotonic()
                views = answer or views
                # Minutes after its end Slurm does not know a job any more.
                over = all(is_final(view.state) for view in answer) if answer else controller.is_queued(job) is False
                before, waits = waits, next((view.reason or "" for view in views if view.state == "PENDING"), "")
                if waits not in ("", before):
                    print(f"job {job} is pending ({waits})", file=sys.stderr, flush=True)
            output.show(last=over)
            time.sleep(0 if over else _PAUSE)
    except KeyboardInterrupt:
        print(f"job {job} goes on: slurm-elastic status {job}, scancel {job}", file=sys.stderr)
        raise
    if any(view.state == "COMPLETED" for view in views):
        return 0
    return max((view.exit_code for view in views), default=0) or 1
