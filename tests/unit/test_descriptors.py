from __future__ import annotations

import subprocess
import sys

from slurm_elastic import descriptors


def in_a_process(soft: int, hard: int, source: str) -> str:
    """What a program prints that is started with these limits."""
    program = f"from slurm_elastic import descriptors, errors\nimport resource\n{source}"
    command = f'ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$0" -c "$1"'
    done = subprocess.run(["bash", "-c", command, sys.executable, program], capture_output=True, text=True, check=True)
    return done.stdout.rstrip()


def test_the_soft_limit_is_raised_and_what_was_given_is_known() -> None:
    source = (
        "for _ in range(2):\n    descriptors.raise_limit()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE), descriptors.given_limit())"
    )
    assert in_a_process(200, 500, source) == "(500, 500) (200, 500)"


def test_a_leader_of_as_many_agents_as_it_needs_descriptors_for_has_them() -> None:
    for agents in (1, 1024, 16384):
        assert descriptors.connections_at_most(descriptors.needed(agents)) >= agents


def test_a_limit_that_is_too_low_is_one_line_with_the_number_needed() -> None:
    source = (
        "descriptors.require(100)\ntry:\n    descriptors.require(16384)\n"
        "except errors.UsageError as error:\n    print(error)"
    )
    line = in_a_process(500, 500, source)
    assert " is 500 here " in line
    assert " 16384 agents needs 16768; raise the hard limit" in line
