from __future__ import annotations

import sys

import pytest

from slurm_elastic.cli.agent_scan import Glance, glance


def seen(
    warm: bool = True, preload: tuple[str, ...] = (), run_id: str | None = None, run_dir: str | None = None
) -> Glance:
    return Glance(warm, preload, run_id, run_dir)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("train.py", seen()),
        ("train.py --start cold --run-id x", seen()),
        ("--start cold train.py", seen(warm=False)),
        ("--start=cold train.py", seen(warm=False)),
        ("--preload numpy,my.data train.py", seen(preload=("numpy", "my.data"))),
        ("--nnodes 2:4 --max-restarts=3 -m package.train --start cold", seen()),
        ("-r 3 -t3 --standalone --virtual_local_rank train.py --start cold", seen()),
        # The value of an option is not taken for the script.
        ("--nnodes 2 --start cold train.py", seen(warm=False)),
        ("--no-python ./train.sh", seen(warm=False)),
        ("--no_python ./train.sh", seen(warm=False)),
        ("--run_id a --run-dir /data train.py", seen(run_id="a", run_dir="/data")),
        ("--rdzv-id=a train.py", seen(run_id="a")),
        ("--help", seen(warm=False)),
        ("--nnodes 2", seen(warm=False)),
        ("--nnodes", seen(warm=False)),
        ("", seen(warm=False)),
    ],
)
def test_arguments(arguments: str, expected: Glance) -> None:
    assert glance(arguments.split(), {}) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"PET_START": "cold"}, seen(warm=False)),
        ({"PET_NO_PYTHON": "1"}, seen(warm=False)),
        ({"PET_NO_PYTHON": "0"}, seen()),
        ({"PET_PRELOAD": "numpy"}, seen(preload=("numpy",))),
        ({"PET_RDZV_ID": "a", "PET_RUN_DIR": "/data"}, seen(run_id="a", run_dir="/data")),
        ({"PYTHON_EXEC": "/usr/bin/other"}, seen(warm=False)),
        ({"PYTHON_EXEC": sys.executable}, seen()),
    ],
)
def test_environment(environ: dict[str, str], expected: Glance) -> None:
    assert glance(["train.py"], environ) == expected


def test_the_command_line_has_precedence() -> None:
    assert glance(["--start", "warm", "--run-id", "b", "t.py"], {"PET_START": "cold", "PET_RDZV_ID": "a"}) == seen(
        run_id="b"
    )
