from __future__ import annotations

import argparse
import sys
from types import SimpleNamespace

import pytest

from slurm_elastic.cli.agent_parser import agent_parser
from slurm_elastic.errors import UsageError


def _shown(parser: argparse.ArgumentParser, shell: str) -> str:
    verbs = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction)).choices
    options = [name for action in verbs["agent"]._actions for name in action.option_strings]
    return f"{shell} {parser.prog} {' '.join(verbs)} {' '.join(options)}"


def test_completion_is_that_of_slurm_elastic(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every release of torch; torch 2.14 has the option, too, and prints the completion of torchrun."""
    monkeypatch.setitem(sys.modules, "shtab", SimpleNamespace(complete=_shown, SUPPORTED_SHELLS=["bash", "zsh"]))
    with pytest.raises(SystemExit) as end:
        agent_parser().parse_args(["--print-completion", "zsh"])
    assert end.value.code == 0
    words = capsys.readouterr().out.split()
    assert words[:2] == ["zsh", "slurm-elastic"]
    assert {"agent", "drain", "--hang-timeout", "--nproc-per-node"} <= set(words)


def test_completion_without_shtab_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(UsageError, match="--print-completion needs the package shtab; pip install shtab"):
        agent_parser().parse_args(["--print-completion", "bash"])
