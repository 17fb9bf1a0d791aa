"""To its script a warm worker is the `python -u train.py` that torchrun starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from slurm_elastic.agent.forkserver.worker_command import Program
from tests.local.forkserver.helpers.workplace import Workplace, comparable, result_of

SCRIPTS = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "scripts").glob("*.py"))}
SCRIPTS["syntax_error"] = 'print("never printed"\n'
EXIT_CODES = {
    "broken_pipe": 1,
    "exception": 1,
    "exit_at_once": 7,
    "exit_message": 1,
    "exit_number": 3,
    "import_error": 1,
    "interrupted": -2,
    "killed": -9,
    "recorded": 1,
    "segmentation_fault": -11,
    "syntax_error": 1,
    "terminated": -15,
}
"""Of the scripts that do not end with 0. Two runs that fail alike, but where they should not, would compare equal."""
ARGUMENTS = ["--lr", "1e-3", "\u00e4rger\udcff", ""]
ENVIRONMENT = {"GIVEN": "\u00fc\udcfe", "LONG": "x" * 100_000, "TORCHELASTIC_RUN_ID": "seven"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    directory = tmp_path_factory.mktemp("script")
    preload = ["numpy.random"] if find_spec("numpy") else []
    made = Workplace(directory, arguments=ARGUMENTS, preload=preload, with_torch=True)
    yield made
    made.close()


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_runs_as_under_torchrun(place: Workplace, script: str, caplog: pytest.LogCaptureFixture) -> None:
    place.script.write_text(SCRIPTS[script])
    plain = place.run_plain(ARGUMENTS, ENVIRONMENT)
    warm = place.run_warm(ARGUMENTS, ENVIRONMENT)
    assert "cold" not in caplog.text
    assert comparable(warm) == comparable(plain)
    assert warm.code == EXIT_CODES.get(script, 0), warm.stderr


def test_module_runs_as_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("import sys\nprint('package', sys.argv)\n")
    (package / "__main__.py").write_text(SCRIPTS["main_module"] + "print(sys.argv, sys.path[:2])\n1 / 0\n")
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(Workplace(tmp_path, program=Program.script("package", ["x"], module=True))) as place:
        plain, warm = comparable(place.run_plain(["x"])), comparable(place.run_warm(["x"]))
    assert warm == plain
    assert "ZeroDivisionError" in warm.stderr


def test_directory_runs_as_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "__main__.py").write_text(SCRIPTS["main_module"] + "print(sys.argv, sys.path[:2])\n")
    with contextlib.closing(Workplace(tmp_path, program=Program.script(str(tmp_path)))) as place:
        assert comparable(place.run_warm()) == comparable(place.run_plain())


def test_random_numbers_are_fresh(place: Workplace) -> None:
    pytest.importorskip("numpy")
    place.script.write_text(
        "import random, numpy, torch, multiprocessing\n"
        "print([random.random(), numpy.random.rand(), torch.rand(1).item(), torch.initial_seed()])\n"
        "print(multiprocessing.current_process().authkey.hex())\n"
    )
    with place.running(workers=2) as context:
        result_of(context)
        outputs = [Path(context.stdouts[rank]).read_text() for rank in (0, 1)]
    outputs.append(place.run_warm().stdout)
    numbers = [word.strip("[],") for output in outputs for word in output.split()]
    assert len(set(numbers)) == len(numbers) == 15


def test_what_a_preload_sets_at_import_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "setting.py").write_text(
        "import os\n"
        "os.environ.setdefault('SET_BY_IMPORT', 'import')\n"
        "os.environ.setdefault('GIVEN_BY_AGENT', 'import')\n"
        "del os.environ['REMOVED_BY_IMPORT']\n"
    )
    monkeypatch.setenv("REMOVED_BY_IMPORT", "x")
    monkeypatch.setenv("REMOVED_BY_AGENT", "x")
    with contextlib.closing(Workplace(tmp_path, preload=["setting"], with_torch=True)) as place:
        monkeypatch.delenv("REMOVED_BY_AGENT")
        place.script.write_text(
            "import setting, os\n"
            "print(*(os.environ.get(n) for n in ('SET_BY_IMPORT', 'GIVEN_BY_AGENT', 'REMOVED_BY_IMPORT')))\n"
            "print(os.environ.get('REMOVED_BY_AGENT'))\n"
        )
        ended = place.run_warm(environment={"GIVEN_BY_AGENT": "agent"})
        assert ended == place.run_plain(environment={"GIVEN_BY_AGENT": "agent"})
    assert ended.stdout.startswith("import agent None\nNone\n")


def test_own_site_customization_runs_once_and_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text("import sys\nsys.customized = sys.argv[1:]\n")
    monkeypatch.setenv("PYTHONPATH", f"{hooks}::{tmp_path}")
    with contextlib.closing(Workplace(tmp_path)) as place:
        place.script.write_text(
            "import os, sys\nprint('sitecustomize' in sys.modules)\n"
            "import sitecustomize\nprint(sys.customized, sys.path, os.environ['PYTHONPATH'], sitecustomize)\n"
        )
        assert place.run_warm() == place.run_plain()
