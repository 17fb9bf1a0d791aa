"""The scan of a command line without torch, against torch's parser."""

from __future__ import annotations

import pytest

from slurm_elastic.agent.option_table import GROUPS, OPTIONS, scan
from slurm_elastic.cli.commands.agent import agent_parser

VALUES = ("start", "preload", "nproc_per_node", "rdzv_id", "run_dir", "max_requeues", "grace", "warning")


@pytest.mark.parametrize(
    ("arguments", "script", "expected"),
    [
        ("train.py", "train.py", {}),
        ("train.py --start cold --run-id x", "train.py", {}),
        ("--start cold train.py", "train.py", {"start": "cold"}),
        ("--start=cold train.py", "train.py", {"start": "cold"}),
        ("--preload numpy,my.data train.py", "train.py", {"preload": "numpy,my.data"}),
        ("--nnodes 2:4 --max-restarts=3 -m package.train --start cold", "package.train", {}),
        ("-r 3 -t3 --standalone --virtual_local_rank train.py --start cold", "train.py", {}),
        # The value of an option is not taken for the script.
        ("--nnodes 2 --start cold train.py", "train.py", {"start": "cold"}),
        ("--nproc_per_node 4 --no_python ./train.sh", "./train.sh", {"nproc_per_node": "4"}),
        ("--run_id a --run-dir /my_data train.py", "train.py", {"rdzv_id": "a", "run_dir": "/my_data"}),
        ("--rdzv-id=a train.py", "train.py", {"rdzv_id": "a"}),
        ("--rdzv-id=a --run-id b train.py", "train.py", {"rdzv_id": "b"}),
        (
            "--max-requeues 3 --grace=7 --warning 9 train.py",
            "train.py",
            {"max_requeues": "3", "grace": "7", "warning": "9"},
        ),
        ("--virtual-local-rank -- -odd.py y", "-odd.py", {}),
        ("--help", None, {}),
        ("-h train.py", None, {}),
        ("--nnodes 2", None, {}),
        ("--nnodes", None, {}),
        ("", None, {}),
    ],
)
def test_what_a_command_line_gives(arguments: str, script: str | None, expected: dict[str, str]) -> None:
    found = scan(arguments.split(), {})
    assert found.script == script
    assert {name: value for name in VALUES if (value := found.value(name)) is not None} == expected


def test_what_the_environment_gives() -> None:
    environ = {
        "PET_START": "cold",
        "PET_PRELOAD": "numpy,",
        "PET_RDZV_ID": "a",
        "PET_RUN_DIR": "/data",
        "PET_MODULE": "1",
    }
    found = scan(["train"], environ)
    assert [found.value(name) for name in ("start", "rdzv_id", "run_dir", "grace")] == ["cold", "a", "/data", None]
    assert found.names("preload") == ("numpy",)
    assert found.has("module")
    assert not scan(["train"], {"PET_MODULE": "0"}).has("module")
    line = "--start warm --preload torchvision --run-id b --run-dir /c train.py"
    given = scan(line.split(), environ)
    assert [given.value(name) for name in ("start", "rdzv_id", "run_dir")] == ["warm", "b", "/c"]
    assert given.names("preload") == ("torchvision",)


def test_the_scan_agrees_with_the_parser_about_every_option() -> None:
    """A switch that the scan lacks would take the script for its value, and workers would start cold."""
    for action in agent_parser()._actions:
        for spelling in action.option_strings:
            takes_value = action.nargs != 0
            words = [spelling, "cold", "train.py"] if takes_value else [spelling, "train.py"]
            found = scan(words, {})
            if action.dest == "help":
                assert found.script is None
                continue
            assert found.script == "train.py", spelling
            assert found.values == {action.dest: "cold" if takes_value else ""}, spelling


def test_the_parser_has_every_option_of_the_table() -> None:
    known = {spelling for action in agent_parser()._actions for spelling in action.option_strings}
    assert known >= {spelling for option in OPTIONS for spelling in option.spellings}


def test_the_help_has_our_options_in_groups_and_then_those_of_torchrun() -> None:
    text = agent_parser().format_help()
    ours, torchruns = text.split("\noptions of torchrun ")
    assert all(f"\n{title}:\n" in ours for title in GROUPS)
    assert all(option.name in ours for option in OPTIONS)
    assert "--nnodes" in torchruns
    assert [option.name for option in OPTIONS if not option.switch and "default" not in option.help] == []
