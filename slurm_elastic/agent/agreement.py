"""How the workers of a round come to stop at one step, as their agent sees it."""

from __future__ import annotations

import logging

from slurm_elastic.agent.scratch_dir import NodeDirectory
from slurm_elastic.control import RoundControl, WorkerProgress

__all__ = ["StepAgreement"]

logger = logging.getLogger("slurm_elastic")


class StepAgreement:
    """The control pages of the round that runs here, if there is one and they can be made.

    Attributes:
        control: of the newest round; None before the first.
    """

    def __init__(self) -> None:
        self.control: RoundControl | None = None
        self._directory: NodeDirectory | None = None
        try:
            self._directory = NodeDirectory("control")
        except OSError as error:
            logger.warning("workers cannot be asked to stop at a step: no directory for control pages: %s", error)

    def open(self, round_: int, local_world_size: int) -> None:
        """A round begins."""
        if self._directory is not None:
            self.control = RoundControl(self._directory.path, round_, local_world_size)

    def environment(self, local_rank: int) -> dict[str, str]:
        """What to add to the environment of a worker of the round."""
        return self.control.environment(local_rank) if self.control is not None else {}

    def hold(self) -> int | None:
        """Let the workers wait before their next step.

        Returns:
            After how many steps of this round they can stop; None if they take no part.
        """
        return self.control.hold() if self.control is not None else None

    def stop_at(self, round_: int, step: int, reason: str, seconds: float | None) -> bool:
        """Tell the workers where to stop, and why.

        Returns:
            False if they do not, as they were not held before.
        """
        if self.control is None:
            return False
        try:
            self.control.stop_at(step, reason, seconds)
        except ValueError as error:
            logger.warning("the workers do not stop at step %d of round %d: %s", step, round_, error)
            return False
        return True

    def stopped(self) -> bool:
        """Whether a worker here was told to stop, by its own question: that it ended well does not end the run."""
        return any(worker.stopped for worker in self.progress())

    def fence(self) -> None:
        """The run may go on without this agent: its workers may publish nothing any more."""
        if self.control is not None:
            self.control.fence()

    def shielded(self) -> bool:
        """Whether workers here leave SIGTERM to their agent; SIGKILL does then what SIGTERM does by default."""
        return self.control is not None and self.control.shielded()

    def progress(self) -> tuple[WorkerProgress, ...]:
        """How far the workers are, by local rank; from any thread."""
        return self.control.progress() if self.control is not None else ()

    def close_round(self) -> None:
        """The workers of the round have ended."""
        if self.control is not None:
            self.control.close()

    def close(self) -> None:
        """There will be no further round."""
        self.close_round()
        if self._directory is not None:
            self._directory.close()
