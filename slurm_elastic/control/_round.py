"""The agent's end of the control pages of one round."""

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
    """One page for each worker of a round on this node.

    If the pages cannot be made, that is said in the log, and workers are as if their scripts did not use the trainer
    API.

    Args:
        directory: of this agent, see :class:`~slurm_elastic.agent.scratch_dir.NodeDirectory`; made if it is not there.
        round: the number of the round.
        local_world_size: how many workers.
    """

    def __init__(self, directory: Path, round: int, local_world_size: int) -> None:
        self._paths: list[Path] = []
        pages: list[Fields] = []
        try:
            # Its owner's last logout may have emptied /dev/shm (RemoveIPC, logind.conf(5)).
            directory.mkdir(mode=0o700, exist_ok=True)
            for local_rank in range(local_world_size):
                descriptor, path = tempfile.mkstemp(prefix=f"{round:04d}.{local_rank}.", dir=directory)
                self._paths.append(Path(path))
                try:
                    pages.append(new_page(descriptor))
                finally:
                    os.close(descriptor)
        except OSError as error:
            logger.warning("no word to workers before they are stopped: no control page in %s: %s", directory, error)
            self._remove()
            pages = []
        super().__init__(pages)

    def environment(self, local_rank: int) -> dict[str, str]:
        """What to add to the environment of a worker."""
        return {VARIABLE: str(self._paths[local_rank])} if self._paths else {}

    def close(self) -> None:
        """The round is over. Called again, it does nothing; progress can still be asked for."""
        self._remove()

    def _remove(self) -> None:
        for path in self._paths:
            # A worker that takes part has removed it.
            with contextlib.suppress(OSError):
                path.unlink()
        self._paths = []
