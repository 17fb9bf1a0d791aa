"""Lightning Fabric: its arguments for the world of a run. The script has the loop, and calls the trainer API there.

::

    from slurm_elastic import trainer
    from slurm_elastic.integrations.fabric import elastic_fabric

    fabric = elastic_fabric(accelerator="gpu")
    ...
        if trainer.should_stop(step):
            fabric.save("out/last.ckpt", state)
            break
"""

from __future__ import annotations

from typing import Any

from lightning.fabric import Fabric

from slurm_elastic.integrations._lightning_world import elastic_world, require_world

__all__ = ["elastic_fabric", "elastic_world"]


def elastic_fabric(**arguments: Any) -> Fabric:
    """Make and launch a Fabric for the world of this round.

    Args:
        arguments: of Fabric; `devices` and `num_nodes` are those of the round unless given.

    Raises:
        ValueError: `devices` and `num_nodes` were given, and are not the world that there is.
    """
    arguments = {**elastic_world(), **arguments}
    require_world(arguments["devices"], arguments["num_nodes"])
    fabric = Fabric(**arguments)
    fabric.launch()
    return fabric
