from __future__ import annotations

import pytest

from slurm_elastic.agent.reasons import concerns_job, leave_reason
from slurm_elastic.slurm import Cause


def test_every_cause_is_a_reason() -> None:
    for cause in Cause:
        assert leave_reason(cause)


@pytest.mark.parametrize("cause", [Cause.SIGNALLED, Cause.DRAINED, Cause.UNKNOWN])
def test_one_agent_that_is_signalled_takes_no_other_with_it(cause: Cause) -> None:
    assert not concerns_job(cause)


@pytest.mark.parametrize("cause", [Cause.PREEMPTED, Cause.TIME_LIMIT_NEAR, Cause.CANCELLED, Cause.REQUEUED])
def test_what_happens_to_a_job_happens_to_all_its_agents(cause: Cause) -> None:
    assert concerns_job(cause)
