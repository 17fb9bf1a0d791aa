"""`checkpoint()` of a callable: what it returns runs in the next round."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from slurm_elastic import LocalElasticExecutor
from tests.local.submission.conftest import eventually


def _counter(steps: int, enough: Path) -> Any:
    """A callable as submitit's users write them, which reaches the workers by value."""
    import submitit

    class Counter:
        def __init__(self) -> None:
            self.step, self.history = 0, []

        def __call__(self, word: str) -> dict[str, Any]:
            import os
            import time

            self.history.append((int(os.environ["WORLD_SIZE"]), self.step, word))
            print("counting", flush=True)
            while self.step < steps and not enough.exists():
                time.sleep(0.05)
                self.step += 1
            return {"history": self.history, "step": self.step}

        def checkpoint(self, word: str) -> submitit.helpers.DelayedSubmission:
            assert __import__("os").environ["RANK"] == "0"
            return submitit.helpers.DelayedSubmission(self, f"{word}+")

    return Counter()


def test_next_round_runs_what_checkpoint_returned(runs: Path, tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    executor = LocalElasticExecutor(runs, min_nodes=1, max_nodes=2)
    executor.update_parameters(timeout_min=10)
    job = executor.submit(_counter(10**6, enough), "first")

    def table(round_: int) -> dict[str, Any] | None:
        path = job.run_dir.path / f"rounds/{round_:06d}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def of_two() -> dict[str, Any] | None:
        found = table(job.run_dir.last_round() or 0)
        return found if found is not None and found["world_size"] == 2 else None

    both = eventually(of_two, job)
    logs = f"logs/round_{both['round']:04d}/*/*/stdout.log"
    eventually(lambda: [path.read_text() for path in job.run_dir.path.glob(logs)] == ["counting\n"] * 2, job)
    endpoint = next(job.run_dir.path.glob("endpoints/*.json"))
    leader = json.loads(endpoint.read_text())["agent"]
    (leaving,) = {place["agent"] for place in both["places"]} - {leader}
    os.kill(int(leaving.rpartition("/")[2]), signal.SIGTERM)
    eventually(lambda: table(both["round"] + 1), job)
    enough.touch()

    history = job.result()["history"]
    assert [size for size, _step, _word in history][-2:] == [2, 1]
    assert [word for _size, _step, word in history] == ["first" + "+" * n for n in range(len(history))]
    steps = [step for _size, step, _word in history]
    assert steps == sorted(steps)
    assert steps[-1] > 0
    assert job.num_tasks == 1
