"""The training script of :mod:`benchmarks.recovery`, the same under every launcher: 50 ms steps with an all-reduce.

    training.py DIRECTORY [idle]

Writes JSON lines to a file of its own in DIRECTORY: when its process was started, and when each step was done. All
times are this machine's clock, which all nodes of the test cluster share. With `idle` it only sleeps.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

_STEP = 0.05


def main() -> None:
    """Train until killed."""
    directory, idle = Path(sys.argv[1]), sys.argv[2:] == ["idle"]
    with (directory / f"{os.uname().nodename}-{os.getpid()}-{time.time_ns()}.jsonl").open("w", buffering=1) as log:
        begun = {"started": _started(), "node": os.uname().nodename, "rank": int(os.environ["RANK"])}
        print(json.dumps({**begun, "world": int(os.environ["WORLD_SIZE"])}), file=log)
        if idle:
            while True:
                signal.pause()
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        while True:
            time.sleep(_STEP)
            dist.all_reduce(torch.ones(1))
            print(json.dumps({"step": time.time()}), file=log)


def _started() -> float:
    """When the kernel started this process, in seconds since 1970 (proc(5): clock ticks since boot)."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


if __name__ == "__main__":
    main()
