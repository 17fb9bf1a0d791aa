"""The report of a run against what is known of the run without it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.cluster.jobs import CHECKOUT, Job, Jobs

_TOLERANCE = 0.01
_LOOK = 0.25
"""Seconds between two looks at the process table."""
_FORKED = "forked"
"""In the place of an identity: a process of an agent, which may outlive it by a moment."""


class AgentTime:
    """The seconds that the agents of a test cluster live, by the process table.

    Args:
        slurm_conf: The configuration of the cluster, by which its processes are known.
    """

    def __init__(self, slurm_conf: Path) -> None:
        self._mark = f"SLURM_CONF={slurm_conf}"
        self._alive: dict[tuple[int, int], tuple[str, float]] = {}
        self._forked: set[tuple[int, int]] = set()
        self._before = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.lives: dict[str, float] = {}
        """The seconds of each agent that has ended, by its identity."""

    def __enter__(self) -> AgentTime:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()

    def _run(self) -> None:
        while not self._over.wait(_LOOK):
            self._look()

    def _look(self) -> None:
        seen, now = set(), time.monotonic()
        for key, begin in _processes():
            seen.add(key)
            agent = self._agent(key[0]) if key not in self._alive and key not in self._forked else ""
            if agent == _FORKED:
                self._forked.add(key)
            elif agent:
                self._alive[key] = agent, begin
        for key in self._alive.keys() - seen:
            agent, begin = self._alive.pop(key)
            # It ended between two looks.
            self.lives[agent] = (self._before + now) / 2 - begin
        self._before = now

    def _agent(self, pid: int) -> str:
        """The identity of an agent of the cluster; empty for a process that does not look like one."""
        # It may end at any moment.
        with contextlib.suppress(OSError):
            if not _is_named_agent(pid):
                return ""
            lines = Path(f"/proc/{pid}/environ").read_text().split("\0")
            if self._mark in lines:
                environ = dict(line.split("=", 1) for line in lines if "=" in line)
                status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
                if _is_named_agent(int(status["PPid"])):
                    # A process that an agent has forked looks like it, and so do the stores that are forked from one.
                    return _FORKED
                job = f"{environ['SLURM_JOB_ID']}.{environ.get('SLURM_RESTART_COUNT', 0)}"
                return f"{environ['SLURMD_NODENAME']}/{job}/{status['NSpid'].split()[-1]}"
        return ""


def _is_named_agent(pid: int) -> bool:
    # An agent that has imported torch with its fork server has blanks between the words.
    words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").split()
    return len(words) > 2 and words[1].endswith(b"/slurm-elastic") and words[2] == b"agent"


def _processes() -> Iterator[tuple[tuple[int, int], float]]:
    """The id and the start of every process of this machine, in the kernel's ticks and by the monotonic clock."""
    ticks = os.sysconf("SC_CLK_TCK")
    # The kernel's clock of starts goes on while the machine is suspended.
    ahead = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with contextlib.suppress(OSError):
                started = int((directory / "stat").read_text().rpartition(")")[2].split()[19])
                yield (int(directory.name), started), started / ticks - ahead


def wrong_report(jobs: Jobs, job: Job, lives: Mapping[str, float]) -> list[str]:
    """What is wrong with the report of a run that is over; prints what was compared.

    Args:
        jobs: where the run was submitted, and where its samples were recorded as `records`.
        job: the run.
        lives: the seconds that its agents lived, by their identities.
    """
    page = jobs.directory / "report.html"
    for words in (("--output", str(page)), ("--trace", str(jobs.directory / "trace.json"))):
        jobs.ask("report", job.id, *words)
    report = json.loads(jobs.ask("report", job.id, "--json").stdout)
    told = report["goodput"]
    wrong = []

    # An agent that is killed while it imports has recorded nothing, and was in no round.
    recorded = "".join(path.read_text() for name in ("progress", "rounds") for path in (job.run_dir / name).iterdir())
    silent = {agent: seconds for agent, seconds in lives.items() if f'"{agent}"' not in recorded}
    lives = {agent: seconds for agent, seconds in lives.items() if agent not in silent}
    by_agent = dict.fromkeys(lives, 0.0)
    for segment in report["segments"]:
        if segment["bucket"] != "queue":
            agent = segment["agent"]
            by_agent[agent] = by_agent.get(agent, 0.0) + segment["end"] - segment["start"]
    whole, lived = sum(by_agent.values()), sum(lives.values())
    print(f"report: buckets {whole:.1f} s, {len(lives)} agents lived {lived:.1f} s, {whole / lived - 1:+.2%}")
    print(
        "report: killed before their first record: "
        + (", ".join(f"{a} {s:.1f} s" for a, s in silent.items()) or "none")
    )
    if abs(whole / lived - 1) > _TOLERANCE:
        each = "; ".join(f"{agent} {told:.1f} of {lives.get(agent, 0.0):.1f} s" for agent, told in by_agent.items())
        wrong.append(f"the report's buckets are {whole / lived - 1:+.2%} of the time that agents lived apart: {each}")

    # Of a round whose agents were all lost, it knows the steps until their last report.
    incomplete: dict[int, int] = {}
    for each in report["rounds"]:
        if not each["complete"]:
            # Rounds that follow each other may all start from one step, and be lost.
            first, last = each["first_step"], each["last_step"]
            incomplete[first] = min(last, incomplete.get(first, last))
    least, most = redone_steps(jobs.directory / "records", incomplete)
    print(f"report: {told['redone_steps']} steps taken again; by the recorded samples {least} to {most}")
    if not least <= (told["redone_steps"] or 0) <= most:
        wrong.append(f"the report has {told['redone_steps']} steps that were taken again, samples {least} to {most}")

    looked = subprocess.run([CHECKOUT / ".ci/screenshots", page], capture_output=True, text=True, check=False)
    print(f"report: opened in Chromium, exit code {looked.returncode}")
    return [*wrong, *([f"{page}: {looked.stdout}{looked.stderr}"] if looked.returncode else [])]


def redone_steps(records: Path, incomplete: Mapping[int, int]) -> tuple[int, int]:
    """The number of steps that were taken again, at least and at most, by the samples that all ranks have recorded.

    A rank records its samples before it takes the step. So the last step of a start that was lost may not have been
    taken; the earlier ones have been.

    Args:
        records: Of the samples.
        incomplete: The last step that was reported of a start, by its first one, where that is not the last one; of
            several starts from one step the smallest.
    """
    order: list[int] = []
    steps: dict[int, set[int]] = {}
    for path in sorted(records.parent.glob(f"{records.name}.rank*.jsonl")):
        for entry in _objects(path):
            if "samples" in entry:
                steps.setdefault(entry["start"], set()).add(entry["step"])
            elif path.name == f"{records.name}.rank0.jsonl":
                order.append(entry["start"])
    least = most = 0
    for number, start in enumerate(order):
        later: set[int] = set().union(*(steps.get(other, ()) for other in order[number + 1 :]))
        own = steps.get(start, {0})
        again = own & later
        most += len(again)
        reported = incomplete.get(min(own), max(own))
        least += len([step for step in again if step < max(own) and step <= reported])
    return least, most


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        # One that was cut short by the death of its rank.
        with contextlib.suppress(ValueError):
            yield json.loads(line)
