"""A worker that hangs on one node of three."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from tests.planted_faults import planted

HERE = Path(__file__).parent
ALL = ["n1", "n2", "n3"]
TIMEOUT = 4.0
"""Seconds; three workers on two cores that others use as well may take some for one step."""


def test_a_hang_costs_one_restart_and_every_health_port_answers_throughout(jobs):
    for name in ("hanging.py", "asking.py"):
        jobs.place(HERE / name)
    options = (f"--hang-timeout={TIMEOUT:g}", "--max-restarts=1", "--health-bind=0.0.0.0")
    job = jobs.submit("--nodes=3", "elastic.sbatch", *options, "hanging.py")
    health = job.run_dir / "health"
    job.wait_until("not all health ports are published", lambda: len(list(health.glob("[!.]*.json"))) == 3)
    targets = sorted(json.loads(path.read_text())[0]["targets"][0] for path in health.glob("[!.]*.json"))
    assert [target.partition(":")[0] for target in targets] == ALL

    job.wait_until("no round trains", lambda: trained(job.directory, 0) == 3)
    suspend(job, TIMEOUT + 1)

    answers = jobs.directory / "answers"
    with answers.open("w") as file:
        asking = jobs.cluster.popen(["python3", "asking.py", *targets], cwd=jobs.directory, stdout=file)
        try:
            job.wait_until("no answers", lambda: {node for node, *_ in told(answers)} == {*ALL})
            (jobs.directory / "hang").touch()
            job.wait_until("no second round trains", lambda: trained(job.directory, 1) == 3)
            before = len(told(answers))
            job.wait_until("no more answers", lambda: {node for node, *_ in told(answers)[before:]} == {*ALL})
        finally:
            (jobs.directory / "asked").touch()
            asking.wait(timeout=60)
    job.finish()

    # Of the worker that hangs, or of one that waits for it and was found first.
    hangs = job.events("worker_hung")
    assert hangs
    hung_after = int((job.directory / "hung_after").read_text())
    for hang in hangs:
        assert hang["steps"] == hung_after + (hang["rank"] != 2)
        assert hang["seconds"] >= TIMEOUT
        assert f"process {hang['pid']}," in Path(hang["stacks"]).read_text()
    # One restart for all, and the rank that is behind is named, whoever told first.
    assert [round_["restarts"] for round_ in job.rounds()] == [0, 1]
    assert job.tables()[1] == ALL
    behind = f"; rank 2 is behind: {hung_after} steps in this round, others {hung_after + 1}"
    ended = job.events("round_ended")[0]
    assert behind in ended["text"]
    assert ended["stragglers"] == [{"rank": 2, "node": "n3"}]
    assert job.action(of_round=0) == planted("a rank that hangs before a step").action
    for rank, node in enumerate(ALL):
        logs = job.run_dir / "logs" / "round_0000" / node / f"rank_{rank:02}"
        # The collective of a rank whose node finds the hang more than a second later has failed by then.
        places = ["stacks.txt"] if rank == 2 else ["stacks.txt", "stderr.log"]
        assert any('hanging.py", line' in (logs / name).read_text() for name in places)
        assert json.loads((logs / "flight_recorder.json").read_text())["entries"]

    assert {(node, status) for node, status, _ in told(answers)} == {(node, "200") for node in ALL}
    slowest = max(float(taken) for _, _, taken in told(answers))
    print(f"slowest of {len(told(answers))} answers: {slowest:.0f} ms")


def suspend(job, seconds: float) -> None:
    """`scontrol suspend` for so long, which nobody takes for a hang."""
    job.cluster.command(["scontrol", "suspend", str(job.id)], user="root")
    # slurmstepd sends SIGTSTP, which stops the agents, and 2 s later stops or freezes whatever the job has.
    job.wait_until("not all stand still", lambda: states(job.cluster) <= {"T", "D"})
    time.sleep(seconds)
    job.cluster.command(["scontrol", "resume", str(job.id)], user="root")


def states(cluster) -> set[str]:
    """Of all processes that have to do with the training, as in proc_pid_stat(5)."""
    found = set()
    for process in (process for node in ALL for process in cluster.processes(node)):
        # It may have ended meanwhile.
        with contextlib.suppress(OSError):
            if "hanging.py" in process.command:
                found.add(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0])
    return found


def told(answers: Path) -> list[list[str]]:
    """What asking.py has written: node, status and milliseconds of each answer."""
    text = answers.read_text()
    return [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]


def trained(directory: Path, round_: int) -> int:
    """How many ranks have taken steps in a round."""
    return sum(len(path.read_text().splitlines()) > 3 for path in directory.glob(f"trained/{round_}.*"))
