"""A training script without torch, driven by files in its current directory.

It writes what it sees to ``seen/<round>.<rank>.json`` and then waits for one of:

- ``finish`` or ``finish.<rank>``: it ends well;
- ``fail.<round>.<rank>``: it ends with the exit code in the file, after printing a traceback;
- ``leave-child``: it first leaves a child in its process group.

Arguments: ``ignore-term`` makes it ignore SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    if "ignore-term" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    round_, rank = os.environ["SLURM_ELASTIC_ROUND"], os.environ["RANK"]
    if Path("leave-child").exists():
        subprocess.Popen(["/bin/sleep", "300"])
    seen = Path("seen")
    seen.mkdir(exist_ok=True)
    # The field starttime, proc_pid_stat(5), by which it is known from another process with the same number.
    began = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    record = {"pid": os.getpid(), "began": began, "argv": sys.argv[1:], "env": dict(os.environ)}
    # Whoever has seen the record may end this process at once.
    print(f"working in round {round_}", flush=True)
    part = seen / f".{round_}.{rank}.{os.getpid()}"
    part.write_text(json.dumps(record))
    part.rename(seen / f"{round_}.{rank}.json")
    fail = Path(f"fail.{round_}.{rank}")
    while True:
        if fail.exists():
            print("Traceback (most recent call last):\nValueError: told to fail", file=sys.stderr, flush=True)
            return int(fail.read_text())
        if Path("finish").exists() or Path(f"finish.{rank}").exists():
            return 0
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
