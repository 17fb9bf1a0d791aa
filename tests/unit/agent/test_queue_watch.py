"""Whether the job of a run is still in the queue."""

from __future__ import annotations

import select

from slurm_elastic.agent.coordinator import queue_watch
from slurm_elastic.slurm import Controller

HANG = 30.0


class Queue(Controller):
    """Answers one thing after the other, the last one for ever."""

    def __init__(self, *answers: bool | None) -> None:
        super().__init__()
        self.asked: list[str] = []
        self._answers = list(answers)

    def is_queued(self, job_id: str) -> bool | None:
        self.asked.append(job_id)
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def test_a_job_is_over_when_slurm_says_so_and_not_when_it_says_nothing() -> None:
    queue = Queue(True, None, False)
    with queue_watch("7", queue, 0.001) as over:
        assert select.select([over], [], [], HANG)[0]
    assert queue.asked == ["7", "7", "7"]


def test_nothing_is_asked_where_there_is_no_job() -> None:
    queue = Queue(False)
    with queue_watch(None, queue, 0.001) as over:
        assert not select.select([over], [], [], 0.05)[0]
    assert queue.asked == []
