from __future__ import annotations

import pytest

from slurm_elastic.agent.forkserver._fork_eligibility import Launch, is_read_at_import, obstacle_to_warm_start
from slurm_elastic.agent.forkserver.worker_command import FUNCTION, Program

PROGRAM = Program("/python", ("-u", "train.py"))
COMMAND = ["/python", "-u", "train.py", "x"]
WARM = Launch({"HOME": "/home", "OMP_NUM_THREADS": "1"}, "/home/run")


def test_same_program_and_environment() -> None:
    assert obstacle_to_warm_start(PROGRAM, WARM, COMMAND, WARM) is None


def test_what_an_agent_gives_its_workers_is_no_obstacle() -> None:
    given = {
        **WARM.environment,
        "RANK": "3",
        "MASTER_ADDR": "node1",
        "TORCHELASTIC_RUN_ID": "7",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "CUDA_VISIBLE_DEVICES": "0",
        "SLURM_ELASTIC_ROUND": "2",
    }
    assert obstacle_to_warm_start(PROGRAM, WARM, COMMAND, Launch(given, "/home/run")) is None


@pytest.mark.parametrize(
    ("command", "environment", "directory", "reason"),
    [
        (["/bin/echo", "x"], WARM.environment, "/home/run", "the entry point is '/bin/echo x', the fork server was"),
        (["/python", "-u", "-m", "train"], WARM.environment, "/home/run", "started for '/python -u train.py'"),
        (FUNCTION.command(), WARM.environment, "/home/run", "the entry point is a function"),
        (COMMAND, WARM.environment, "/other", "the working directory is /other, that of the fork server /home/run"),
        (COMMAND, {"HOME": "/home"}, "/home/run", "OMP_NUM_THREADS is unset for the worker, and was '1' for the fork"),
        (
            COMMAND,
            {**WARM.environment, "LD_PRELOAD": "x"},
            "/home/run",
            "LD_PRELOAD is 'x' for the worker, and was unset",
        ),
    ],
)
def test_obstacles(command: list[str], environment: dict[str, str], directory: str, reason: str) -> None:
    found = obstacle_to_warm_start(PROGRAM, WARM, command, Launch(environment, directory))
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
