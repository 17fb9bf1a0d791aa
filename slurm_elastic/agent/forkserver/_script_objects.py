"""Reads objects of the script without running their code, and keeps those that would hang the worker if freed.

`isinstance` asks an object of another type for its ``__class__``, and `vars` asks a module for its ``__dict__``: a lazy
proxy imports something then. All modules of this package that look at a script's objects use these functions.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_NAMESPACE: Any = vars(ModuleType)["__dict__"]


def has_type(value: object, types: tuple[type, ...]) -> bool:
    """Return whether the type of a value is one of these or derived from one.

    Args:
        value: Any object; none of its attributes is read.
        types: Classes without a metaclass of their own.
    """
    return issubclass(type(value), types)


def namespace_of(module: object) -> dict[str, Any] | None:
    """Return the namespace of a module; None for another object, which may be in `sys.modules`, too."""
    if not has_type(module, (ModuleType,)):
        return None
    namespace: dict[str, Any] = _NAMESPACE.__get__(module)
    return namespace


def keep_owned_groups() -> None:
    """Let torch's destroy_process_group keep the groups that a DistributedDataParallel still owns.

    gloo's thread needs the GIL to free the work of the last collective, and ~ProcessGroupGloo waits for that thread.
    The last Python reference to a group releases the GIL for that (IntrusivePtrNoGilDestructor), but a c10d::Reducer
    that owns the group last does not (~Reducer, torch 2.13): the worker hangs where gloo's thread waits for the GIL.
    Of the runs of torch's DDP tutorial 18 % hang so if torch._dynamo is imported before the script.

    The fork server calls this once, before other modules import torch's functions. Python then frees each group that a
    DistributedDataParallel owned when the script destroyed it.
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
