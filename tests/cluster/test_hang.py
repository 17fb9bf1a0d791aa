"""A worker that hangs on one node of four."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

HERE = Path(__file__).parent
TIMEOUT = 4.0
"""Seconds; four workers on two cores that others use as well may take some for one step."""


def test_a_hang_costs_one_restart_and_every_health_port_answers_throughout(jobs):
    for name in ("hanging.py", "asking.py"):
        jobs.place(HERE / name)
    options = (f"--hang-timeout={TIMEOUT:g}", "--max-restarts=1", "--health-bind=0.0.0.0")
    job = jobs.submit("--nodes=4", "elastic.sbatch", *options, "hanging.py")
    health = job.run_dir / "health"
    job.wait_until("not all health ports are published", lambda: len(list(health.glob("[!.]*.json"))) == 4)
    targets = sorted(json.loads(path.read_text())[0]["targets"][0] for path in health.glob("[!.]*.json"))
    assert [target.partition(":")[0] for target in targets] == ["n1", "n2", "n3", "n4"]

    with (jobs.directory / "answers").open("w") as answers:
        asking = jobs.cluster.popen(["python3", "asking.py", *targets], cwd=jobs.directory, stdout=answers)
        try:
            job.wait_until("no second round trains", lambda: trained(job.directory, 1) == 4)
        finally:
            (jobs.directory / "asked").touch()
            asking.wait()
    job.say_enough()
    job.wait_for("COMPLETED")

    # Stacks first, of the worker that hangs.
    hangs = {event["rank"]: event for event in job.events("worker_hung")}
    hang = hangs[2]
    assert hang["steps"] == 9
    assert f"process {hang['pid']}," in Path(hang["stacks"]).read_text()
    hung_at = float((job.directory / "hung_at").read_text())
    found = datetime.fromisoformat(hang["time"]).timestamp() - hung_at
    assert found < TIMEOUT + 0.5, f"found after {found:.2f} s"
    # One restart for all, and the rank that is behind is named, whoever told first.
    assert [round_["restarts"] for round_ in job.rounds()] == [0, 1]
    assert job.tables()[1] == ["n1", "n2", "n3", "n4"]
    assert "; rank 2 is behind: 9 steps in this round, others 10" in job.events("round_ended")[0]["text"]

    told = [line.split() for line in (jobs.directory / "answers").read_text().splitlines()]
    assert {(node, status) for node, status, _ in told} == {(node, "200") for node in ("n1", "n2", "n3", "n4")}
    assert len(told) > 4 * 20
    print(f"slowest of {len(told)} answers: {max(float(taken) for _, _, taken in told):.0f} ms")


def trained(directory: Path, round_: int) -> int:
    """How many ranks have taken steps in a round."""
    return sum(len(path.read_text().splitlines()) > 3 for path in directory.glob(f"trained/{round_}.*"))
