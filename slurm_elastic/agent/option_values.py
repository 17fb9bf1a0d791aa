"""The meaning of the agent's options where Slurm completes them, and checks of its script and job; without torch."""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, get_type_hints

from slurm_elastic.agent.option_table import OPTIONS, Scan
from slurm_elastic.errors import UsageError, did_you_mean
from slurm_elastic.slurm import Controller, SignalDefaults, SlurmJob

GROWS_VARIABLE = "SLURM_ELASTIC_GROWS"
"""Set in a job that was submitted to make this run larger, to the id of the run."""
JOB_END_VARIABLE = "SLURM_ELASTIC_VERDICT"
"""Set by batch scripts that end with ``slurm-elastic job-end``; `WHOLE_ARRAY` in the template of an array."""
WHOLE_ARRAY = "array"
"""The elements of the job array are one run."""

LOCAL_RESTARTS = "SLURM_ELASTIC_LOCAL_RESTARTS"
"""The variable with the number of times that all agents of a run on one machine have been restarted by submitit."""

_WORKER_SIGNALS = ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT", "SIGTERM")
_log = logging.getLogger(__name__)

_NODES = re.compile(r"([0-9]{1,6})(?::([0-9]{1,6}))?")


def _count(option: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{option} {text!r} is no number; give 0 or more")
    return int(text)


def _choice(option: str, text: str) -> str | int:
    (choices,) = (row.choices for row in OPTIONS if row.name == option and row.choices is not None)
    if text not in choices:
        raise UsageError(f"{option} {text!r} is neither {' nor '.join(choices)}")
    return int(text) if text.isdecimal() else text


def positive_seconds(option: str, text: str, others: str = "") -> float:
    """Return the value of an option that is a number of seconds above 0; UsageError if it is none.

    Args:
        others: What else it can be, as in "nor off"; empty for nothing.
    """
    if (seconds := _number(text)) > 0:
        return seconds
    wrong = f"is neither seconds, above 0, {others}" if others else "is no number of seconds above 0"
    raise UsageError(f"{option} {text!r} {wrong}; write it as in 600")


def seconds_or_zero(option: str, text: str) -> float:
    """Return the value of an option that is a number of seconds, 0 or more; UsageError if it is none."""
    if (seconds := _number(text)) >= 0:
        return seconds
    raise UsageError(f"{option} {text!r} is no number of seconds; give 0 or more")


def _number(text: str) -> float:
    return float(text) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", text) else -1.0


def _signal(option: str, text: str) -> signal.Signals:
    name = "SIG" + text.upper().removeprefix("SIG")
    if name not in _WORKER_SIGNALS:
        raise UsageError(f"{option} {text!r} is none of {', '.join(_WORKER_SIGNALS)}")
    return signal.Signals[name]


def _text(_option: str, text: str) -> str:
    return text


@dataclass(frozen=True, slots=True)
class OptionValues:
    """The values of options that need neither torch nor a job, each with the function that reads its text."""

    start: Annotated[str, _choice] = "warm"
    learn_imports: Annotated[str, _choice] = "on"
    max_requeues: Annotated[int, _count] = 10
    max_excluded: Annotated[int, _count] = 2
    grace: Annotated[float, seconds_or_zero] = 30.0
    warning: Annotated[float | None, seconds_or_zero] = None
    notify: Annotated[str, _text] = ""
    notify_after: Annotated[float, positive_seconds] = 600.0
    replace_lost: Annotated[float | None, positive_seconds] = None
    replace_limit: Annotated[int, _count] = 10
    failure_domain: Annotated[str, _text] = "auto"
    console: Annotated[str, _choice] = "brief"
    stop_on_same_failure: Annotated[str, _choice] = "on"
    stacks_after: Annotated[float, positive_seconds] = 60.0
    worker_signal: Annotated[signal.Signals | None, _signal] = None
    shutdown_timeout: Annotated[int, _count] = 30
    snapshot_replicas: Annotated[int, _choice] = 0
    snapshot_slots: Annotated[int, _choice] = 3
    node_check: Annotated[str, _text] = ""
    node_check_timeout: Annotated[float, positive_seconds] = 60.0
    on_bad_node: Annotated[str, _text] = ""

    @property
    def meaning(self) -> SignalDefaults:
        """The meaning of signals where Slurm does not answer."""
        warning = SignalDefaults().warning if self.warning is None else self.warning
        return SignalDefaults(self.grace, warning, self.warning)


def read_options(text_of: Callable[[str], str | None]) -> OptionValues:
    """Return the values of the options by their texts; argparse checks none that comes from PET_* variables.

    Raises:
        UsageError: A text is wrong, or an option is given without that which it belongs to.
    """
    texts = {field.name: text for field in fields(OptionValues) if (text := text_of(field.name))}
    for name, other in (("notify_after", "notify"), ("replace_limit", "replace_lost")):
        if name in texts and other not in texts:
            raise UsageError(f"{_spelled(name)} needs {_spelled(other)}")
    hints = get_type_hints(OptionValues, include_extras=True)
    return OptionValues(**{name: hints[name].__metadata__[0](_spelled(name), text) for name, text in texts.items()})


def base_directory(run_dir: str | None, job: SlurmJob | None) -> Path:
    """Return ``--run-dir``, else the directory that sbatch was called in, else the current one."""
    return Path(run_dir or (job.submit_dir if job else None) or Path.cwd())


def named_run(option: str | None, job: SlurmJob | None, environ: Mapping[str, str]) -> str | None:
    """Return the id of a run that agents of several jobs, or of several steps, are; None for one of this step alone.

    Raises:
        UsageError: The template for one job has been submitted as an array, with one run for all elements.
    """
    if job is None or job.array is None or environ.get(JOB_END_VARIABLE) == WHOLE_ARRAY:
        return option or (job.array.job_id if job is not None and job.array is not None else None)
    if option is not None and JOB_END_VARIABLE in environ:
        raise UsageError(
            f"--run-id {option} makes one run of all elements of this array, which this batch script is not for: "
            "submit array.sbatch, or leave --run-id out, and each element is a run of its own"
        )
    return option


NO_MAXIMUM = 65_536
"""More nodes than a cluster of Slurm has."""


def node_range(text: str | None, max_nodes: int) -> tuple[int, int]:
    """Return minimum and maximum of ``--nnodes``; 1 and `max_nodes` if it is not given.

    Raises:
        UsageError: The text is not ``N`` or ``MIN:MAX``, or no number of nodes satisfies it.
    """
    if text is None:
        return 1, max_nodes
    match = _NODES.fullmatch(text.strip())
    if not match:
        raise UsageError(f"--nnodes {text!r} is neither a number nor MIN:MAX; write it as in 4 or 2:4")
    min_nodes, max_nodes = int(match[1]), int(match[2] or match[1])
    if min_nodes == 0:
        raise UsageError(f"--nnodes {text}: a run needs at least one node; write it as in 1:{max(max_nodes, 1)}")
    if min_nodes > max_nodes:
        raise UsageError(f"--nnodes {text}: the minimum is above the maximum; write it as in {max_nodes}:{min_nodes}")
    return min_nodes, max_nodes


def leader_node(option: str | None, job: SlurmJob | None, node: str, *, shared: bool) -> str:
    """Return the node whose agent leads the first term of this incarnation; of any job where the run is `shared`.

    Raises:
        UsageError: The job, which is the whole run, has no such node.
    """
    nodes = job.nodes if job is not None else (node,)
    if not option:
        return nodes[0]
    if option in nodes or (shared and job is not None):
        return option
    if job is None:
        raise UsageError(f"--leader-node {option}: outside Slurm there is one node, {node}; leave the option out")
    if job.restart_count:
        # The name was right at submission: the job must not fail because Slurm has given it other nodes since.
        if job.node_rank == 0:
            _log.warning("--leader-node %s is not among the nodes of this start: %s leads", option, nodes[0])
        return nodes[0]
    raise UsageError(f"--leader-node {option} is not a node of this job; it has {', '.join(nodes)}")


def _spelled(name: str) -> str:
    return "--" + name.replace("_", "-")


def require_entry_point(options: argparse.Namespace, node: str) -> None:
    """Check the script or program; not a module, because finding that may import its packages.

    Raises:
        UsageError: It does not exist, or cannot be read or executed.
    """
    if options.module:
        return
    name: str = options.training_script
    if options.no_python and not options.run_path:
        # Not at the top: it takes longer to import than everything else here, and few need it.
        import shutil

        if shutil.which(name) is None:
            raise UsageError(f"no program {name} on {node}; give a path, or a name that is in PATH there")
        return
    path = Path(name)
    if not os.path.lexists(path):
        raise UsageError(f"no script {path.absolute()} on {node}; {_hint(path)}")
    if path.is_dir():
        # Python runs a directory that holds a __main__.py, python(1).
        if not (path / "__main__.py").is_file():
            raise UsageError(f"{path.absolute()} is a directory without __main__.py; name the script in it")
    elif not os.access(path, os.R_OK):
        raise UsageError(f"{path.absolute()} cannot be read by this user on {node}; fix its permissions")


def _hint(path: Path) -> str:
    try:
        there = [entry.name for entry in path.absolute().parent.iterdir()]
    except OSError:
        return "its directory is not there; use one on a disk that all nodes share"
    return did_you_mean(path.name, there, "give its path, on a disk that all nodes share")


def require_running_job(job: SlurmJob | None) -> None:
    """Refuse the environment of a job that has ended, which the shell of a terminal multiplexer keeps.

    Slurm is asked only if the first process of the task or batch script, which Slurm names, is not on this node.
    """
    task = os.environ.get("SLURM_TASK_PID", "")
    if job is None or not task.isdecimal() or os.path.exists(f"/proc/{task}"):  # noqa: PTH110
        return
    if Controller().is_queued(job.name) is False:
        raise UsageError(
            f"this environment is that of job {job.name}, which has ended; use a new shell, or unset all SLURM_ "
            "variables to train outside Slurm"
        )


def refuse_early(options: Scan) -> None:
    """Refuse a job that has ended, and a script that is not there, before the import of torch takes its seconds.

    With an option that is not known here, the scan may take another word for the script: then torch's parser decides.
    """
    job = SlurmJob.from_environment(os.environ)
    require_running_job(job)
    if options.is_understood:
        script = argparse.Namespace(module=options.has("module"), no_python=False, training_script=options.script)
        require_entry_point(script, job.node if job is not None else "localhost")
