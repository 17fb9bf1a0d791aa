"""Ends a worker without clearing the modules that it has inherited from the fork server.

Python ends by clearing all modules one by one (Python/pylifecycle.c, Py_FinalizeEx, and Python/import.c,
finalize_modules, 3.11). For torch and what it imports, 2,000 modules, that takes about a second, which the next round
waits for, and only frees memory. Then the C library calls the destructors of torch, which unregister thousands of
operators one by one, in another 0.15 s. The script's own modules, files, objects and libraries are finalized as usual:
what they print, flush or remove then is part of the program.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import sys
import weakref
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from slurm_elastic.agent.forkserver.linux import silence_c_stderr, spare_exit_handlers

_OF_THE_INTERPRETER = frozenset({"builtins", "sys"})
"""Modules that Python itself clears last."""

_REPORTS_LEAKS = "triton._C.libtriton"
"""torch._dynamo imports it with a CUDA build. Its nanobind reports the modules that are kept as leaks, in thirty lines
when Python has ended (nanobind, nb_internals.cpp, internals_cleanup; torch 2.15 with triton 3.9)."""

_keep_for_ever, _untrack, _track = (
    ctypes.pythonapi.Py_IncRef,
    ctypes.pythonapi.PyObject_GC_UnTrack,
    ctypes.pythonapi.PyObject_GC_Track,
)
for _function in (_keep_for_ever, _untrack, _track):
    _function.argtypes, _function.restype = (ctypes.py_object,), None


# Read objects of the script without running their code. `isinstance` asks an object of another type for its
# `__class__`, and `vars` asks a module for its `__dict__`: a lazy proxy imports something then.
_NAMESPACE: Any = vars(ModuleType)["__dict__"]


def namespace_of(module: object) -> dict[str, Any] | None:
    """Return the namespace of a module; None for another object, which may be in `sys.modules`, too."""
    if not issubclass(type(module), ModuleType):
        return None
    namespace: dict[str, Any] = _NAMESPACE.__get__(module)
    return namespace


class FastExit:
    """Keeps Python from clearing the modules that are imported when a worker is forked.

    Create it before any import that registers a function with `atexit`: such a function may still import, and runs
    before that of this class, which was registered first (docs.python.org, atexit).
    """

    def __init__(self) -> None:
        self._inherited: dict[str, object] = {}
        atexit.register(self._spare)

    def note_modules(self) -> None:
        """In the fork server, after its imports: note the modules that workers inherit."""
        main = sys.modules["__main__"]
        self._inherited = {
            name: module
            for name, module in sys.modules.items()
            # multiprocessing knows __main__ by a second name.
            if name not in _OF_THE_INTERPRETER and issubclass(type(module), ModuleType) and module is not main
        }

    def inherit(self) -> None:
        """In a worker: keep the noted modules from being cleared at its end."""
        main = sys.modules["__main__"]
        # Everything imported so far is frozen, so that collections leave its memory shared (gc.freeze). But a frozen
        # namespace of __main__ would keep the script's objects from being finalized: tracked anew, it is not frozen.
        for frozen in (main, vars(main)):
            _untrack(frozen)
            _track(frozen)
        spare_exit_handlers()

    def _spare(self) -> None:
        if not self._inherited:
            # The agent, which has imported together with the fork server.
            return
        # Finalizers of the script's unreachable objects may import: they run while all modules are there. Inherited
        # objects are frozen, and the collector passes over them.
        gc.collect()
        for name, module in self._inherited.items():
            if sys.modules.get(name) is module:
                _keep_for_ever(module)
                # Not removed: an import from here on has to fail, as at the end of Python, and not load it again.
                sys.modules[name] = None  # type: ignore[assignment]
        own = [
            namespace
            for name, module in sys.modules.items()
            if name not in _OF_THE_INTERPRETER and (namespace := namespace_of(module)) is not None
        ]
        vars(sys)[_AT_SYS_CLEAR] = _AtSysClear(own, silence=_REPORTS_LEAKS in self._inherited)


_AT_SYS_CLEAR = "_slurm_elastic_last"


def _clearable(content: dict[str, Any]) -> list[str]:
    """Return the names in a namespace that Python clears; a name of another type could have operators of its own."""
    return [name for name in content if type(name) is str and name != "__builtins__"]


class _Namespace:
    """An entry of a module's namespace whose finalizer runs when Python clears the namespace.

    Python clears a module that something refers to at the end name by name, those that begin with one underscore first
    (Objects/moduleobject.c, _PyModule_ClearDict, 3.14). A copy of `sys.modules` that was garbage when it was frozen
    refers to __main__ in workers alone: with 3.14 the import of unittest.mock leaves one (inspect.py,
    _signature_fromstr). Then this class clears the other entries, and leaves functions, classes and modules to the
    finalizers of the script's objects, as where the module is collected.
    """

    __slots__ = ("__weakref__", "content")

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        content[_AT_SYS_CLEAR] = self

    def __del__(self) -> None:
        if self.content.get(_AT_SYS_CLEAR) is self:
            # The whole namespace is collected.
            return
        for name in _clearable(self.content):
            value = self.content.get(name)
            if not issubclass(type(value), (FunctionType, ModuleType, type)):
                value = None
                self.content[name] = None


class _AtSysClear:
    """An entry of `sys`, which Python clears last; clears the script's modules that an inherited module refers to.

    It refers to them, for instance, if the script has put a function of its own into it.
    """

    __slots__ = ("_namespaces", "_silence")

    def __init__(self, namespaces: list[dict[str, Any]], *, silence: bool) -> None:
        self._namespaces = [weakref.ref(_Namespace(namespace)) for namespace in namespaces]
        self._silence = silence

    def __del__(self) -> None:
        for reference in self._namespaces:
            namespace = reference()
            if namespace is not None:
                for name in _clearable(namespace.content):
                    namespace.content[name] = None
        if self._silence:
            silence_c_stderr()


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
    models = [value for value in gc.get_objects() if issubclass(type(value), model_type)]
    return [object.__getattribute__(model, "__dict__").get("process_group") for model in models]
