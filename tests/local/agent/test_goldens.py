"""A run with every kind of event, and what it leaves: events, workers' variables, files, pages, exit codes."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cli
from tests.goldens import check
from tests.local.agent.test_health import ask, status, target
from tests.local.agents import Allocation, allocation, eventually

Allocate = Callable[..., Allocation]
SCRIPT = str(Path(__file__).parent / "scripts" / "golden_worker.py")


def test_a_run_with_every_event(allocate: Allocate, tmp_path: Path, cli: Cli) -> None:
    nodes = allocate(4)
    options = ("--nnodes=1:3", "--max-restarts=1")
    first, second, third = nodes.start_led(*options, nodes=3, script=[SCRIPT])
    # Rank 1 hangs in round 0, is killed, and all workers start again.
    nodes.seen(1)
    fourth = nodes.start(4, *options, script=[SCRIPT])
    first.expect("waits as a spare")
    where = target(nodes, 2)
    eventually(lambda: status(where)["state"] == "training", nodes.log)
    pages = {"status": sorted(keys(status(where))), "metrics": metrics(ask(where, "/metrics")[1])}
    # A node is lost and the spare takes its place; the leader is lost; the next leader leaves with notice.
    third.kill()
    number = nodes.comes_to([agent.node for agent in (first, second, fourth)], after=1)
    nodes.formed(number)
    first.kill()
    number = nodes.comes_to([second.node, fourth.node], after=number)
    leaving, last = (second, fourth) if nodes.leader() == second.node else (fourth, second)
    leaving.signal(signal.SIGTERM)
    left = leaving.wait()
    nodes.comes_to([last.node], after=number)
    nodes.touch("finish")
    finished = last.wait()

    directory = tmp_path / "failing"
    directory.mkdir()
    with allocation(directory, 1, job_id="8") as failing:
        failing.touch("fail")
        agent = failing.start(1, script=[SCRIPT])
        failed = agent.wait()
        usage = failing.start(1, "--nnodes=none", script=[SCRIPT]).wait()
        unfit = failing.start(1, "--node-check=false", script=[SCRIPT], SLURM_RESTART_COUNT="1").wait()
        files = layout(nodes.run_dir, failing.run_dir)
        records = [*nodes.events(), *failing.events()]
        progress = [*progress_of(nodes), *progress_of(failing)]
        followed_by_commands(tmp_path, directory, cli)

    check("run_exit_codes", {"finished": finished, "left": left, "failed": failed, "usage": usage, "unfit node": unfit})
    check("run_events", events(records))
    check("run_progress", events(progress))
    check("run_files", files)
    check("run_worker_variables", variables(nodes))
    check("run_pages", pages)


def followed_by_commands(finished: Path, failed: Path, cli: Cli) -> None:
    """What the commands that show a run say about both, read from what real agents have written."""

    def said(code: int, *words: str) -> str:
        return cli(code, *words, "--run-dir", str(finished if words[1] == "7" else failed)).out

    assert said(0, "status", "7").startswith("run 7: finished")
    status_ = said(1, "status", "8")
    assert "root cause: rank 0 on 127.0.0.1\n" in status_
    assert "exit code 3" in status_
    lines = said(0, "logs", "7").splitlines()
    # Each worker of each round prints one line.
    assert {re.sub(r"[0-9]+/[0-9]+", "", line.partition(" ")[2]) for line in lines} == {"[127.0.0.] trains"}
    assert all(re.match(r"\d\d:\d\d:\d\d\.\d{3} ", line) for line in lines)
    assert "root cause: rank 1 on 127.0.0.2\n" in said(0, "logs", "7", "--errors")
    told = json.loads(said(0, "report", "7", "--json"))
    assert sum(told["goodput"]["seconds"].values()) == pytest.approx(told["goodput"]["node_seconds"], rel=0.01)
    # The script begins with step 1 in every round, so that the steps of the last round alone count.
    assert told["goodput"]["seconds"]["wasted_progress"] > 0
    counted = [each for each in told["rounds"] if each["last_step"] is not None]
    assert [each["redone_steps"] for each in counted] == [*(each["last_step"] for each in counted[:-1]), 0]


def events(records: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The names of events, and the fields that they have at some time."""
    found: dict[str, set[str]] = {}
    for record in records:
        found.setdefault(record["event"], set()).update(record)
    return {name: sorted(fields) for name, fields in found.items()}


def progress_of(nodes: Allocation) -> list[dict[str, Any]]:
    """The records of all agents' progress, those of a worker as kinds of their own."""
    paths = sorted((nodes.run_dir / "progress").glob("*.jsonl"))
    found = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    workers = [worker for record in found for worker in record.get("workers", ()) if record["event"] == "workers_ended"]
    return [*found, *({"event": "workers_ended: workers[]", **worker} for worker in workers)]


def variables(nodes: Allocation) -> list[str]:
    """The variables that agents give to their workers, with their values where these are the same in every run."""
    seen = nodes.seen(1)
    inherited = nodes.environment(1)
    names = {name for record in seen.values() for name in record["env"] if name not in inherited}
    # Set by the C library's locale coercion in every Python that is not executed in a locale (PEP 538).
    names -= {"LC_CTYPE"}
    chosen = {name: record["env"].get(name) for record in list(seen.values())[:1] for name in names}
    constant = re.compile(r"[A-Za-z_]+|[0-9]")
    return sorted(f"{name}={text}" if constant.fullmatch(text or "") else name for name, text in chosen.items())


def layout(*directories: Path) -> dict[str, list[str]]:
    """The files of run directories, with placeholders for what differs, and the keys of those with JSON."""
    found: dict[str, set[str]] = {}
    for directory in directories:
        for path in directory.rglob("*"):
            if path.is_file():
                name = path.relative_to(directory).as_posix()
                for pattern, placeholder in PLACEHOLDERS:
                    name = re.sub(pattern, placeholder, name)
                found.setdefault(name, set())
                # The modes of other files follow from the umask.
                if path.name in ("secret", "health-token"):
                    found[name].add(f"mode {path.stat().st_mode & 0o777:04o}")
                if path.suffix == ".json":
                    found[name] |= set(keys(json.loads(path.read_text())))
    return {name: sorted(content) for name, content in found.items()}


PLACEHOLDERS = (
    (r"127\.0\.0\.\d", "<node>"),
    (r"round_\d{4}", "round_<number>"),
    (r"rank_\d{2}", "rank_<rank>"),
    (r"\d{6}\.json", "<number>.json"),
    (r"(^|/)[78]\.0(?=[./])", r"\1<job>.<restart>"),
    (r"<node>\.[78]\.", "<node>.<job>."),
)


def keys(content: Any, above: str = "") -> Iterator[str]:
    """The keys of JSON, with those above them; elements of a list are one."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield f"{above}{key}"
            yield from keys(value, f"{above}{key}.")
    elif isinstance(content, list):
        for value in content:
            yield from keys(value, above.removesuffix(".") + "[].")


def metrics(page: str) -> list[str]:
    """The metrics of a page of Prometheus, with their types and labels."""
    types = dict(re.findall(r"^# TYPE (slurm_elastic_\w+) (\w+)$", page, flags=re.MULTILINE))
    labels = {
        name: re.findall(r"(\w+)=", given or "")
        for name, given in re.findall(r"^(slurm_elastic_\w+)(?:\{(.*)\})? ", page, flags=re.MULTILINE)
    }
    return sorted(f"{name} {kind} {' '.join(labels.get(name, []))}".rstrip() for name, kind in types.items())
