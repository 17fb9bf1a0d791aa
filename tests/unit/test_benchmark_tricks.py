"""A benchmark of what a trick pays measures the package without that trick, and with all else."""

from __future__ import annotations

import filecmp
from pathlib import Path

import pytest

from benchmarks.tricks import TRICKS, copy_without

PACKAGE = Path(__file__).parents[2] / "slurm_elastic"


@pytest.mark.parametrize("name", TRICKS)
def test_a_copy_lacks_one_trick(name: str, tmp_path: Path) -> None:
    copy_without(name, tmp_path)
    copied = tmp_path / "slurm_elastic"
    files = [str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py")]
    _same, different, errors = filecmp.cmpfiles(PACKAGE, copied, files, shallow=False)
    assert (different, errors) == ([TRICKS[name].file], [])
    compile((copied / TRICKS[name].file).read_text(), name, "exec")
