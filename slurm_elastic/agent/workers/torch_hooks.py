"""The table of torch's undocumented interfaces that slurm_elastic uses, and its check at the start of an agent.

The behaviour behind these signatures is tested with every release in `tests/unit/agent/test_torch_hooks.py`.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import sys
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from slurm_elastic.errors import UsageError

logger = logging.getLogger("slurm_elastic")

OLDEST = "2.11"
"""The oldest release of torch that was tested; see docs/versions.md."""

NEWEST = "2.15"
"""The newest release of torch that was tested. Agents run with later ones, too; `slurm-elastic doctor` reports them."""


class Kind(Enum):
    """The use of a hook."""

    CALLED = "called"
    """slurm_elastic calls it with these parameters by name."""
    OVERRIDDEN = "overridden"
    """torch calls slurm_elastic's method of that name, which takes these parameters."""
    SET = "set"
    """The constructor of the class sets these attributes."""


class Hook(NamedTuple):
    """One place where slurm_elastic depends on torch's code."""

    kind: Kind
    path: str
    """``module:name.name``."""
    names: str
    """The parameters or attributes of `kind`."""


_ELASTIC = "torch.distributed.elastic"
_API = f"{_ELASTIC}.agent.server.api"
_LOCAL = f"{_ELASTIC}.agent.server.local_elastic_agent:LocalElasticAgent"
_PROCESSES = f"{_ELASTIC}.multiprocessing.api"

HOOKS: tuple[Hook, ...] = tuple(
    Hook(kind, path, names)
    for kind, hooks in {
        Kind.CALLED: {
            f"{_LOCAL}.__init__": "spec logs_specs",
            f"{_LOCAL}.run": "role",
            f"{_LOCAL}._monitor_workers": "worker_group",
            f"{_LOCAL}._construct_event": "state source worker",
            f"{_LOCAL}._log_watchdog_event": "name request",
            f"{_LOCAL}.get_event_succeeded": "",
            f"{_LOCAL}.get_event_failed": "",
            f"{_LOCAL}._set_local_rank_env": "worker_env local_rank spec",
            f"{_API}:Worker": "local_rank global_rank role_rank world_size role_world_size",
            f"{_API}:RunResult": "state return_values failures",
            f"{_API}:WorkerSpec": (
                "role local_world_size entrypoint args rdzv_handler max_restarts "
                "event_log_handler numa_options duplicate_stdout_filters duplicate_stderr_filters virtual_local_rank"
            ),
            f"{_ELASTIC}.events:record": "event destination",
            f"{_ELASTIC}.events.handlers:_log_handlers": "",
            "torch._C._distributed_c10d:Store": "",
            "torch._C._distributed_c10d:TCPStore": "",
            "torch.distributed.run:get_args_parser": "",
            "torch.distributed.run:config_from_args": "args",
            "torch.distributed.run:determine_local_world_size": "nproc_per_node",
            f"{_PROCESSES}:LogsSpecs.__init__": "log_dir redirects tee local_ranks_filter",
            f"{_PROCESSES}:LogsDest": (
                "stdouts stderrs tee_stdouts tee_stderrs error_files filtered_stdout filtered_stderr"
            ),
        },
        Kind.OVERRIDDEN: {
            f"{_LOCAL}._invoke_run": "role",
            f"{_LOCAL}._shutdown": "death_sig timeout",
            f"{_PROCESSES}:LogsSpecs.reify": "envs",
        },
        Kind.SET: {
            _LOCAL: "_pcontext",
            f"{_API}:SimpleElasticAgent": "_worker_group _remaining_restarts",
            f"{_API}:WorkerGroup": "spec workers group_rank group_world_size",
            "torch.distributed.launcher.api:LaunchConfig": (
                "min_nodes max_nodes nproc_per_node logs_specs role rdzv_configs max_restarts "
                "log_line_prefix_template event_log_handler numa_options duplicate_stdout_filters "
                "duplicate_stderr_filters virtual_local_rank"
            ),
        },
    }.items()
    for path, names in hooks.items()
)
"""What the agent needs."""

# control/answers.py, in workers. That of NCCL is in builds with CUDA only.
_DUMP = Hook(Kind.CALLED, "torch._C._distributed_c10d:_dump_fr_trace_json", "")


def require_torch() -> None:
    """Check the installed torch, in about 1 ms once torch is imported.

    Raises:
        UsageError: torch is missing, cannot be imported, is older than the oldest tested, built without distributed, or
            lacks what the agent needs.
    """
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        # OSError: torch loads its libraries with ctypes before its extension.
        cure = "install it" if getattr(error, "name", None) == "torch" else "install a build for this machine"
        raise UsageError(f"torch cannot be imported: {error}; {cure}: pip install 'torch>={OLDEST}'") from None
    release = str(torch.__version__)
    if release_numbers(release) < release_numbers(OLDEST):
        raise UsageError(
            f"torch {release} is older than {OLDEST}, the oldest that slurm_elastic was tested with; "
            f"pip install 'torch>={OLDEST}'"
        )
    if not importlib.import_module("torch.distributed").is_available():
        raise UsageError(
            f"torch {release} is built without distributed (USE_DISTRIBUTED=0); install a build that has it"
        )
    compiled = torch.__spec__.cached if torch.__spec__ else None
    if compiled and not Path(compiled).exists():
        logger.warning(
            "torch's modules have no compiled files, and this process cannot write them: every start compiles them; "
            "run once as their owner: %s -m compileall -q %s",
            sys.executable,
            Path(compiled).parents[2],
        )
    if missing := gaps(HOOKS):
        raise UsageError(
            f"torch {release} lacks what the agent needs: {', '.join(missing)}; "
            "upgrade slurm_elastic, or install a release of torch that it was tested with (docs/versions.md)"
        )
    for gap in gaps([_DUMP]):
        logger.warning(
            "torch %s lacks what dumps of collectives need: %s; of a hang, only stacks are kept", release, gap
        )


def gaps(hooks: Iterable[Hook]) -> tuple[str, ...]:
    """Return those of the hooks that this torch lacks, for people."""
    return tuple(name for hook in hooks for name in _missing(hook))


def _missing(hook: Hook) -> list[str]:
    module, _, qualified = hook.path.partition(":")
    shown = f"{module.rpartition('.')[2]}.{qualified}"
    try:
        target: Any = importlib.import_module(module)
        for name in qualified.split("."):
            target = getattr(target, name)
    except (ImportError, AttributeError):
        return [shown]
    names = hook.names.split()
    if hook.kind is Kind.SET:
        # Names that the constructor's code uses as attributes; a dataclass has no such code, but fields.
        attributes = {*target.__init__.__code__.co_names, *getattr(target, "__dataclass_fields__", ())}
        return [f"{shown}.{name}" for name in names if name not in attributes]
    if not callable(target) or not names:
        return []
    parameters = inspect.signature(target).parameters
    if hook.kind is Kind.OVERRIDDEN:
        return [f"{shown}({name}), new" for name in parameters if name not in ("self", *names)]
    passed = [*names, "self"] if "self" in parameters else names
    try:
        inspect.signature(target).bind(**dict.fromkeys(passed))
    except TypeError as error:
        return [f"{shown} ({error})"]
    return []


def release_numbers(release: str) -> tuple[int, ...]:
    """Return major and minor number of a release such as 2.15.0+cu130 or 2.16.0a0+git."""
    return tuple(int(number) for number in re.findall(r"\d+", release)[:2])
