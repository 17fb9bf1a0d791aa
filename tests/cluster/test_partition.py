"""The network is cut in different places and healed, again and again: never two groups take steps, and all train again.

SLURM_ELASTIC_CUTS: how many cuts; SLURM_ELASTIC_SEED: to repeat them. Twenty of them:

    SLURM_ELASTIC_CUTS=20 SLURM_ELASTIC_SEED=7 pytest -s tests/cluster/test_partition.py
"""

from __future__ import annotations

import os
import random
import time

from tests.cluster.jobs import SILENCE, Job
from tests.cluster.test_node_loss import assert_one_group_at_a_time
from tests.planted_faults import planted

CUTS = int(os.environ.get("SLURM_ELASTIC_CUTS", "3"))
SEED = int(os.environ.get("SLURM_ELASTIC_SEED", "1"))
NODES = ("n1", "n2", "n3", "n4")
PLACES = ("the leader", "two members", "one member", "everybody", "the leader and a member")
"""Who is cut off from the others. Two keep each other; everybody is alone."""
LONG, SHORT = (4.5, 6.0), (0.2, 3.0)
"""Seconds: longer than a leader may be silent, or so short that nobody may be given up. Slurm notices neither."""


def cut(job: Job, place: str, rng: random.Random) -> list[str]:
    """Cut the network there, and return the nodes that are away from where they were."""
    leader = job.leader()
    members = rng.sample([node for node in NODES if node != leader], 2)
    away = {
        "the leader": [leader],
        "two members": members,
        "one member": members[:1],
        "everybody": list(NODES),
        "the leader and a member": [leader, members[0]],
    }[place]
    if place == "everybody":
        for node in away:
            job.cluster.cut(node)
    else:
        job.cluster.set_apart(away)
    return away


def test_one_group_trains_through_cuts(jobs):
    rng = random.Random(SEED)
    job = jobs.submit("--nodes=4", "elastic.sbatch", SILENCE, "train.py")
    job.wait_for_steps(0, NODES)
    healed: list[float] = []
    for number in range(CUTS):
        place = PLACES[number % len(PLACES)]
        first_turn = SHORT if place == "one member" else LONG
        seconds = rng.uniform(*(first_turn if number < len(PLACES) else rng.choice((LONG, LONG, SHORT))))
        before = len(job.rounds())
        away = cut(job, place, rng)
        time.sleep(seconds)
        for node in away:
            jobs.cluster.heal(node)
        began = time.monotonic()

        def all_train(began: float = began) -> bool:
            last = len(job.rounds()) - 1
            steps = [entry for entry in job.steps(last) if entry["monotonic"] > began]
            return len({entry["node"] for entry in steps}) == len(NODES)

        what = f"cut {number}, {place} ({', '.join(away)}) for {seconds:.1f} s"
        job.wait_until(f"{what}: not all train again", all_train)
        healed.append(time.monotonic() - began)
        print(f"{what}: {len(job.rounds()) - before} rounds, all train after {healed[-1]:.1f} s", flush=True)
    job.finish()
    assert_one_group_at_a_time(job.steps())
    assert job.action() == planted("cuts between any nodes").action
    print(f"seed {SEED}: {CUTS} cuts, all trained again at most {max(healed):.1f} s after healing")
