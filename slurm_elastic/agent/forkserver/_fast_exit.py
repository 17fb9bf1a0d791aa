"""The end of a worker: what it got from the fork server is not taken down piece by piece.

Python ends by clearing the modules of a program one by one (Python/pylifecycle.c, Py_FinalizeEx, and Python/import.c,
finalize_modules, 3.11). For the two thousand modules of torch and what it imports that takes about a second, which the
next round waits for, and all that it does is to free memory. Then the C library calls the destructors of torch, which
take back thousands of operators one by one, for another seventh of a second. The script's own modules, files, objects
and libraries are ended as ever: what they print, flush or remove then is part of the program.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import sys
import weakref
from types import FunctionType, ModuleType
from typing import Any

from slurm_elastic.agent.forkserver._linux import silence_c_stderr, spare_exit_handlers

__all__ = ["FastExit"]

_OF_THE_INTERPRETER = frozenset({"builtins", "sys"})
"""Modules that Python itself takes down last."""

_REPORTS_LEAKS = "triton._C.libtriton"
"""torch._dynamo imports it with a CUDA build. Its nanobind takes the modules that are spared for leaks and says so in
thirty lines when Python has ended (nanobind, nb_internals.cpp, internals_cleanup; torch 2.15 with triton 3.9)."""

_keep_for_ever, _untrack, _track = (
    ctypes.pythonapi.Py_IncRef,
    ctypes.pythonapi.PyObject_GC_UnTrack,
    ctypes.pythonapi.PyObject_GC_Track,
)
for _function in (_keep_for_ever, _untrack, _track):
    _function.argtypes, _function.restype = (ctypes.py_object,), None


class FastExit:
    """Spares the modules that are there when a worker is forked.

    To be made before anything is imported that registers a function of its own with `atexit`: those may still import,
    and all of them run before this one, which was registered first (docs.python.org, atexit).
    """

    def __init__(self) -> None:
        self._inherited: dict[str, ModuleType] = {}
        self._worker = False
        atexit.register(self._spare)

    def note_modules(self) -> None:
        """In the fork server, when it has imported all that workers are to inherit."""
        main = sys.modules["__main__"]
        self._inherited = {
            name: module
            for name, module in sys.modules.items()
            # multiprocessing knows __main__ by a second name.
            if name not in _OF_THE_INTERPRETER and isinstance(module, ModuleType) and module is not main
        }

    def inherit(self) -> None:
        """From now on this process is a worker: the modules that were noted came from the fork server."""
        self._worker = True
        main = sys.modules["__main__"]
        # Everything imported so far is frozen, so that collections leave its memory shared (gc.freeze). But a frozen
        # namespace of __main__ would keep the script's objects from being finalized: it begins as a young object.
        for young in (main, vars(main)):
            _untrack(young)
            _track(young)
        spare_exit_handlers()

    def _spare(self) -> None:
        if not self._worker:
            return
        # Finalizers of the script's objects that nothing refers to may import: they run while all modules are there.
        # What came from the fork server is frozen and not looked at.
        gc.collect()
        for name, module in self._inherited.items():
            if sys.modules.get(name) is module:
                _keep_for_ever(module)
                # Not removed: an import from here on must fail, as it does at the end of Python, and not begin anew.
                sys.modules[name] = None  # type: ignore[assignment]
        own = [
            vars(module)
            for name, module in sys.modules.items()
            if name not in _OF_THE_INTERPRETER and isinstance(module, ModuleType)
        ]
        vars(sys)[_LAST] = _Last(own, silence=_REPORTS_LEAKS in self._inherited)


_LAST = "_slurm_elastic_last"


class _Namespace:
    """Lies in the namespace of a module and is gone with it.

    Python clears a module that something refers to at the end name by name, those that begin with one underscore first
    (Objects/moduleobject.c, _PyModule_ClearDict, 3.14). A copy of `sys.modules` that was garbage when it was frozen
    refers to __main__ in workers alone: with 3.14 the import of unittest.mock leaves one (inspect.py,
    _signature_fromstr). There the finalizers of the script's objects shall find its functions, classes and modules, as
    they do where the module is collected.
    """

    __slots__ = ("__weakref__", "content")

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        content[_LAST] = self

    def __del__(self) -> None:
        if self.content.get(_LAST) is self:
            # It is collected.
            return
        for name, value in list(self.content.items()):
            if not isinstance(value, (FunctionType, ModuleType, type)) and name != "__builtins__":
                value = None
                self.content[name] = None


class _Last:
    """Takes down the script's modules that a module which is spared refers to, such as by a function put into it.

    Python takes `sys` down when all other modules are done with.
    """

    __slots__ = ("_namespaces", "_silence")

    def __init__(self, namespaces: list[dict[str, Any]], *, silence: bool) -> None:
        self._namespaces = [weakref.ref(_Namespace(namespace)) for namespace in namespaces]
        self._silence = silence

    def __del__(self) -> None:
        for reference in self._namespaces:
            namespace = reference()
            if namespace is not None:
                for name in [name for name in namespace.content if name != "__builtins__"]:
                    namespace.content[name] = None
        if self._silence:
            silence_c_stderr()
