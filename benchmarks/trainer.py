"""What the trainer API costs a training script.

    python -m benchmarks.trainer [--json FILE]

The question of every step, outside of a run and as a worker; the import; and, as two ranks that do nothing else than
asking meet it, the one wait in which the agents agree on the step to stop at. No Slurm and no network: between nodes,
their round trips come on top of that wait.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.options import make_parser
from benchmarks.tables import Bar, Results, Table, median
from slurm_elastic.control.agent_side import RoundControl

_ROOT = Path(__file__).parents[1]
_CALLS, _BATCHES = 1000, 2000
_IMPORTS = 21
_STOPS = 21

_ASKING = f"""
import time
from slurm_elastic import trainer

def nothing(step=None):
    return None

def batches(call):
    taken = []
    for _ in range({_BATCHES}):
        begin = time.perf_counter_ns()
        for step in range({_CALLS}):
            call(step)
        taken.append((time.perf_counter_ns() - begin) / {_CALLS})
    taken.sort()
    print(taken[len(taken) // 2], taken[len(taken) * 99 // 100])

batches(nothing)
batches(trainer.should_stop)
"""
_IMPORTING = """
import sys, time
for name in sys.argv[1:]:
    __import__(name)
begin = time.perf_counter()
import slurm_elastic.trainer
print((time.perf_counter() - begin) * 1000)
"""
_STEPPING = """
import time
from slurm_elastic import trainer
print(flush=True)
stop = None
while stop is None:
    begin, stop = time.monotonic(), trainer.should_stop(1)
print(time.monotonic() - begin)
"""


def main() -> int:
    """Measure and show."""
    options = make_parser("trainer").parse_args()
    results = Results.of("trainer")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        _ask(results, Path(directory))
        _import(results)
        _stop(results, Path(directory))
    return results.finish(options.json)


def _ask(results: Results, directory: Path) -> None:
    outside = _run(_ASKING, {}).split()
    inside = _run(_ASKING, RoundControl(directory, 0, 1).environment(0)).split()
    table = Table(
        "One question, should_stop(step) (ns)",
        ["", "median", "99 of 100"],
        note=f"Of {_BATCHES} times {_CALLS} calls, the loop around them included.",
    )
    for name, values in (
        ("a function that does nothing", outside[:2]),
        ("outside of a run", outside[2:]),
        ("as a worker", inside[2:]),
    ):
        table.rows.append([name, *(f"{float(value):.0f}" for value in values)])
    results.add(table)
    results.bars.append(Bar.at_most("a question takes at most 1 µs", float(inside[2]) / 1000, 1.0, "µs"))


def _import(results: Results) -> None:
    table = Table(
        "Import of slurm_elastic.trainer (ms)",
        ["", "median", "longest"],
        note=f"Of {_IMPORTS} fresh interpreters. Almost every program has imported typing before.",
    )
    for name, modules in (("as the first", ()), ("after typing", ("typing",))):
        taken = [float(_run(_IMPORTING, {}, *modules)) for _ in range(_IMPORTS)]
        table.rows.append([name, f"{median(taken):.1f}", f"{max(taken):.1f}"])
    results.add(table)


def _stop(results: Results, directory: Path) -> None:
    agreed, waited = [], []
    for number in range(_STOPS):
        control = RoundControl(directory, number, 2)
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", _STEPPING], env=_environment(control.environment(rank)), stdout=subprocess.PIPE
            )
            for rank in range(2)
        ]
        for rank in ranks:
            assert rank.stdout is not None
            rank.stdout.readline()
        begin = time.monotonic()
        step = control.hold()
        assert step is not None
        control.stop_at(step + 1, "preempted")
        agreed.append((time.monotonic() - begin) * 1000)
        waited += [float(rank.communicate()[0]) * 1000 for rank in ranks]
    table = Table(
        "A stop on one node with two ranks (ms)",
        ["", "median", "longest"],
        note=f"Of {_STOPS} rounds.",
    )
    table.rows.append(["the agent: hold and stop_at", f"{median(agreed):.2f}", f"{max(agreed):.2f}"])
    table.rows.append(["a rank: its last question", f"{median(waited):.2f}", f"{max(waited):.2f}"])
    results.add(table)


def _run(script: str, environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, env=_environment(environment), stdout=subprocess.PIPE, text=True, check=True).stdout


def _environment(added: dict[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_ELASTIC_")}
    return {**kept, "PYTHONPATH": str(_ROOT), **added}


if __name__ == "__main__":
    sys.exit(main())
