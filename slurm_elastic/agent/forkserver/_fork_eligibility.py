"""Decides whether a worker may be forked from the fork server, or has to start cold."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_elastic.agent.forkserver.worker_command import FUNCTION, Program

SWITCHED_OFF = "warm start is switched off"


@dataclass(frozen=True, slots=True)
class Launch:
    """Environment and working directory that a process is started with."""

    environment: Mapping[str, str]
    directory: str
    """The working directory."""


def obstacle_to_any_warm_start(program: Program | None, *, wanted: bool) -> str:
    """Return why no worker of this program can be forked, whatever its arguments; empty if workers can."""
    if not wanted:
        return SWITCHED_OFF
    if program is None:
        return "the entry point is not a Python script"
    if program.interpreter != sys.executable:
        return f"the interpreter is {program.interpreter}, that of the agent {sys.executable}"
    return ""


def obstacle_to_warm_start(program: Program, warm: Launch, command: Sequence[str], wanted: Launch) -> str | None:
    """Return why this command cannot be forked from the fork server, for people; None if it can.

    Args:
        program: The program that the fork server was started for.
        warm: The start of the fork server.
        command: The whole command of the worker.
        wanted: The start that the worker has to have.
    """
    if program.arguments_of(command) is None:
        wanted_start = "a function" if _is_function(command) else repr(" ".join(command[: 1 + len(program.options)]))
        return f"the entry point is {wanted_start}, the fork server was started for {_start(program)}"
    if wanted.directory != warm.directory:
        return f"the working directory is {wanted.directory}, that of the fork server {warm.directory}"
    for name in sorted({*warm.environment, *wanted.environment}):
        if is_read_at_import(name) and warm.environment.get(name) != wanted.environment.get(name):
            return f"{name} is {_shown(wanted, name)} for the worker, and was {_shown(warm, name)} for the fork server"
    return None


def is_read_at_import(name: str) -> bool:
    """Return whether Python, the C library, torch or a library under it reads this variable at its start only."""
    return name in _READ_AT_IMPORT or (name.startswith(_PREFIXES) and not name.startswith(_READ_LATER))


def is_read_by_libraries(name: str) -> bool:
    """Return whether torch or a library under it reads this variable when it is imported, and not at its first use."""
    return name == "GOTO_NUM_THREADS" or (name.startswith(_LIBRARIES) and not name.startswith(_READ_LATER + _READ_USE))


_LIBRARIES = (
    "TORCH",
    "PYTORCH_",
    "ATEN_",
    "C10_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "BLIS_",
    "NUMEXPR_",
    "NPY_",
)
_PREFIXES = (*_LIBRARIES, "PYTHON", "LD_", "MALLOC_", "LC_")
_READ_AT_IMPORT = frozenset({"LANG", "LANGUAGE", "TZ", "GLIBC_TUNABLES", "GOTO_NUM_THREADS"})
_READ_LATER = (
    # Given to each worker by the agent (agent/server/local_elastic_agent.py, _start_workers, torch 2.13).
    "TORCHELASTIC_",
    "TORCH_NCCL_",
    # When the first process group is made (FlightRecorder.hpp, torch 2.13).
    "TORCH_FR_",
    "TORCH_ELASTIC_",
    "TORCH_WORKER_SERVER_SOCKET",
)
_READ_USE = (
    # torch/hub.py (_get_torch_home), torch/utils/cpp_extension.py, torch/_inductor/runtime/cache_dir_utils.py, 2.13.
    "TORCH_HOME",
    "TORCH_CUDA_ARCH_LIST",
    "TORCH_EXTENSIONS_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    # At the first allocation on a GPU (c10/cuda/CUDAAllocatorConfig.cpp, 2.13).
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)
"""Variables that scripts often set and that are read at their use."""


def _is_function(command: Sequence[str]) -> bool:
    return FUNCTION.arguments_of(command) is not None


def _start(program: Program) -> str:
    return "a function" if program is FUNCTION else repr(" ".join((program.interpreter, *program.options)))


def _shown(launch: Launch, name: str) -> str:
    value = launch.environment.get(name)
    return "unset" if value is None else repr(value)
