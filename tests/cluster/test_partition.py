"""The network is cut in different places and healed, again and again: never two groups take steps, and all train again.

SLURM_ELASTIC_CUTS: how many cuts; SLURM_ELASTIC_SEED: to repeat them.
"""

from __future__ import annotations

import os
import random
import time

from tests.cluster.test_node_loss import assert_one_group_at_a_time

CUTS = int(os.environ.get("SLURM_ELASTIC_CUTS", "3"))
SEED = int(os.environ.get("SLURM_ELASTIC_SEED", "1"))
NODES = ("n1", "n2", "n3", "n4")


def test_one_group_trains_through_cuts(jobs):
    rng = random.Random(SEED)
    job = jobs.submit("--nodes=4", "elastic.sbatch", "train.py")
    job.wait_for_steps(0, NODES)
    healed: list[float] = []
    for number in range(CUTS):
        cut = rng.sample(NODES, rng.randint(1, 3))
        # Now and then the network is whole again before anybody is given up; no node is away long enough for Slurm.
        seconds = rng.choice((rng.uniform(0.2, 3.0), rng.uniform(4.5, 7.0)))
        before = len(job.rounds())
        for node in cut:
            jobs.cluster.cut(node)
        time.sleep(seconds)
        for node in cut:
            jobs.cluster.heal(node)
        began = time.monotonic()

        def all_train(began: float = began) -> bool:
            last = len(job.rounds()) - 1
            steps = [entry for entry in job.steps(last) if entry["monotonic"] > began]
            return len({entry["node"] for entry in steps}) == len(NODES)

        job.wait_until(f"cut {number} of {cut} for {seconds:.1f} s: not all train again", all_train)
        healed.append(time.monotonic() - began)
        print(f"cut {cut} for {seconds:.1f} s: {len(job.rounds()) - before} rounds, all train after {healed[-1]:.1f} s")
    job.say_enough()
    job.wait_for("COMPLETED")
    assert_one_group_at_a_time(job.steps())
    print(f"seed {SEED}: {CUTS} cuts, all trained again at most {max(healed):.1f} s after healing")
