"""The fixture elastic_run in a user's own tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
TESTS = """
import sys
from slurm_elastic.rehearsal import preempt

def test_begins_anew(elastic_run):
    result = elastic_run("trains.py", "no-resume", mishaps=[preempt(node=1, step=25)])
    wrong = {each.check for each in result.findings if each.level.value != "ok"}
    assert not result.ok
    assert {"resume.step", "steps.announced"} <= wrong
    assert {each.place.partition(":")[0] for each in result.findings if each.place} == {"trains.py"}
    assert result.plan.nodes == 2
    assert result.steps_lost >= 25
    assert result.losses[90] < result.losses[1]

def test_cannot_be_rehearsed(elastic_run):
    elastic_run("nowhere.py")
"""


def run(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "slurm_elastic.rehearsal.pytest_plugin"]
    environ = {**os.environ, "PYTHONPATH": str(HERE.parents[2]), "PET_LEARN_IMPORTS": "off", "TMPDIR": str(tmp_path)}
    # The plugin is named here, as the tests need no installed package.
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return subprocess.run([*command, *words], cwd=tmp_path, env=environ, capture_output=True, text=True)


def test_a_rehearsal_in_a_test(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "trains.py").write_text((HERE / "trains.py").read_text())
    done = run(tmp_path, "--elastic-nodes=2", "-q")
    assert re.search(r"1 failed, 1 passed", done.stdout), done.stdout
    assert "\nnowhere.py is no file; name a Python script\n" in done.stdout


def test_the_plugin_imports_nothing_before_a_test_uses_it(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\n"
        "def test_it():\n"
        "    ours = {name for name in sys.modules if name.startswith('slurm_elastic')}\n"
        "    lazy = {'slurm_elastic', 'slurm_elastic._lazy', 'slurm_elastic.rehearsal'}\n"
        "    assert ours == lazy | {'slurm_elastic.rehearsal.pytest_plugin'}\n"
        "    assert not {'torch', 'submitit', 'rich'} & set(sys.modules)\n"
    )
    done = run(tmp_path, "-q")
    assert done.returncode == 0, done.stdout
