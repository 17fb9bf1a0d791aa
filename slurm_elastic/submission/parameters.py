"""The translation of submitit's parameters into options of sbatch (submitit/slurm/slurm.py, 1.5.4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_elastic.errors import UsageError
from slurm_elastic.submission.plan import require_possible

_WHY_NO_ARRAY = 'a batch becomes one job for each submission; for elements that are one run give shape="array"'
_LISTS = ("setup", "teardown", "srun_args")
_NO_OPTION = frozenset({*_LISTS, "additional_parameters", "signal_delay_s", "stderr_to_stdout", "use_srun", "nodes"})
_SHARES_OF_A_NODE = frozenset({"cpus-per-task", "mem", "mem-per-cpu", "mem-per-gpu"})


@dataclass(frozen=True, slots=True)
class SlurmParameters:
    """submitit's parameters, translated.

    Attributes:
        options: Options of sbatch; None for an option without a value.
        without: Options that the script drops from the template.
        nodes: Number of nodes; None if it is not given.
        signal_delay: Seconds before the time limit at which Slurm sends the warning; None if it is not given.
        stderr_to_stdout: True if both streams go to one file.
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
    """Return the parameters by the names of submitit's SlurmExecutor.

    Args:
        parameters: Parameters by any of submitit's names: ``timeout_min``, which every executor knows; ``slurm_time``,
            which the AutoExecutor accepts; or ``time``.
        equivalents: The executor's names for the names that every executor knows.
        prefix: ``slurm_``.

    Raises:
        UsageError: A parameter is given by two names.
    """
    named: dict[str, Any] = {}
    for parameter, value in parameters.items():
        if value is None:
            continue
        name = parameter.removeprefix(prefix)
        name = equivalents.get(name, name)
        if name in named:
            raise UsageError(f"{parameter} and another parameter both mean {name}; leave one of them out")
        named[name] = value
    return named


def slurm_parameters(parameters: Mapping[str, Any]) -> SlurmParameters:
    """Translate the parameters of submitit's SlurmExecutor.

    Args:
        parameters: Parameters by the names of the SlurmExecutor.

    Raises:
        UsageError: A parameter would break the agents, or its value is invalid.
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
            f"leave it out and give workers_per_node={tasks}"
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
            # A site may have --requeue as its default.
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
