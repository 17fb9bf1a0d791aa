"""A worker's own dump: its newest collectives, from torch's flight recorder, and the Python stacks of all threads.

torch records collectives by default: 2,000 of them (FlightRecorder.hpp and ProcessGroupNCCL.hpp, torch 2.12 to 2.15),
with ``TORCH_FR_BUFFER_SIZE=0`` none. This module alone touches the functions that return them, which also works while
the main thread blocks in a collective; the one of NCCL exists in builds with CUDA. Both have a variant that returns a
pickle, which is never read.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping

Collective = tuple[str, int, str]
"""The last collective that a rank has begun in a process group: name of the group, sequence number, operation."""

MOST_BYTES = 1 << 18
"""Size of the file with a dump of the flight recorder, at most: some 500 collectives."""
MOST_GROUPS = 4
"""Process groups of which the last collective is told: 512 bytes have room for them."""
_FUNCTIONS = {"flight_recorder.json": "_dump_fr_trace_json", "flight_recorder_nccl.json": "_dump_nccl_trace_json"}
"""Functions of torch._C._distributed_c10d (torch 2.12 to 2.15), by the file for what they return."""
_ENTRY = '{"collective_seq_id":'
"""The beginning of an entry: keys are sorted (nlohmann::json, torch 2.13)."""


def dumps() -> dict[str, bytes]:
    """Return what the flight recorders hold, by the name of the file for it; nothing without a process group.

    Before the first process group, a script may still set the recorder's variables.
    """
    distributed = sys.modules.get("torch.distributed")
    c10d = sys.modules.get("torch._C._distributed_c10d")
    if distributed is None or c10d is None or not distributed.is_initialized():
        return {}
    cuda = sys.modules.get("torch.cuda")
    contents = {}
    for name, function in _FUNCTIONS.items():
        if "nccl" not in function or (cuda is not None and cuda.is_initialized()):
            dump: Callable[[bool, bool], bytes] | None = getattr(c10d, function, None)
            content = b"" if dump is None else dump(True, False)
            if _ENTRY.encode() in content:
                contents[name] = content
    return contents


def collectives(content: bytes) -> tuple[Collective, ...]:
    """Return the last collective of each process group, of at most four groups, that with the newest collective first.

    Args:
        content: A dump; one that cannot be read has none.
    """
    try:
        entries = json.loads(content)["entries"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ()
    last: dict[str, Collective] = {}
    for entry in entries if isinstance(entries, list) else ():
        match entry:
            case {
                "is_p2p": False,
                "process_group": [str(group), *_],
                "collective_seq_id": int(number),
                "profiling_name": str(name),
            }:
                last.pop(group, None)
                last[group] = group[:40], number, name.rpartition(":")[2][:40]
    return tuple(reversed(last.values()))[:MOST_GROUPS]


def shortened(content: bytes, most: int = MOST_BYTES) -> bytes:
    """Return a dump without its oldest entries, as JSON of the same shape with at most `most` bytes."""
    if len(content) <= most:
        return content
    try:
        dump = json.loads(content)
        entries = dump["entries"]
        kept = entries
        while kept and len(content) > most:
            kept = kept[len(kept) // 2 + 1 :]
            content = json.dumps({**dump, "entries": kept}, separators=(",", ":")).encode()
    except (ValueError, TypeError, KeyError, RecursionError):
        return b""
    return content if len(content) <= most else b""


def write_dump(environ: Mapping[str, str], *, stacks: bool = True) -> None:
    """Write the dump of this process beside its logs; do nothing if it has none, or the disk is full.

    Args:
        environ: The environment: the directory is that of torch's error file, see `slurm_elastic.agent.workers.logs`.
        stacks: True to append the stacks of all threads to ``stacks.txt``, too.
    """
    error_file = environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        return
    directory = os.path.dirname(error_file)  # noqa: PTH120 (pathlib takes milliseconds to import)
    try:
        if stacks:
            _write_stacks(f"{directory}/stacks.txt")
        for name, content in dumps().items():
            _write(f"{directory}/{name}", shortened(content))
    except Exception:
        # A full disk, or functions of torch that have changed. The training goes on.
        return


def _write_stacks(path: str) -> None:
    import faulthandler

    descriptor = os.open(path, _FLAGS | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, f"== Python, process {os.getpid()}\n".encode())
        # At most 100 threads, with 100 frames each (Python/traceback.c).
        faulthandler.dump_traceback(descriptor, all_threads=True)
    finally:
        os.close(descriptor)


def _write(path: str, content: bytes) -> None:
    # Under its name when it is complete: the process may be killed meanwhile.
    descriptor = os.open(f"{path}.new", _FLAGS | os.O_TRUNC, 0o600)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)
    os.replace(f"{path}.new", path)  # noqa: PTH105


_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
