"""What a worker records of its imports, and what ends that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slurm_elastic.agent.forkserver._import_learner import ImportRecord

WORKER = """\
import sys
from slurm_elastic.agent.forkserver._import_learner import ImportRecord, ImportRecorder
from slurm_elastic.agent.forkserver._imports import listen

record = ImportRecord()
listen(ImportRecorder(record, [{directory!r}]))
sys.path.insert(0, {directory!r})
exec(compile({script!r}, {file!r}, "exec"))
import last
print([line for line in record.lines() if line in {names!r}], record.end_reason(), sep="\\n")
"""
PACKAGES = {
    "outer": "import inner",
    "inner": "",
    "later": "",
    "last": "",
    "lazy": "import importlib\ndef use():\n    importlib.import_module('inner')\n",
    "sets": "import os\nos.environ['CHOICE'] = 'one'\ndef choose():\n    os.environ['CHOICE'] = 'another'\n",
}


def printed_by(code: str, packages: Path) -> str:
    """What a Python prints that has the packages in this directory."""
    for name, source in PACKAGES.items():
        (packages / f"{name}.py").write_text(source)
    environment = {"PYTHONPATH": f"{Path(__file__).parents[4]}:{packages}", "HOME": "/"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


@pytest.mark.parametrize(
    ("script", "modules", "changed"),
    [
        ("import outer, later", "outer inner later last", ""),
        ("import lazy; lazy.use()", "lazy inner last", ""),
        ("import own", "{directory}/own.py later last", ""),
        ("import outer, os\nos.environ['CHOICE'] = 'one'\nimport later", "outer inner", "CHOICE"),
        ("import os\nos.environ['CHOICE'] = 'one'\ndel os.environ['CHOICE']\nimport later", "later last", ""),
        ("import os\nos.environ['HOME'] = os.environ['HOME']\nimport later", "later last", ""),
        ("import sets\nsets.choose()\nimport later", "sets later last", ""),
        ("import outer, sys\nsys.path.append('/more')\nimport later", "outer inner", "sys.path"),
        ("import outer, os\nos.chdir('/')\nimport later", "outer inner", "the working directory"),
        ("import outer, os\nif os.fork() == 0:\n    import later\n    os._exit(0)\nos.wait()", "outer inner last", ""),
    ],
)
def test_record_has_imports_up_to_a_change_of_the_scripts(
    tmp_path: Path, script: str, modules: str, changed: str
) -> None:
    packages, directory = tmp_path / "site-packages", tmp_path / "place"
    for place in (packages, directory):
        place.mkdir()
    (directory / "own.py").write_text("import later")
    names = [*PACKAGES, f"{directory}/own.py"]
    file = str(directory / "train.py")
    code = WORKER.format(directory=str(directory), script=script, file=file, names=names)
    lines, reason = printed_by(code, packages).splitlines()
    assert list(dict.fromkeys(eval(lines))) == modules.format(directory=directory).split()
    line = script.count("\n") + 1
    shown = f"imports are learned up to later: {file}, line {line}, imports it after {changed} was changed"
    assert reason == (shown if changed else "")


@pytest.mark.parametrize(
    ("script", "seeded"),
    [
        ("import random; random.random(); import later", []),
        ("import random\nfor _ in range(5000): random.random()\nimport later", []),
        ("import random; random.seed(1); random.random(); import later, last", ["later", "last"]),
        ("import later, random; random.seed(1); import last", ["last"]),
    ],
)
def test_record_says_what_was_imported_after_a_seed(tmp_path: Path, script: str, seeded: list[str]) -> None:
    code = (
        "from slurm_elastic.agent.forkserver._import_learner import ImportRecord, ImportRecorder\n"
        "from slurm_elastic.agent.forkserver._imports import listen\n"
        f"record = ImportRecord()\nlisten(ImportRecorder(record, []))\n{script}\nimport inner\n"
        f"print([name for name in dict.fromkeys(record.seeded()) if name != 'inner'])\n"
    )
    packages = tmp_path / "site-packages"
    packages.mkdir()
    assert printed_by(code, packages) == f"{seeded}\n"


def test_a_full_record_has_an_end() -> None:
    record, longest = ImportRecord(), "x" * ((1 << 20) - 2)
    # With the second line it would be full to its last byte.
    record.append(longest)
    record.append("")
    assert record.lines() == [longest]
