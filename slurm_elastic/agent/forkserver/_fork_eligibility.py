"""Decides whether a worker may be forked from the fork server; settings that its script makes early count, too."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm_elastic.agent.forkserver.worker_command import Program

SWITCHED_OFF = "warm start is switched off"


def obstacle_to_any_warm_start(program: Program | None, *, wanted: bool) -> str:
    """Return why no worker of this program can be forked, whatever its arguments; empty if workers can."""
    if not wanted:
        return SWITCHED_OFF
    if program is None:
        return "the entry point is not a Python script"
    if program.interpreter != sys.executable:
        return f"the interpreter is {program.interpreter}, that of the agent {sys.executable}"
    return ""


def obstacle_to_warm_start(
    program: Program, warm: Mapping[str, str], command: Sequence[str], wanted: Mapping[str, str]
) -> str | None:
    """Return why this command cannot be forked from the fork server of a program, for people; None if it can.

    The fork server was started with the environment `warm`, and the worker has to have that of `wanted`.
    """
    arguments = program.arguments_of(command)
    if arguments is None:
        start = program.interpreter, *program.options
        shown = shlex.join(command[: len(start)])
        return f"the workers' command is {shown}, the fork server was started for {shlex.join(start)}"
    for name in sorted({*warm, *wanted}):
        if is_read_at_import(name) and warm.get(name) != wanted.get(name):
            return f"{name} is {_shown(wanted, name)} for the worker, and was {_shown(warm, name)} for the fork server"
    path = script_file(program.options)
    if path is None:
        return None
    setting = early_setting(Path(path).read_text(errors="replace"), arguments, wanted)
    if setting is not None:
        line, name = setting
        return f"{path}, line {line}, sets {name}, which is read at import; set it in the batch script to start warm"
    return None


def is_read_at_import(name: str) -> bool:
    """Return whether Python, the C library, torch or a library under it reads this variable at its start only."""
    return name in _READ_AT_START or name.startswith(_START) or is_read_by_libraries(name)


def is_read_by_libraries(name: str) -> bool:
    """Return whether torch or a library under it reads this variable when it is imported, and not at its first use."""
    return name.startswith(_LIBRARIES) and not name.startswith(_READ_LATER)


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
    "GOTO_",
    "BLIS_",
    "NUMEXPR_",
    "NPY_",
)
_START = ("PYTHON", "LD_", "MALLOC_", "LC_")
_READ_AT_START = frozenset({"LANG", "LANGUAGE", "TZ", "GLIBC_TUNABLES"})
_READ_LATER = (
    # Given to each worker by the agent (agent/server/local_elastic_agent.py, _start_workers, torch 2.13).
    "TORCHELASTIC_",
    "TORCH_NCCL_",
    # When the first process group is made (FlightRecorder.hpp, torch 2.13).
    "TORCH_FR_",
    "TORCH_ELASTIC_",
    "TORCH_WORKER_SERVER_SOCKET",
    # torch/hub.py (_get_torch_home), torch/utils/cpp_extension.py, torch/_inductor/runtime/cache_dir_utils.py, 2.13.
    "TORCH_HOME",
    "TORCH_CUDA_ARCH_LIST",
    "TORCH_EXTENSIONS_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    # At the first allocation on a GPU (c10/cuda/CUDAAllocatorConfig.cpp, 2.13).
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)
"""Variables that are read at their use."""


def _shown(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name)
    return "unset" if value is None else repr(value)


# Finds the variables that a script sets before it imports torch: too late for a worker that is forked after that.
#
# The agent asks before each round (`ForkServer.obstacle`), and such a worker starts cold. This is a search in the
# text of the script's own file: a module that the script imports may set variables unseen.
_SETS = re.compile(r"environ\s*\[.*\]\s*=(?!=)|environ(\s*\|=|\.update\().*|(environ\.setdefault|putenv)\([^,]*")
_NAME = re.compile(r"\b[A-Z][A-Z0-9_]+\b")


def early_setting(text: str, arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str] | None:
    """Return line and name of the first variable that the script sets and libraries read at their import; None if none.

    A line that names no variable may set one that the script or its arguments name elsewhere. To set one to the value
    that it has in the worker is no change.
    """
    lines = [line.partition("#")[0] for line in text.splitlines()]
    for number, line in enumerate(lines, 1):
        setting = _SETS.search(line)
        if setting is None:
            continue
        for name in _NAME.findall(setting[0]) or _NAME.findall(" ".join((*lines, *arguments))):
            value = environment.get(name)
            same = value is not None and ("setdefault" in line or f'"{value}"' in line or f"'{value}'" in line)
            if is_read_by_libraries(name) and not same:
                return number, name
    return None


def script_file(options: Sequence[str]) -> str | None:
    """Return the path of the script that a worker's command runs; None for a function or a module that is not here.

    The options are the words of the command between the interpreter and the script's own arguments.
    """
    if not options or "-c" in options:
        return None
    if "-m" not in options:
        candidates = [options[-1], os.path.join(options[-1], "__main__.py")]  # noqa: PTH118
    else:
        stem = options[-1].replace(".", os.sep)
        candidates = [f"{stem}.py", os.path.join(stem, "__main__.py")]  # noqa: PTH118
    return next((path for path in candidates if os.path.isfile(path)), None)  # noqa: PTH113
