"""Every mistake is one line of one class, before anything is submitted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic.errors import UsageError
from slurm_elastic.submission.executor import ElasticExecutor
from slurm_elastic.submission.sbatch import submit


def test_mistakes_are_the_errors_that_submitit_raises(login_node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NameError, match="no parameter 'timeout_mim'"):
        ElasticExecutor("runs").update_parameters(timeout_mim=3)
    with pytest.raises(ValueError, match="is no number of nodes"):
        ElasticExecutor("runs", max_nodes=0)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(RuntimeError, match=r"no sbatch in PATH.*LocalElasticExecutor"):
        ElasticExecutor("runs")
    with pytest.raises(UsageError, match="no sbatch in PATH; submit from a machine of the cluster"):
        submit()


LOCK = threading.Lock()


def _hold() -> None:
    LOCK.acquire()


_hold.__module__ = "__main__"


def _executor(**parameters: Any) -> ElasticExecutor:
    executor = ElasticExecutor("runs", 2, 4)
    executor.update_parameters(**parameters)
    return executor


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "unpicklable": (lambda: _executor().submit(_hold), "cannot be pickled: .*lock"),
    "large": (
        lambda: ElasticExecutor("runs", 1, 1, max_pickle_size_gb=1e-6).submit(print, bytes(2**16)),
        "max_pickle_size_gb",
    ),
    "no folder": (lambda: ElasticExecutor("/proc/none", 1, 1).submit(print), "cannot be made"),
    "min above max": (lambda: ElasticExecutor("runs", 4, 2), "lower the least or raise the most"),
    "half a node": (lambda: ElasticExecutor("runs", 1, 2.5), "no number of nodes"),  # type: ignore[arg-type]
    "nodes twice": (lambda: _executor(slurm_nodes=3), "given twice"),
    "shape": (lambda: ElasticExecutor("runs", shape="ring"), "neither allocation .* nor array"),  # type: ignore[arg-type]
    "workers": (lambda: ElasticExecutor("runs", workers_per_node=0), "workers_per_node=0"),
    "restarts": (lambda: ElasticExecutor("runs", max_restarts=-1), "negative"),
    "tasks": (lambda: _executor(tasks_per_node=8), "--ntasks-per-node .*workers_per_node"),
    "no srun": (lambda: _executor(slurm_use_srun=False), "first node only"),
    "gpus per task": (lambda: _executor(slurm_gpus_per_task=1), "gpus_per_node"),
    "parallelism": (lambda: _executor(slurm_array_parallelism=2), "array-parallelism"),
    "own array": (lambda: _executor(slurm_additional_parameters={"array": "0-3"}), 'shape="array"'),
    "own output": (lambda: _executor(slurm_additional_parameters={"output": "x"}), "the executor sets output"),
    "unknown": (lambda: _executor(slurm_partitoin="low"), "did you mean partition"),
    "twice": (lambda: _executor(timeout_min=5, slurm_time=6), "both mean time"),
    "setup": (lambda: _executor(slurm_setup="module load cuda"), "give a list"),
    "delay": (lambda: _executor(slurm_signal_delay_s="90"), "no number of seconds"),
    "agent's nodes": (lambda: ElasticExecutor("runs", agent_arguments=["--nnodes=2"]), "min_nodes and max_nodes"),
    "agent's words": (lambda: ElasticExecutor("runs", agent_arguments=["--interface", "ib0"]), "--name=value"),
    "element's folder": (lambda: ElasticExecutor("runs/%a", shape="array"), "leave %a out"),
    "no script": (lambda: _executor().submit_script("tain.py"), "no script .*did you mean train.py"),
    "number as argument": (lambda: _executor().submit_script("train.py", "--lr", 1e-3), "is no text"),  # type: ignore[arg-type]
    "no template": (lambda: ElasticExecutor("runs", template="none.sbatch").submit(print), "template none.sbatch"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_refused_before_anything_is_submitted(name: str, login_node: Path) -> None:
    Path("train.py").touch()
    act, words = MISTAKES[name]
    with pytest.raises(UsageError, match=words) as caught:
        act()
    assert "\n" not in str(caught.value)
    assert not login_node.exists()
    assert [path.name for path in Path("runs").glob("*")] == []


def test_sbatch_says_why_it_refuses(login_node: Path) -> None:
    with pytest.raises(UsageError, match="sbatch refused the job: invalid partition specified: nope"):
        _executor().submit(print)
    assert login_node.exists()
    assert list(Path("runs").iterdir()) == []


def test_parameters_stay_as_they_were_after_a_mistake(login_node: Path) -> None:
    executor = _executor(timeout_min=7)
    with pytest.raises(UsageError):
        executor.update_parameters(timeout_min=8, tasks_per_node=2)
    assert executor.parameters == {"time": 7}
