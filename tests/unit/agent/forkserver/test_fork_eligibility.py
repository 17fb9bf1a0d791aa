from __future__ import annotations

import pytest

from slurm_elastic.agent.forkserver._fork_eligibility import is_read_at_import, obstacle_to_warm_start
from slurm_elastic.agent.forkserver.worker_command import FUNCTION, Program

PROGRAM = Program("/python", ("-u", "train.py"))
COMMAND = ["/python", "-u", "train.py", "x"]
WARM = {"HOME": "/home", "OMP_NUM_THREADS": "1"}


def test_same_program_and_environment() -> None:
    assert obstacle_to_warm_start(PROGRAM, WARM, COMMAND, WARM) is None


def test_what_an_agent_gives_its_workers_is_no_obstacle() -> None:
    given = {
        **WARM,
        "RANK": "3",
        "MASTER_ADDR": "node1",
        "TORCHELASTIC_RUN_ID": "7",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "CUDA_VISIBLE_DEVICES": "0",
        "SLURM_ELASTIC_ROUND": "2",
    }
    assert obstacle_to_warm_start(PROGRAM, WARM, COMMAND, given) is None


@pytest.mark.parametrize(
    ("command", "environment", "reason"),
    [
        (["/bin/echo", "x"], WARM, "the workers' command is /bin/echo x, the fork server was"),
        (["/python", "-u", "-m", "train"], WARM, "started for /python -u train.py"),
        (FUNCTION.command(), WARM, "the workers' command is"),
        (COMMAND, {"HOME": "/home"}, "OMP_NUM_THREADS is unset for the worker, and was '1' for the fork"),
        (
            COMMAND,
            {**WARM, "LD_PRELOAD": "x"},
            "LD_PRELOAD is 'x' for the worker, and was unset",
        ),
    ],
)
def test_obstacles(command: list[str], environment: dict[str, str], reason: str) -> None:
    found = obstacle_to_warm_start(PROGRAM, WARM, command, environment)
    assert found is not None
    assert reason in found
    assert "\n" not in found


def test_variables_read_at_import() -> None:
    for name in ("PYTHONPATH", "PYTHONHASHSEED", "LD_LIBRARY_PATH", "TORCH_DISTRIBUTED_DEBUG", "TZ", "LC_ALL", "LANG"):
        assert is_read_at_import(name)
    for name in (
        "PATH",
        "TORCHELASTIC_ERROR_FILE",
        "TORCH_FR_BUFFER_SIZE",
        "TORCH_NCCL_TRACE_BUFFER_SIZE",
        "NCCL_DEBUG",
        "LOCAL_RANK",
    ):
        assert not is_read_at_import(name)
