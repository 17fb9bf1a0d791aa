"""Whether the job of a run is still in the queue."""

from __future__ import annotations

from threading import Event

from slurm_elastic.agent.coordinator import watch_queue
from slurm_elastic.slurm import Controller


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
    queue, over = Queue(True, None, False), Event()
    watch_queue("7", queue, over, 0.001)
    assert over.is_set()
    assert queue.asked == ["7", "7", "7"]


def test_nothing_is_asked_where_there_is_no_job() -> None:
    queue, over = Queue(False), Event()
    watch_queue(None, queue, over, 0.001)
    assert not over.is_set()
    assert queue.asked == []
