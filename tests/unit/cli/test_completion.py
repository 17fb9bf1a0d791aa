from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_elastic.cli import main
from slurm_elastic.cli.commands.agent import agent_parser
from slurm_elastic.cli.main import commands
from slurm_elastic.errors import UsageError

COMMANDS = {command.name: command for command in commands()}

COMPLETE = """
source "$1"
shift
[ "$(complete -p slurm-elastic)" = "complete -o bashdefault -F _shtab_slurm_elastic slurm-elastic" ] || exit 1
COMP_WORDS=(slurm-elastic "$@") COMP_CWORD=$#
_shtab_slurm_elastic slurm-elastic "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""
"""What bash does when the tabulator is pressed after the words; prints what it would offer."""


def printed(shell: str, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main([*words, "--print-completion", shell])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("shtab")
    text = subprocess.run(
        [sys.executable, "-m", "slurm_elastic", "--print-completion", "bash"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    path = tmp_path_factory.mktemp("completion") / "slurm-elastic"
    path.write_text(text)
    return path


def offered(script: Path, *words: str, cwd: Path | None = None) -> list[str]:
    """What bash offers for the last word, which is not complete."""
    done = subprocess.run(
        ["bash", "--norc", "-c", COMPLETE, "bash", str(script), *words],
        cwd=cwd or script.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.split()


def test_bash_completes_every_command(script: Path) -> None:
    assert offered(script, "") == list(COMMANDS)
    assert offered(script, "d") == ["doctor", "drain"]
    assert set(offered(script, "--")) == {"--help", "--print-completion", "--version"}


@pytest.mark.parametrize("name", COMMANDS)
def test_bash_completes_every_option_of_a_command(script: Path, name: str) -> None:
    """Every option that the command's own parser has, in the spelling with dashes."""
    parser = COMMANDS[name].parser()
    known = {option for option in parser._option_string_actions if option.startswith("--") and "_" not in option}
    found = set(offered(script, name, "--"))
    assert known <= found
    assert name in ("doctor", "submit") or known == found
    assert not [option for option in found if "_" in option]


def test_bash_completes_the_options_of_sbatch_and_of_the_agent(script: Path) -> None:
    assert {"--partition", "--time", "--checkpoint"} <= set(offered(script, "doctor", "--"))
    options = set(offered(script, "submit", "--"))
    assert {"--partition", "--time", "--dry-run", "--shape", "--max-restarts", "--hang-timeout"} <= options
    # `submit` refuses these.
    assert not {"--nnodes", "--standalone", "--node-rank", "--master-port"} & options


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (("agent", "--start", ""), ["cold", "warm"]),
        (("agent", "--max-restarts", "3", "t"), ["train.py"]),
        (("submit", "--shape", "a"), ["allocation", "array"]),
        (("requeue", "--run-dir", "s"), ["shared"]),
        (("template", "all"), ["allocation"]),
        (("example", "dig"), ["digits"]),
    ],
)
def test_bash_completes_values_and_files(
    script: Path, tmp_path: Path, words: tuple[str, ...], values: list[str]
) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "shared").mkdir()
    assert sorted(offered(script, *words, cwd=tmp_path)) == values


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_reads_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    path = tmp_path / "_slurm-elastic"
    path.write_text(printed("zsh", capsys))
    assert path.read_text().startswith("#compdef slurm-elastic\n")
    done = subprocess.run(["zsh", "-f", "-n", str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    # zsh's own completion loads it by this name.
    load = f"fpath=({tmp_path} $fpath); autoload -U compinit; compinit -u -D; whence -v $_comps[slurm-elastic]"
    done = subprocess.run(["zsh", "-f", "-c", load], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("_slurm-elastic is an autoload shell function")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_prints_the_same(script: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    if name in ("agent", "coordinator"):
        # These would make this process an agent, which records signals.
        with pytest.raises(SystemExit, match=r"^0$"):
            COMMANDS[name].parser().parse_args(["--print-completion", "bash"])
        assert capsys.readouterr().out == script.read_text()
    else:
        assert printed("bash", capsys, name) == script.read_text()


def test_completion_without_shtab_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(UsageError, match="--print-completion needs the package shtab; pip install shtab"):
        agent_parser().parse_args(["--print-completion", "bash"])
