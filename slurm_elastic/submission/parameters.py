"""submitit's parameters, and the options of sbatch that they stand for (submitit/slurm/slurm.py, 1.5.4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_elastic.errors import UsageError
from slurm_elastic.submission.plan import require_possible

__all__ = ["SlurmParameters", "long_names", "slurm_parameters"]

_WHY_NO_ARRAY = 'a batch becomes one job for each submission; for elements that are one run say shape="array"'
_LISTS = ("setup", "teardown", "srun_args")
_NO_OPTION = frozenset({*_LISTS, "additional_parameters", "signal_delay_s", "stderr_to_stdout", "use_srun", "nodes"})
_SHARES_OF_A_NODE = frozenset({"cpus-per-task", "mem", "mem-per-cpu", "mem-per-gpu"})


@dataclass(frozen=True, slots=True)
class SlurmParameters:
    """What submitit's parameters come to.

    Attributes:
        options: of sbatch; None for one without a value.
        without: options of a template that these speak against.
        nodes: how many nodes, if said so.
        signal_delay: seconds before the end at which Slurm warns, if said so.
        stderr_to_stdout: whether both go to one file.
        setup, teardown, srun_options: see :class:`~slurm_elastic.submission.plan.Plan`.
    """

    options: Mapping[str, str | None] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    nodes: int | None = None
    signal_delay: int | None = None
    stderr_to_stdout: bool = False
    setup: tuple[str, ...] = ()
    teardown: tuple[str, ...] = ()
    srun_options: tuple[str, ...] = ()


def long_names(parameters: Mapping[str, Any], equivalents: Mapping[str, str], prefix: str) -> dict[str, Any]:
    """Give parameters the names that submitit's executor has for them.

    Args:
        parameters: ``timeout_min``, which every executor of submitit knows; ``slurm_time``, which its AutoExecutor
            takes; or ``time``.
        equivalents: the executor's names for what every executor knows.
        prefix: ``slurm_``.

    Raises:
        UsageError: the same was said twice.
    """
    named: dict[str, Any] = {}
    for given, value in parameters.items():
        if value is None:
            continue
        name = given.removeprefix(prefix)
        name = equivalents.get(name, name)
        if name in named:
            raise UsageError(f"{given} and another parameter both say {name}; leave one of them out")
        named[name] = value
    return named


def slurm_parameters(parameters: Mapping[str, Any]) -> SlurmParameters:
    """Return what the parameters of submitit's SlurmExecutor, by its names, come to.

    Raises:
        UsageError: one of them would break the agents, or has a value that means nothing.
    """
    _refuse(parameters)
    options: dict[str, str | None] = {}
    without: set[str] = set()
    for name, value in parameters.items():
        if name not in _NO_OPTION and name != "ntasks_per_node":
            _put(options, without, "gpus-per-node" if name == "num_gpus" else name.replace("_", "-"), value)
    if _SHARES_OF_A_NODE & options.keys() and "exclusive" not in options:
        without.add("exclusive")
    for name, value in (parameters.get("additional_parameters") or {}).items():
        require_possible(name.replace("_", "-"))
        _put(options, without, name.replace("_", "-"), value)
    delay = parameters.get("signal_delay_s")
    return SlurmParameters(
        options=options,
        without=tuple(sorted(without)),
        nodes=parameters.get("nodes"),
        signal_delay=None if delay is None else _whole("signal_delay_s", delay),
        stderr_to_stdout=bool(parameters.get("stderr_to_stdout")),
        setup=_lines("setup", parameters),
        teardown=_lines("teardown", parameters),
        srun_options=_lines("srun_args", parameters),
    )


def _refuse(parameters: Mapping[str, Any]) -> None:
    tasks = parameters.get("ntasks_per_node", 1)
    if tasks != 1:
        raise UsageError(
            f"tasks_per_node={tasks} would start {tasks} agents on each node, and each agent starts all its workers; "
            f"leave it out and say workers_per_node={tasks}"
        )
    if not parameters.get("use_srun", True):
        raise UsageError("use_srun=False would start an agent on the first node only; leave it out")
    if "array_parallelism" in parameters:
        raise UsageError(f"array_parallelism limits the elements of an array; {_WHY_NO_ARRAY}")
    for name in ("gpus_per_task", "cpus_per_gpu"):
        if name in parameters:
            require_possible(name.replace("_", "-"))


def _put(options: dict[str, str | None], without: set[str], name: str, value: Any) -> None:
    if value is True:
        options[name] = None
    elif value is False:
        without.add(name)
        if name == "requeue":
            # A site may have it as its default.
            options["no-requeue"] = None
    else:
        options[name] = str(value)


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UsageError(f"{name}={value!r} is no number of seconds; give 0 or more")
    return value


def _lines(name: str, parameters: Mapping[str, Any]) -> tuple[str, ...]:
    value: Iterable[str] | None = parameters.get(name)
    if isinstance(value, str):
        raise UsageError(f"{name}={value!r} is one text; give a list of them")
    return tuple(value or ())
