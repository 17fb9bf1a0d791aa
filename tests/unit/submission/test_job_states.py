from __future__ import annotations

import pytest

from slurm_elastic.submission.job import ElasticInfoWatcher
from slurm_elastic.submission.job_states import is_final, state_of_array


def test_final_states() -> None:
    assert not any(map(is_final, ("RUNNING", "RESIZING", "SUSPENDED", "PREEMPTED", "")))
    assert all(map(is_final, ("COMPLETED", "CANCELLED by 1000", "TIMEOUT", "NODE_FAIL")))


@pytest.mark.parametrize(
    ("elements", "state"),
    [
        (["PENDING", "PENDING"], "PENDING"),
        (["RUNNING", "PENDING"], "RUNNING"),
        (["PENDING", "COMPLETED"], "PENDING"),
        (["REQUEUED", "FAILED"], "RUNNING"),
        (["FAILED", "COMPLETED"], "COMPLETED"),
        (["CANCELLED by 1000", "FAILED"], "FAILED"),
        (["CANCELLED by 1000", "CANCELLED by 1000"], "CANCELLED"),
        (["TIMEOUT", "CANCELLED by 0"], "TIMEOUT"),
        ([], "UNKNOWN"),
    ],
)
def test_state_of_an_array(elements: list[str], state: str) -> None:
    assert state_of_array(elements) == state


def test_watcher_adds_the_array_to_its_elements() -> None:
    watcher = ElasticInfoWatcher()
    info = watcher.read_info(
        "JobID|State|NodeList\n12_0|RUNNING|n1\n12_0.batch|RUNNING|n1\n12_1|RUNNING|n3\n"
        "12_[2-3]|PENDING|None assigned\n13|COMPLETED|n2"
    )
    assert info["12"] == {"JobID": "12", "State": "RUNNING", "NodeList": "n1,n3"}
    assert info["12_3"]["State"] == "PENDING"
    assert info["13"]["State"] == "COMPLETED"
