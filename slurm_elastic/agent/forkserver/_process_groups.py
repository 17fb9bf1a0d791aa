"""Keeps a worker from hanging in the destructor of a process group of gloo.

The fork server calls `keep_owned_groups` once, before other modules import torch's functions. Invariant: Python frees
each process group that a DistributedDataParallel owned when the script destroyed it.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from typing import Any

from slurm_elastic.agent.forkserver._namespaces import has_type


def keep_owned_groups() -> None:
    """Let torch's destroy_process_group keep the groups that a DistributedDataParallel still owns.

    gloo's thread needs the GIL to free the work of the last collective, and ~ProcessGroupGloo waits for that thread.
    The last Python reference to a group releases the GIL for that (IntrusivePtrNoGilDestructor), but a c10d::Reducer
    that owns the group last does not (~Reducer, torch 2.13): the worker hangs where gloo's thread waits for the GIL.
    Of the runs of torch's DDP tutorial 18 % hang so if torch._dynamo is imported before the script.
    """
    distributed = sys.modules["torch.distributed"]
    implementation: Any = sys.modules["torch.distributed.distributed_c10d"]
    destroy: Callable[..., Any] = implementation.destroy_process_group
    model_type: type = sys.modules["torch.nn.parallel"].DistributedDataParallel
    kept: list[object] = []

    @functools.wraps(destroy)
    def destroy_process_group(*arguments: Any, **options: Any) -> Any:
        # Groups whose models are gone lose their last reference here.
        kept[:] = _owned_groups(model_type)
        return destroy(*arguments, **options)

    for module in (distributed, implementation):
        vars(module)["destroy_process_group"] = destroy_process_group


def _owned_groups(model_type: type) -> list[object]:
    """Return the process groups of all models of this type, without running code of the script."""
    models = [value for value in gc.get_objects() if has_type(value, (model_type,))]
    return [object.__getattribute__(model, "__dict__").get("process_group") for model in models]
