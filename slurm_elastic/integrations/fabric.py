"""Lightning Fabric: its arguments for the world of a run; docs/howto/frameworks.md has an example.

The script has the loop, and calls the trainer API there.
"""

from __future__ import annotations

import os
from typing import Any

from lightning.fabric import Fabric

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


def elastic_world() -> dict[str, int]:
    """Return the arguments `devices` and `num_nodes` of Trainer or Fabric for the round that this worker is in."""
    return {
        "devices": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "num_nodes": int(os.environ.get("GROUP_WORLD_SIZE", "1")),
    }


def require_world(devices: int, num_nodes: int) -> None:
    """Check what Trainer or Fabric was told.

    Lightning 2.6 divides the data by devices * num_nodes, whatever the world size is. Its launchers check that
    (TorchElasticEnvironment.validate_settings), but with one of each there is none, and every rank trains alone.

    Raises:
        ValueError: it is not the world that there is.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if devices * num_nodes != world:
        raise ValueError(
            f"devices={devices} and num_nodes={num_nodes} make {devices * num_nodes} ranks, this round has {world}: "
            "Lightning would divide the data wrongly; give it **elastic_world(), or num_nodes="
            'int(os.environ["GROUP_WORLD_SIZE"]) and devices=int(os.environ["LOCAL_WORLD_SIZE"])'
        )
