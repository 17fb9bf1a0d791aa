"""Snapshots of the training state, in memory that agents hold: a lost node costs a step.

::

    from slurm_elastic import snapshot, trainer

    snapshot.to_disk("checkpoints")
    progress = snapshot.load(model=model, optimizer=optimizer, progress=progress)
    for batch in batches:
        ...
        snapshot.save(step, model=model, optimizer=optimizer, progress=progress)
        if trainer.should_stop(step):
            break

Under plain python and torchrun `load` reads the checkpoint on disk and `save` has it written; without `to_disk` both do
nothing.
"""

from __future__ import annotations

from slurm_elastic.snapshot._worker_side import load, save, to_disk
from slurm_elastic.snapshot.memory import OutOfMemoryError
from slurm_elastic.snapshot.state import StateError

__all__ = ["OutOfMemoryError", "StateError", "load", "save", "to_disk"]
