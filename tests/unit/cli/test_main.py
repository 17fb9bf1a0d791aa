from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_elastic import __version__
from slurm_elastic.cli import main

HELP = """
import sys
from slurm_elastic.cli import main

try:
    main({arguments!r})
except SystemExit as end:
    assert not end.code
slow = {{"torch", "submitit", "etcd3", "rich", "msgspec", "numpy", "asyncio"}}
print(sorted(slow & {{name.partition(".")[0] for name in sys.modules}}), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["drain", "--help"],
        ["etcd", "--help"],
        ["store", "--help"],
        ["submit", "--help"],
        ["template", "--help"],
        ["verdict", "--help"],
    ],
)
def test_help_imports_nothing_slow(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELP.format(arguments=arguments)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == "[]\n"
    assert "slurm-elastic" in done.stdout


def test_help_names_every_verb_and_gives_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--help"])
    text = capsys.readouterr().out
    for verb in ("agent", "drain", "etcd", "requeue", "store", "submit", "template", "verdict"):
        assert f"\n  {verb} " in text
    assert "examples:\n  slurm-elastic template allocation > elastic.sbatch" in text


def test_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "slurm_elastic", "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"slurm-elastic {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "the following arguments are required: VERB, arguments; see slurm-elastic --help"),
        (["agnt"], "no verb 'agnt'; did you mean agent?"),
        (["x"], "no verb 'x'; there are agent, drain, etcd, requeue, store, submit, template, verdict"),
        (["--bogus", "agent"], "unrecognized arguments: --bogus; see slurm-elastic --help"),
        (["template", "alocation"], "no template 'alocation'; did you mean allocation?"),
        (["template", "--bogus"], "unrecognized arguments: --bogus; see slurm-elastic template --help"),
        (["verdict", "x"], "argument status: invalid int value: 'x'; see slurm-elastic verdict --help"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], line: str) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr() == ("", f"slurm-elastic: error: {line}\n")


def test_templates_are_listed_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["template"]) == 0
    assert capsys.readouterr().out == (
        "allocation    One run in one job: one elastic agent on each node of the allocation\n"
        "array         One run in a job array: every element brings its nodes, and comes and goes alone\n"
        "etcd          A private etcd for one run, for sites without an etcd of their own\n"
        "store         A small job that leads a run from where it is not preempted; the run's own nodes come and go\n"
    )
    assert main(["template", "allocation"]) == 0
    shipped = Path(__file__).parents[3] / "sbatch_templates" / "allocation.sbatch"
    assert capsys.readouterr().out == shipped.read_text()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "no script {here}/missing.py on localhost; give its path, on a disk that all nodes share"),
        ({"LOGLEVEL": "loud"}, "LOGLEVEL='loud' is no level; set it to DEBUG, INFO, WARNING or ERROR, or unset it"),
    ],
)
def test_an_agent_that_cannot_start_says_so_in_one_line(tmp_path: Path, environ: dict[str, str], message: str) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PET_", "LOGLEVEL"))}
    done = subprocess.run(
        [sys.executable, "-m", "slurm_elastic", "agent", "--start", "cold", "missing.py"],
        cwd=tmp_path,
        env={**clean, "PYTHONPATH": str(Path(__file__).parents[3]), **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"slurm-elastic: error: {message.format(here=tmp_path)}\n"
    assert list(tmp_path.iterdir()) == []


def test_only_the_verb_that_is_asked_for_is_imported() -> None:
    program = """
import sys
from slurm_elastic.cli import main

main(["template", "allocation"])
print(sorted({"slurm_elastic.cli.agent", "slurm_elastic.cli.submit"} & sys.modules.keys()), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "[]\n"


@pytest.mark.parametrize("given", [None, "2"])
def test_imports_of_the_agent_start_no_pool_of_threads_and_leave_the_environment_alone(given: str | None) -> None:
    program = """
import os
from slurm_elastic.cli.agent import _quick_imports

before = dict(os.environ)
with _quick_imports():
    import numpy
print(os.environ == before, len(os.listdir("/proc/self/task")))
"""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    if given is not None:
        environment["OPENBLAS_NUM_THREADS"] = given
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    same, threads = done.stdout.split()
    assert same == "True"
    assert given is not None or threads == "1"
