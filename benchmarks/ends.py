"""How long workers need to end, and whether one hangs, for ten shapes of scripts, beside torchrun.

    python -m benchmarks.ends [--ends 200] [--torchrun-ends 40] [--runs 1] [--json FILE] [--only SHAPE,...]

Each shape is one run of two workers on this machine, which end in each round by themselves, with exit code 1, so that
the agent starts them again. Workers of slurm_elastic are forked with torch alone (`warm`), and with all that the script
imports (`learned`). An end is the time from the last statement of the script until the process is gone. With `--runs`
there are several such runs at a time, which load the machine for each other.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from benchmarks import sandbox
from benchmarks.launchers import PYTHON, Launcher
from benchmarks.options import add_parts, make_parser
from benchmarks.tables import Bar, Results, Table, seconds
from tests.local.waiting import process_state

SCRIPT = Path(__file__).with_name("scripts") / "shapes.py"
SHAPES = (
    "in-a-local",
    "in-an-object",
    "in-a-global",
    "never-destroyed",
    "destroyed-at-exit",
    "with-dynamo",
    "with-spawned-loaders",
    "with-threads",
    "with-work-outstanding",
    "fully-sharded",
)
CONTROL = "hangs"
HANG = 10.0
"""Seconds after which an end is one of a worker that hangs."""
WORKERS = 2
# Each round ends with the same failure on purpose, after which a run would end.
OURS = ("slurm_elastic", "agent", "--stop-on-same-failure=off")
LAUNCHERS = {
    "warm": (*OURS, "--learn-imports=off"),
    "learned": OURS,
    "torchrun": ("torch.distributed.run", "--standalone"),
}


def main() -> int:
    """Measure."""
    parser = make_parser("ends")
    parser.add_argument("--ends", type=int, default=200, help="of each shape, for each kind of start (default: 200)")
    parser.add_argument("--torchrun-ends", type=int, default=40, help="the same under torchrun (default: 40)")
    parser.add_argument("--runs", type=int, default=1, help="at a time (default: 1)")
    add_parts(parser, *SHAPES)
    options = parser.parse_args()
    sandbox.enter("benchmarks.ends")
    results, shapes = Results.of("ends"), (*options.only, CONTROL)
    columns = ["shape", *(f"{name}: {what}" for name in LAUNCHERS for what in ("ends", "longest", "hung"))]
    wanted = {
        (shape, name): WORKERS if shape == CONTROL else options.torchrun_ends if name == "torchrun" else options.ends
        for shape in shapes
        for name in LAUNCHERS
    }
    loads: list[float] = []
    with ThreadPoolExecutor(options.runs) as pool:
        found = {key: pool.submit(ends, key[1], key[0], number) for key, number in wanted.items()}
        for (shape, name), future in found.items():
            seen = future.result()
            loads.append(os.getloadavg()[0])
            print(f"{shape}, {name}: {len(seen)} ends, longest {max(seen, default=0):.1f} s", flush=True)
    note = (
        f"Seconds; median of the load, as the kernel counts it in the last minute: {median(loads):.1f}. "
        f"The row of {CONTROL} is a script that needs 20 s for its end: such a one is seen."
    )
    runs = "one run" if options.runs == 1 else f"{options.runs} runs"
    table = Table(f"Ends of workers, {runs} at a time", columns, note=note)
    hung = missing = 0
    for shape in shapes:
        row: list[str | int | None] = [shape]
        for name in LAUNCHERS:
            seen = found[shape, name].result()
            late = sum(end > HANG for end in seen)
            row += [len(seen), seconds(max(seen, default=None)), late]
            if name != "torchrun" and shape != CONTROL:
                hung, missing = hung + late, missing + wanted[shape, name] - len(seen)
        table.rows.append(row)
    results.add(table)
    results.bars.append(Bar.at_most("no worker of slurm_elastic hangs at its end", hung, 0, "of them"))
    results.bars.append(Bar.at_most("each of its ends was seen", missing, 0, "missing"))
    return results.finish(options.json)


def ends(name: str, shape: str, wanted: int) -> list[float]:
    """Return the seconds of so many ends of workers."""
    with tempfile.TemporaryDirectory(prefix="ends-") as made:
        directory = Path(made)
        (directory / "ends").mkdir()
        environ = {**os.environ, "XDG_STATE_HOME": str(directory / "state"), "OMP_NUM_THREADS": "1"}
        environ["PYTHONPATH"] = str(Path(__file__).parents[1])
        if name == "torchrun":
            environ |= Launcher.TUNED.environment
        restarts = f"--max-restarts={wanted // WORKERS - 1}"
        command = [str(PYTHON), "-m", *LAUNCHERS[name], restarts, f"--nproc-per-node={WORKERS}"]
        with (directory / "log").open("w") as log:
            process = subprocess.Popen(
                [*command, str(SCRIPT), shape, str(directory / "ends")],
                cwd=directory, env=environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            found = dict(watch(process, directory / "ends"))
        if len(found) < wanted:
            print((directory / "log").read_text()[-2000:], file=sys.stderr)
        return list(found.values())


def watch(process: subprocess.Popen[bytes], directory: Path) -> Iterator[tuple[int, float]]:
    """Yield each worker that has written down its end and is gone, with the seconds between."""
    ending: dict[int, float] = {}
    seen: set[int] = set()
    while True:
        is_over = process.poll() is not None
        for path in directory.iterdir():
            text = path.read_text()
            if int(path.name) not in seen and text:
                seen.add(int(path.name))
                ending[int(path.name)] = float(text)
        for pid in [pid for pid in ending if (process_state(pid) or "Z")[0] == "Z"]:
            yield pid, time.time() - ending.pop(pid)
        if is_over and not ending:
            return
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())
