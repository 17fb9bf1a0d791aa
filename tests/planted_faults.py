"""The faults that tests plant, what the run makes of each, and the table of them in docs/failures.md.

``python -m tests.planted_faults`` prints the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from slurm_elastic.failures.causes import named
from slurm_elastic.failures.history import strikes

EACH_ROUND = "local/agent/test_failures.py::test_the_cause_of_each_planted_fault_is_named"
"""The test that plants one fault after the other, into rank 1 in one round each."""

_ROOT = "rank 1"


@dataclass(frozen=True, slots=True)
class Action:
    """What a run does with a fault, as its records say.

    Attributes:
        another_round: True if a round follows.
        charged: Number of restarts that are charged.
        killed: True if the watchdog kills workers.
        strikes: Strikes against nodes; those of one node for the same fault count once.
        excluded: True if the next start of the job is not given the node.
        exit_code: The run's: 0 if it trains on.
    """

    another_round: bool = True
    charged: int = 1
    killed: bool = False
    strikes: int = 0
    excluded: bool = False
    exit_code: int = 0

    def __str__(self) -> str:
        parts = ["kills the workers that hang"] if self.killed else []
        if self.exit_code:
            parts.append(f"another round, charged; the second time ends with {self.exit_code}")
        elif self.another_round:
            parts.append("another round, charged" if self.charged else "another round, not charged")
        else:
            parts.append("goes on")
        if self.strikes:
            parts.append("a strike" if self.strikes == 1 else f"{self.strikes} strikes")
        return "; ".join([*parts, "excludes the node"] if self.excluded else parts)


def action(
    rounds: Sequence[Mapping[str, Any]],
    events: Iterable[Mapping[str, Any]],
    of_round: int | None = None,
    *,
    excluded: bool = False,
) -> Action:
    """Read off the records of a run what it has done.

    Args:
        rounds: The records of its rounds, in their order.
        events: Its events, in their order.
        of_round: The round with the fault, whose events count alone; None for all.
        excluded: See `Action`: Slurm knows.
    """
    if of_round is not None:
        rounds, events = rounds[of_round : of_round + 2], [each for each in events if each.get("round") == of_round]
    events = list(events)
    weights = {strike.node: strike.weight for strike in strikes((float(at), event) for at, event in enumerate(events))}
    return Action(
        another_round=len(rounds) > 1,
        # A requeued job counts from 0 again.
        charged=sum(max(0, after["restarts"] - before["restarts"]) for before, after in pairwise(rounds)),
        killed=any(event["event"] == "worker_hung" and event["signal"] for event in events),
        strikes=sum(weights.values()),
        excluded=excluded,
        exit_code=int(any(event["event"] == "run_ended" and event["outcome"] == "failed" for event in events)),
    )


@dataclass(frozen=True, slots=True)
class PlantedFault:
    """A fault that a test plants.

    Attributes:
        fault: What is planted; the test finds the row by it.
        cause: The cause in the registry of failures; empty if no worker fails by itself.
        root: What the run names.
        action: What the run does; the test compares it with its records.
        test: The test, below the directory of tests.
    """

    fault: str
    cause: str
    root: str = _ROOT
    action: Action = Action()
    test: str = EACH_ROUND


_GOES_ON = Action(charged=0)

FAULTS = tuple(
    replace(fault, test=test)
    for test, faults in {
        # In the order of its rounds.
        EACH_ROUND: (
            PlantedFault(
                "an exception; rank 1 leaves its group at once and ends 0.3 s after rank 0 in a collective", "exception"
            ),
            PlantedFault("a module that is not there", "import"),
            PlantedFault("source that is no Python", "syntax"),
            PlantedFault("a name that is not defined", "mistake"),
            PlantedFault("a file that is not there", "file_missing"),
            PlantedFault("an unknown option of the script", "arguments"),
            PlantedFault("an exception that says that the loss is NaN", "not_finite"),
            PlantedFault("a failed assertion", "assertion"),
            PlantedFault("JSON that is cut short", "data_damaged"),
            PlantedFault("a pickle that is cut short", "checkpoint_damaged"),
            PlantedFault("a write to a full file system", "disk_full"),
            PlantedFault("a full /tmp of the node", "node_disk_full", action=Action(charged=0, strikes=1)),
            PlantedFault("32 descriptors, and no more", "descriptors"),
            PlantedFault("2^60 bytes", "host_memory"),
            PlantedFault("two sockets at one port", "port_taken"),
            PlantedFault("SIGSEGV", "native_crash"),
            PlantedFault("SIGKILL", "killed"),
            PlantedFault("SIGTERM", "terminated"),
            PlantedFault("exit code 3, and no word", "unknown"),
        ),
        "local/agent/test_failures.py::test_a_worker_over_the_memory_limit_is_told_from_one_that_was_killed": (
            PlantedFault("a memory limit, of a control group", "host_memory", "rank 0, and who has the memory"),
        ),
        "local/agent/test_failures.py::test_the_same_failure_twice_in_a_row_ends_the_run": (
            PlantedFault("the same exception at the same step twice", "exception", "rank 0", Action(exit_code=1)),
        ),
        "local/agent/test_failures.py::test_a_requeued_job_knows_the_last_failure": (
            PlantedFault(
                "the same exception at the same step twice, with a requeue in between",
                "exception",
                "rank 0",
                Action(exit_code=1),
            ),
        ),
        "local/agent/test_hangs.py::test_a_hang_names_the_rank_that_does_not_come_to_a_collective": (
            PlantedFault(
                "a rank that does not come to a collective",
                "hang",
                "rank 1, with the collective and its line",
                Action(killed=True, strikes=1),
            ),
        ),
        "local/agent/test_hangs.py::test_what_the_flight_recorder_tells": (
            PlantedFault(
                "a rank that does not come to a collective, which times out",
                "collective_timeout",
                "rank 1, with the collective and its line",
                Action(strikes=1),
            ),
            PlantedFault(
                "a rank that does not come to a collective, which times out, in a plain script",
                "collective_timeout",
                "rank 1, with the collective and its line",
                Action(strikes=1),
            ),
            PlantedFault(
                "a rank that calls another collective",
                "hang",
                "both, with their collectives and lines",
                Action(killed=True),
            ),
        ),
        "cluster/test_hang.py::test_a_hang_costs_one_restart_and_every_health_port_answers_throughout": (
            PlantedFault(
                "a rank that hangs before a step", "hang", "rank 2, with its steps", Action(killed=True, strikes=1)
            ),
        ),
        "cluster/test_node_loss.py::test_a_killed_node_is_left_behind_and_charged_to_nobody": (
            PlantedFault("all processes of a node are killed", "", "the node", _GOES_ON),
        ),
        "cluster/test_node_loss.py::test_an_agent_that_is_cut_off_stops_its_workers_and_joins_again_when_healed": (
            PlantedFault("a node whose network is cut", "", "the node", _GOES_ON),
        ),
        "cluster/test_partition.py::test_one_group_trains_through_cuts": (
            PlantedFault("cuts between any nodes", "", "the nodes", _GOES_ON),
        ),
        "cluster/test_slow_ranks.py::test_a_node_with_a_cpu_limit_is_named": (
            PlantedFault(
                "a node with a twentieth of a processor",
                "",
                "its rank, and no other",
                Action(another_round=False, charged=0, strikes=1),
            ),
        ),
        "local/agent/test_slow_ranks.py::test_a_slow_rank_is_named_until_it_is_slow_no_more": (
            PlantedFault(
                "a rank that computes for longer, under a training by gloo",
                "",
                "the rank, and again when it is over",
                Action(another_round=False, charged=0, strikes=1),
            ),
        ),
        "local/agent/test_failures.py::test_a_node_whose_check_fails_on_every_second_start": (
            PlantedFault(
                "a node whose check fails on every second start", "", "the node", Action(charged=0, strikes=2)
            ),
        ),
        "local/agent/test_failures.py::test_a_node_that_does_not_reach_the_leader": (
            PlantedFault(
                "a node whose network has no route to the leader",
                "",
                "the node, with the leader",
                Action(charged=0, strikes=2),
            ),
        ),
        "cluster/test_bad_nodes.py::test_a_node_that_fails_its_check_is_excluded_from_the_next_start": (
            PlantedFault(
                "a node whose check fails, and a requeue", "", "the node", Action(charged=0, strikes=2, excluded=True)
            ),
        ),
    }.items()
    for fault in faults
)


def planted(fault: str) -> PlantedFault:
    """Return the row of a fault."""
    return next(each for each in FAULTS if each.fault == fault)


def table() -> list[str]:
    """Return the lines of the table in docs/failures.md."""
    lines = [
        "| planted fault | cause | domain | a restart | named as the root | what the run does | test |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in FAULTS:
        row = named(each.cause)
        cause = f"`{each.cause}`" if each.cause else "none"
        domain = row.domain_words if row is not None else "unknown" if each.cause else "node"
        outlook = (row.outlook_words.removeprefix("a restart ") if row is not None else "") or "?"
        test = f"`{each.test.partition('::')[0]}`"
        lines.append(f"| {each.fault} | {cause} | {domain} | {outlook} | {each.root} | {each.action} | {test} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
