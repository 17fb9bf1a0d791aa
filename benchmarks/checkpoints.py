"""What the digests of a checkpoint cost a training that starts from it.

    python -m benchmarks.checkpoints [--json FILE]

A checkpoint of 1 GiB is loaded with its digests, and as one of an earlier release, which has none: from the disk of
TMPDIR, and from the memory of the kernel. One process, no Slurm.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.options import make_parser
from benchmarks.tables import Bar, Results, Table, median
from slurm_elastic.snapshot.disk.stored import Stored

_TENSORS, _MIB = 256, 4
_TIMES = 15


def main() -> int:
    """Measure and show."""
    options = make_parser("checkpoints").parse_args()
    results = Results.of("checkpoints")
    torch.set_num_threads(1)
    table = Table(
        f"Loading a checkpoint of {_TENSORS * _MIB} MiB (s)",
        ["", "with digests", "without", "ratio"],
        note=f"Medians of {_TIMES} times in turns, and of their ratios.",
    )
    ratios: list[float | None] = []
    with tempfile.TemporaryDirectory() as directory:
        checked, unchecked = _written(Path(directory))
        for name, is_cold in (("from the disk", True), ("from the memory of the kernel", False)):
            pairs = [(_seconds(checked, is_cold), _seconds(unchecked, is_cold)) for _ in range(_TIMES)]
            ratios.append(median(one / other for one, other in pairs))
            columns = [median(column) or 0.0 for column in zip(*pairs, strict=True)]
            table.rows.append([name, *(f"{seconds:.2f}" for seconds in columns), f"{ratios[-1]:.2f}"])
    results.add(table)
    results.bars.append(Bar.at_most("digests cost a load from the disk at most 5 %", ratios[0], 1.05, "times"))
    return results.finish(options.json)


def _written(directory: Path) -> tuple[Path, Path]:
    """Write the checkpoint; returns its path, and that of a copy without digests."""
    script = (
        "import torch; from slurm_elastic import snapshot;"
        f"state = {{f'weight{{number}}': torch.randn({_MIB} << 18) for number in range({_TENSORS})}};"
        "snapshot.to_disk('checkpoints', keep=1); snapshot.load(**state); snapshot.save(1, **state)"
    )
    # It is written when the process ends.
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, "-c", script], cwd=directory, env=environment, check=True)
    (path,) = [path for path in (directory / "checkpoints").iterdir() if path.is_dir()]
    copy = Path(shutil.copytree(path, directory / "unchecked"))
    description = json.loads((copy / "snapshot.json").read_text())
    for name in ("digest", "records", "pieces"):
        del description[name]
    (copy / "snapshot.json").write_text(json.dumps(description))
    return path, copy


def _seconds(path: Path, is_cold: bool) -> float:
    for file in path.iterdir():
        with file.open("rb") as opened:
            os.fdatasync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED if is_cold else os.POSIX_FADV_WILLNEED)
    begin = time.perf_counter()
    Stored(path)
    return time.perf_counter() - begin


if __name__ == "__main__":
    raise SystemExit(main())
