from __future__ import annotations

import pytest

from slurm_elastic.cli.agent_scan import Glance, glance


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("train.py", Glance("train.py")),
        ("train.py --start cold --run-id x", Glance("train.py")),
        ("--start cold train.py", Glance("train.py", start="cold")),
        ("--start=cold train.py", Glance("train.py", start="cold")),
        ("--preload numpy,my.data train.py", Glance("train.py", preload=("numpy", "my.data"))),
        ("--nnodes 2:4 --max-restarts=3 -m package.train --start cold", Glance("package.train")),
        ("-r 3 -t3 --standalone --virtual_local_rank train.py --start cold", Glance("train.py")),
        # The value of an option is not taken for the script.
        ("--nnodes 2 --start cold train.py", Glance("train.py", start="cold")),
        ("--nproc_per_node 4 --no_python ./train.sh", Glance("./train.sh", nproc_per_node="4")),
        ("--run_id a --run-dir /data train.py", Glance("train.py", run_id="a", run_dir="/data")),
        ("--rdzv-id=a train.py", Glance("train.py", run_id="a")),
        ("--help", Glance()),
        ("--nnodes 2", Glance()),
        ("--nnodes", Glance()),
        ("", Glance()),
    ],
)
def test_arguments(arguments: str, expected: Glance) -> None:
    assert glance(arguments.split(), {}) == expected


def test_environment() -> None:
    environ = {
        "PET_START": "cold",
        "PET_PRELOAD": "numpy",
        "PET_NPROC_PER_NODE": "gpu",
        "PET_RDZV_ID": "a",
        "PET_RUN_DIR": "/data",
    }
    assert glance(["train.py"], environ) == Glance("train.py", "cold", ("numpy",), "gpu", "a", "/data")
    given = "--start warm --preload torchvision --nproc-per-node 2 --run-id b --run-dir /c train.py"
    assert glance(given.split(), environ) == Glance("train.py", "warm", ("torchvision",), "2", "b", "/c")
