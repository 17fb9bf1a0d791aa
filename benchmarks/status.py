"""How long `slurm-elastic status` waits for the agents of a run.

    python -m benchmarks.status [--json FILE] [--repetitions 5] [--sizes 64,256,1024,4096]

The leader runs in one process, the agents in another: real connections, real sealed messages, the command's client.
Each agent reports eight workers in the middle of a round by the code of a real one; only workers are missing.
"""

from __future__ import annotations

import sys
import time

from benchmarks import sandbox
from benchmarks.leading import COORDINATOR, LIMIT, running
from benchmarks.options import add_sizes, make_parser
from benchmarks.tables import Bar, Results, Table, median, seconds
from slurm_elastic.agent.health.pages import live_report
from slurm_elastic.agent.health.state import AgentState, Readings, RoundInfo, Stage
from slurm_elastic.control.agent_side import WorkerProgress
from slurm_elastic.observe.views import live_run
from slurm_elastic.rendezvous.leader_client import ask_status, find_leader
from slurm_elastic.rendezvous.membership.agents import Reason
from slurm_elastic.rendezvous.membership.assignment import Place
from slurm_elastic.rendezvous.transport.messages import Assignment

_WORKERS = 8
_PROMISED = {1024: 2.0}
"""Seconds in which that many agents are to have answered."""


def main() -> int:
    """Measure, show and judge."""
    parser = make_parser("status", repetitions=5)
    add_sizes(parser, "--sizes", 64, 256, 1024, 4096)
    options = parser.parse_args()
    sandbox.enter("benchmarks.status")
    sandbox.raise_descriptor_limit()
    results = Results.of("status")
    table = Table(
        "Time until a client has the reports of all agents (s)",
        ["agents", "first", "median", "longest", "reports KiB", "leader CPU ms"],
        note=f"{_WORKERS} workers on each agent. First: the first request after the round was formed. The leader "
        "begins one collection a second, or one in agents / 512 s; the client here asks when it may. Medians of "
        f"{options.repetitions}. Leader CPU: of one request.",
    )
    for size in options.sizes:
        taken, characters, busy = _ask(size, options.repetitions)
        times = (seconds(each, 3) for each in (taken[0], median(taken), max(taken)))
        table.rows.append([size, *times, f"{characters / 1024:.0f}", f"{1000 * busy:.0f}"])
        if size in _PROMISED:
            results.bars.append(Bar.at_most(f"{size:,} agents report what they do", max(taken), _PROMISED[size]))
    results.add(table)
    return results.finish(options.json)


def _ask(size: int, repetitions: int) -> tuple[list[float], int, float]:
    """Seconds of each request, the characters of the reports, and the leader's CPU seconds of one request."""
    with running(size, COORDINATOR, report=_report) as (herd, (leader,)):
        herd.add(range(size))
        herd.wait(herd.hold_places(size, -1), LIMIT)
        place = find_leader(leader.run_dir)
        taken: list[float] = []
        characters = 0
        before = leader.cpu()
        for _ in range(repetitions):
            begin = time.monotonic()
            answer, reports = ask_status(place)
            run = live_run(answer, reports, time.monotonic() - begin)
            taken.append(time.monotonic() - begin)
            if (answer.asked, answer.answered, len(run.agents)) != (size, size, size):
                raise RuntimeError(f"{answer.answered} of {answer.asked} agents have answered, not {size}")
            characters = sum(len(text) for text in reports.values())
            herd.rest(max(1.0, size / 512))
        return taken, characters, (leader.cpu() - before) / repetitions


def _report(index: int) -> str:
    place = Place("", "", index, _WORKERS, _WORKERS * index, "", 0, 0)
    pids = {local: 4000 + local for local in range(_WORKERS)}
    info = RoundInfo(Assignment(1, place, 0, Reason.START, 1024, 8192, "n0", 1, 0), pids)
    state = AgentState("run", f"n{index}", "1", f"n{index}/1.0/1", 0.0, stage=Stage.TRAINING, round_info=info)
    progress = [WorkerProgress(local, True, 1200, 51200, 51000, 0.04, False, 59.0, 50001) for local in pids]
    return live_report(state, Readings(60.0, progress=progress), dict.fromkeys(pids.values(), "R"))


if __name__ == "__main__":
    sys.exit(main())
