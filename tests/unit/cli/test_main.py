from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_elastic import __version__
from slurm_elastic.cli import main
from slurm_elastic.cli.commands.agent import agent_parser, require_version
from slurm_elastic.cli.commands.job_end import JobEnd
from slurm_elastic.cli.commands.rehearse import Rehearse
from slurm_elastic.cli.main import commands
from slurm_elastic.errors import UsageError
from tests.conftest import Cli

ROOT = Path(__file__).parents[3]
HELP = """
import sys
from slurm_elastic.cli import main

try:
    main({arguments!r})
except SystemExit as end:
    assert not end.code
slow = {{"torch", "submitit", "etcd3", "rich", "msgspec", "numpy", "asyncio"}}
commands = [name for name in sys.modules if name.startswith("slurm_elastic.cli.commands.")]
print(sorted(slow & {{name.partition(".")[0] for name in sys.modules}}), len(commands), file=sys.stderr)
"""


def refused(directory: Path, *words: str, before: str = "", **environ: str) -> str:
    """Start a command that has to fail before it does anything, and return what it says."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PET_", "LOGLEVEL"))}
    done = subprocess.run(
        ["bash", "-c", f'{before} exec "$0" -m slurm_elastic "$@"', sys.executable, *words],
        cwd=directory,
        env={**clean, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


@pytest.mark.parametrize(
    "words",
    ["--help", "template allocation"]
    + [f"{name} --help" for name in ("doctor", "drain", "coordinator", "rehearse", "submit", "job-end")],
)
def test_help_imports_nothing_slow_and_no_other_command(words: str) -> None:
    program = HELP.format(arguments=words.split())
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    slow, loaded = done.stderr.rsplit(maxsplit=1)
    assert slow == "[]"
    assert loaded == "1" or words == "--help"
    assert "slurm-elastic" in done.stdout


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    text = capsys.readouterr().err
    assert all(f"\n  {command.name} " in text for command in commands())
    assert "\nexamples:\n  slurm-elastic example digits > digits.py" in text
    assert "'slurm-elastic COMMAND --help' describes a command" in text


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("agnt", "no command 'agnt'; did you mean agent?"),
        (
            "x",
            "no command 'x'; the commands are agent, checkpoints, coordinator, doctor, drain, example, grow, job-end, "
            "list, logs, rehearse, report, requeue, resize, shrink, status, submit, template, top",
        ),
        ("--versoin", "no option --versoin; did you mean --version?"),
        ("--bogus agent", "no option --bogus; see slurm-elastic --help"),
        ("drain", "the following arguments are required: RUN; see slurm-elastic drain --help"),
        ("drain 12 --runn-dir x", "no option --runn-dir; did you mean --run-dir?"),
        ("requeue --run-di", "argument --run-dir: expected one argument; see slurm-elastic requeue --help"),
        ("requeue 12 13", "unrecognized arguments: 13; see slurm-elastic requeue --help"),
        ("store --nnodse 2", "no option --nnodse; did you mean --nnodes?"),
        ("submit --nodes", "--nodes lacks its value"),
        ("submit --dry-rnu --nodes 2 train.py", "no option --dry-rnu; did you mean --dry-run?"),
        ("submit --partition=x --max-restrats 3 train.py", "no option --max-restrats; did you mean --max-restarts?"),
        ("template alocation", "no template 'alocation'; did you mean allocation?"),
        ("example digit", "no example 'digit'; did you mean digits?"),
        ("verdict x", "the status 'x' is neither an exit code nor wait; see slurm-elastic job-end --help"),
    ],
)
def test_a_mistake_is_one_line(cli: Cli, arguments: str, line: str) -> None:
    assert cli(2, arguments) == ("", f"slurm-elastic: error: {line}\n")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("", "the following arguments are required: training_script; see slurm-elastic agent --help"),
        ("--max-restrats 3 train.py", "no option --max-restrats; did you mean --max-restarts?"),
        ("--rum_dir=x train.py --lr 1", "no option --rum_dir; did you mean --run_dir?"),
        ("-r3 -t 0 --bogus train.py", "no option --bogus; see slurm-elastic agent --help"),
        ("--lr train.py", "no option --lr; see slurm-elastic agent --help"),
        ("-z train.py", "no option -z; see slurm-elastic agent --help"),
        ("--grace", "argument --grace: expected one argument; see slurm-elastic agent --help"),
        (
            # One option is cut short, and what follows the script is the script's.
            "--max-restarts=x --max-req 1 --no-health train.py --strange",
            "argument --max-restarts/--max_restarts: invalid int value: 'x'; see slurm-elastic agent --help",
        ),
    ],
)
def test_a_mistake_in_options_of_the_agent_is_one_line(arguments: str, line: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(line)}$"):
        agent_parser().parse_args(arguments.split())


SHADOWING = [
    word
    for name in ("val", "valid", "snapshot", "w", "lead", "health", "stop", "notif", "on", "n", "help", "nodes", "max")
    for word in (f"--{name}", "0.1", f"--{name}=0.1")
]
"""Options of a script that are, or begin, options of ours and of torchrun."""


@pytest.mark.parametrize("before", [[], ["--max-restarts", "3", "--no-health"], ["--max-req=1", "-r3"], ["--"]])
@pytest.mark.parametrize("more", [SHADOWING, ["--", *SHADOWING, "--"], ["-h"], []])
def test_words_of_a_script_are_its_own(before: list[str], more: list[str]) -> None:
    given = agent_parser().parse_args([*before, "train.py", *more])
    assert (given.training_script, given.training_script_args) == ("train.py", more)


def test_words_of_a_script_stay_as_they_are_in_other_commands() -> None:
    parsers = (Rehearse().parser(), JobEnd().parser())
    for parser, word in zip(parsers, ("train.py", "0"), strict=True):
        assert parser.parse_args([word, *SHADOWING]).arguments == SHADOWING
    assert Rehearse().parser().parse_args(["--nodes", "4", "train.py", "--no", "4"]).nodes == "4"


def test_no_torch_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    (tmp_path / "train.py").touch()
    assert refused(tmp_path, "submit", "--start=cold", "train.py", PYTHONPATH=f"{tmp_path}:{ROOT}") == (
        "slurm-elastic: error: torch cannot be imported: No module named 'torch'; install it: pip install "
        "'torch>=2.11'\n"
    )


@pytest.mark.parametrize(("command", "kind"), [("template", "sbatch"), ("example", "py")])
def test_templates_and_examples_are_listed_and_printed(command: str, kind: str, cli: Cli) -> None:
    folder = {"template": ROOT / "sbatch_templates", "example": ROOT / "docs/examples"}[command]
    names = [line.split()[0] for line in cli(0, command).out.splitlines()]
    assert names == sorted(path.stem for path in folder.glob(f"*.{kind}"))
    for name in names:
        assert cli(0, command, name).out == (folder / f"{name}.{kind}").read_text()


@pytest.mark.parametrize("start", ["warm", "cold"])
def test_too_few_descriptors_are_one_line(tmp_path: Path, start: str) -> None:
    (tmp_path / "train.py").touch()
    (said,) = refused(tmp_path, "agent", f"--start={start}", "train.py", before="ulimit -n 32 &&").splitlines()
    assert said.startswith("slurm-elastic: error: the limit on open files is 32 here (ulimit -Hn), and an agent")


def test_an_agent_of_another_version_than_its_batch_script_refuses(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_ELASTIC_BATCH_VERSION", "slurm-elastic 0.0.1")
    assert cli(2, "agent train.py").err == (
        f"slurm-elastic: error: the agents are of version {__version__}, and the batch script has slurm-elastic 0.0.1; "
        "install the same version in the image of the agents and outside\n"
    )
    environ = {"SLURM_ELASTIC_BATCH_VERSION": f"slurm-elastic {__version__}", "A": "1"}
    require_version(environ)
    assert environ == {"A": "1"}


@pytest.mark.parametrize("given", [None, "2"])
def test_imports_of_the_agent_start_no_pool_of_threads_and_leave_the_environment_alone(given: str | None) -> None:
    pytest.importorskip("numpy")
    program = """
import os
from slurm_elastic.cli.commands.agent import _fast_imports

before = dict(os.environ)
with _fast_imports():
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


def test_a_current_directory_that_was_removed_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "the current directory cannot be used (No such file or directory)" in cli(2, "status 7").err


def test_a_script_that_is_not_there_costs_no_import_of_torch(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "torch.py").write_text("print('torch is imported')\n")
    (tmp_path / "train.py").touch()

    def agent(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "slurm_elastic", "agent", *words]
        environ = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *sys.path])}
        return subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    refused = agent("--max-restarts=3", "--run-dir", ".", "tran.py", "--epochs=1")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == (
        f"slurm-elastic: error: no script {tmp_path}/tran.py on localhost; did you mean train.py?\n"
    )
    # Where the scan does not know an option, the word after it may be its value, or the script.
    assert "torch is imported" in agent("--mistyped", "train.py", "tran.py").stdout
