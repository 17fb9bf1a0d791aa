"""What a user of the Python interface does, in a process of the ordinary user: one scenario, its outcome as JSON.

submitting.py SCENARIO
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import slurm_elastic

FOLDER = "runs"


def train(word: str) -> dict[str, Any]:
    """A function of the submitting script itself: it reaches the workers by value."""
    import submitit
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    rank = submitit.JobEnvironment().global_rank
    assert rank == dist.get_rank()
    print(f"rank {rank} trained", flush=True)
    dist.destroy_process_group()
    return {"word": word, "rank": rank, "total": total.item(), "node": os.environ["SLURM_ELASTIC_NODE"]}


def fail_on_last(word: str) -> None:
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        raise ValueError(f"told to {word}")


def count(steps: int) -> dict[str, Any]:
    """Count up to `steps` with a checkpoint, and say in how many rounds."""
    path, enough = Path("count.json"), Path("enough")
    state = json.loads(path.read_text()) if path.exists() else {"steps": 0, "starts": 0}
    state["starts"] += 1
    print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} counts", flush=True)
    while state["steps"] < steps and not enough.exists():
        state["steps"] += 1
        if os.environ["RANK"] == "0":
            part = Path(f"count.{os.getpid()}")
            part.write_text(json.dumps(state))
            part.replace(path)
        time.sleep(0.1)
    names = ("RANK", "WORLD_SIZE", "SLURM_ELASTIC_NODE", "SLURM_ELASTIC_REASON")
    return {**state, **{name: os.environ[name] for name in names}}


def results() -> dict[str, Any]:
    """Values by rank of a function, of one that was imported with torch loaded, and of a script."""
    # A process with these imported is nothing that its jobs inherit from.
    import google.protobuf  # noqa: F401
    import torch  # noqa: F401

    executor = slurm_elastic.ElasticExecutor(FOLDER, min_nodes=2, max_nodes=2, workers_per_node=2)
    executor.update_parameters(timeout_min=5, slurm_partition="low")
    of_function = executor.submit(train, "hello")
    Path("script.py").write_text("import os, sys\nprint('argv', *sys.argv[1:], 'of', os.environ['WORLD_SIZE'])\n")
    executor = slurm_elastic.ElasticExecutor(FOLDER, workers_per_node=2)
    of_script = executor.submit_script("script.py", "--lr", "1e-3")
    return {
        "function": of_function.results(),
        "first": of_function.result(),
        "third": of_function.task(2).result(),
        "own output": of_function.task(3).stdout(),
        "output": sorted((of_function.stdout() or "").splitlines()),
        "exception": of_function.exception(),
        "script": of_script.results(),
        "printed": sorted((of_script.stdout() or "").splitlines()),
        "states": [_final_state(of_function), _final_state(of_script)],
    }


def failure() -> dict[str, Any]:
    """How the failure of a worker arrives."""
    executor = slurm_elastic.ElasticExecutor(f"{FOLDER}/%j", workers_per_node=2)
    job = executor.submit(fail_on_last, "fail")
    try:
        job.result()
    except slurm_elastic.WorkerFailedError as error:
        return {
            "rank": error.rank,
            "node": error.node,
            "exit_code": error.exit_code,
            "text": str(error),
            "exception": str(job.exception()),
            "state": _final_state(job),
        }
    return {}


def cancel() -> dict[str, Any]:
    """A run that is cancelled."""
    executor = slurm_elastic.ElasticExecutor(FOLDER)
    job = executor.submit(count, 10**6)
    # Accounting knows of a start some time after it.
    _wait_for(lambda: job.task(0).stdout() is not None and job.get_info("force").get("State") == "RUNNING")
    job.cancel()
    return {"exception": str(job.exception()), "state": _final_state(job), "done": job.done()}


def array() -> dict[str, Any]:
    """An array is one run; one of its elements is preempted."""
    executor = slurm_elastic.ElasticExecutor(FOLDER, min_nodes=1, max_nodes=2, shape="array")
    job = executor.submit(count, 10**6)
    Path("job_id").write_text(job.job_id)
    _wait_for(Path("look").exists)
    state = job.get_info("force")["State"]
    Path("enough").touch()
    return {"before": state, "results": job.results(), "state": _final_state(job), "output": job.stdout()}


def preempted() -> dict[str, Any]:
    """A run of two nodes that is preempted, and comes back."""
    executor = slurm_elastic.ElasticExecutor(FOLDER, min_nodes=1, max_nodes=2)
    # No time limit, so that Slurm does not tell when a grace ends.
    executor.update_parameters(slurm_time=0)
    job = executor.submit(count, 10**6)
    Path("job_id").write_text(job.job_id)
    result = job.result()
    return {"result": result, "state": _final_state(job)}


def _final_state(job: Any) -> str:
    """Slurm ends a job a moment after its run."""
    _wait_for(lambda: job.get_info("force").get("State", "") not in ("", "RUNNING", "COMPLETING", "PENDING"))
    return str(job.state)


def _wait_for(condition: Any) -> None:
    while not condition():
        time.sleep(0.2)


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
