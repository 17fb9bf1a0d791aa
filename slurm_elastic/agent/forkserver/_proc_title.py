"""The title of a process, as ps shows it."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

__all__ = ["set_title"]


def set_title(title: str, variable: str) -> None:
    """Show `title` in place of the command line that this process was executed with, as far as there is room.

    The room is that of the command line and of `variable`, if that came first in the environment; it must not be set
    any more. Where the kernel does not say where they lie, everything stays as it is.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        # proc_pid_stat(5): arg_start, arg_end, env_start, env_end are fields 48 to 51; the second one may hold blanks.
        text = Path("/proc/self/stat").read_text()
        start, end, variables, variables_end = (int(field) for field in text[text.rindex(")") + 1 :].split()[45:49])
        if 0 < start < end <= variables < variables_end:
            room = end - start
            first = ctypes.string_at(variables)
            if variables == end and first.startswith(variable.encode() + b"="):
                room += len(first) + 1
            # The kernel shows what is beyond the command line if that does not end with a zero (fs/proc/base.c,
            # get_mm_proctitle).
            ctypes.memmove(start, title.encode(errors="surrogateescape")[: room - 1].ljust(room, b"\0"), room)
