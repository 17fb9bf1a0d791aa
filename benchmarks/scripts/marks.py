"""What a worker of a framework's training has reached and when: JSON lines in `steps/`, a file for each process.

Beside the script, as one that its own directory has. All times are this machine's clock, which all nodes of the test
cluster share.
"""

import json
import os
import time
from pathlib import Path

_STEPS = Path("steps")


def _started() -> float:
    """When the kernel started this process, in seconds since 1970 (proc(5): clock ticks since boot)."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


_STEPS.mkdir(exist_ok=True)
_file = (_STEPS / f"{os.uname().nodename}-{os.getpid()}-{time.time_ns()}.jsonl").open("w", buffering=1)


def mark(**fields: object) -> None:
    """Write something down."""
    _file.write(json.dumps(fields) + "\n")


mark(
    started=_started(),
    node=os.uname().nodename,
    rank=int(os.environ["RANK"]),
    world=int(os.environ["WORLD_SIZE"]),
    round=int(os.environ.get("SLURM_ELASTIC_ROUND", "-1")),
)
mark(reached="script", at=time.time())
