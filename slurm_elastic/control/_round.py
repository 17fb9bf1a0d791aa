"""The agent's side of the control pages of one round."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from pathlib import Path

from slurm_elastic.control._agreement import Agreement
from slurm_elastic.control._shared_page import Fields, new_page
from slurm_elastic.control._worker_side import VARIABLE

__all__ = ["RoundControl"]

logger = logging.getLogger("slurm_elastic")


class RoundControl(Agreement):
    """The control pages of a round's workers on this node.

    If the pages cannot be made, a warning goes to the log, and the round goes on as if no script used the trainer API.

    Args:
        directory: Scratch directory of this agent, see `slurm_elastic.agent.scratch_dir`; made if it does not exist.
        round: Number of the round.
        local_world_size: Number of workers on this node.
    """

    def __init__(self, directory: Path, round: int, local_world_size: int) -> None:
        self._paths: list[Path] = []
        pages: list[Fields] = []
        try:
            # The last logout of the user may have emptied /dev/shm (RemoveIPC, logind.conf(5)).
            directory.mkdir(mode=0o700, exist_ok=True)
            for local_rank in range(local_world_size):
                descriptor, path = tempfile.mkstemp(prefix=f"{round:04d}.{local_rank}.", dir=directory)
                self._paths.append(Path(path))
                try:
                    pages.append(new_page(descriptor))
                finally:
                    os.close(descriptor)
        except OSError as error:
            logger.warning(
                "workers will be stopped without notice: cannot make a control page in %s: %s", directory, error
            )
            self._remove()
            pages = []
        super().__init__(pages)

    def environment(self, local_rank: int) -> dict[str, str]:
        """Return the variables for the environment of a worker."""
        return {VARIABLE: str(self._paths[local_rank])} if self._paths else {}

    def close(self) -> None:
        """Remove the pages' files after the round. `progress` still works; a second call does nothing."""
        self._remove()

    def _remove(self) -> None:
        for path in self._paths:
            # A worker that uses the trainer API has removed its file.
            with contextlib.suppress(OSError):
                path.unlink()
        self._paths = []
