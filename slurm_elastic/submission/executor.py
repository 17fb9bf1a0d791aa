"""The executors: submitit's SlurmExecutor with one elastic agent on each node in the place of its tasks; for
development several agents on this machine, or this process as the only worker.

Parameters of the SlurmExecutor become options of sbatch (submitit/slurm/slurm.py, 1.5.4).
"""

from __future__ import annotations

import shlex
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

from submitit.core import core, utils
from submitit.local import debug, local
from submitit.slurm import slurm

from slurm_elastic.errors import UsageError, did_you_mean
from slurm_elastic.submission.batch_script import (
    BatchScript,
    NodeRange,
    Shape,
    environment_lines,
    read_template,
)
from slurm_elastic.submission.job import ElasticJob, LocalElasticJob
from slurm_elastic.submission.payload import Payload, Script, writable_folder
from slurm_elastic.submission.sbatch import NoClusterError, submit

_LISTS = ("setup", "teardown", "srun_args")
_NO_OPTION = frozenset({*_LISTS, "additional_parameters", "signal_delay_s", "stderr_to_stdout", "use_srun", "nodes"})
_SHARES_OF_A_NODE = frozenset({"cpus_per_task", "mem", "mem_per_cpu", "mem_per_gpu"})


def _sbatch_options(parameters: Mapping[str, Any]) -> tuple[dict[str, str | None], tuple[str, ...]]:
    """Translate the parameters of submitit's SlurmExecutor to options of sbatch.

    Returns:
        Options, None for one without a value; and those that the script drops from the template.

    Raises:
        UsageError: A parameter would break the agents.
    """
    if not parameters.get("use_srun", True):
        raise UsageError("use_srun=False would start an agent on the first node only; leave it out")
    options: dict[str, str | None] = {}
    without = {"exclusive"} if _SHARES_OF_A_NODE & parameters.keys() else set()
    named = {
        "gpus_per_node" if name == "num_gpus" else name: value
        for name, value in parameters.items()
        if name not in _NO_OPTION and (name, value) != ("ntasks_per_node", 1)
    }
    for name, value in {**named, **(parameters.get("additional_parameters") or {})}.items():
        option = name.replace("_", "-")
        if value is False:
            without.add(option)
            if option == "requeue":
                # A site may have --requeue as its default.
                options["no-requeue"] = None
        else:
            options[option] = None if value is True else str(value)
    return options, tuple(sorted(without))


def _lines(name: str, parameters: Mapping[str, Any]) -> tuple[str, ...]:
    value: Iterable[str] | None = parameters.get(name)
    if isinstance(value, str):
        raise UsageError(f"{name}={value!r} is one text; give a list of them")
    return tuple(value or ())


_SET_OTHERWISE = {
    "--nnodes": "min_nodes and max_nodes",
    "--nproc-per-node": "workers_per_node",
    "--max-restarts": "max_restarts",
    "--rdzv-id": None,
    "--run-id": None,
    "--run-dir": "folder",
    "--standalone": None,
}


def _agent_options(
    folder: str | Path, workers_per_node: int | None, max_restarts: int, arguments: Sequence[str]
) -> tuple[str, ...]:
    """Return the options of the agents, beside those that follow from the job; see `ElasticExecutor`.

    Raises:
        UsageError: One of them is wrong, or the executor sets it.
    """
    if workers_per_node is not None and workers_per_node < 1:
        raise UsageError(f"workers_per_node={workers_per_node}: give a number from 1 on")
    if max_restarts < 0:
        raise UsageError(f"max_restarts={max_restarts} is negative; give 0 or more")
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        if name in _SET_OTHERWISE:
            fix = _SET_OTHERWISE[name]
            raise UsageError(f"{argument}: {f'give {fix}' if fix else 'the executor sets it; leave it out'}")
        if not argument.startswith("-") or argument == "--":
            raise UsageError(f"{argument!r} is no option of the agents; write options as --name=value")
    workers = () if workers_per_node is None else (f"--nproc-per-node={workers_per_node}",)
    restarts = (f"--max-restarts={max_restarts}",) if max_restarts else ()
    run_dir = utils.JobPaths.get_first_id_independent_folder(folder)
    return (*workers, *restarts, f"--run-dir={run_dir}", *arguments)


class UnknownParameterError(UsageError, NameError):
    """A parameter has no known name; submitit raises a NameError (submitit/auto/auto.py, 1.5.4)."""


class ElasticExecutor(slurm.SlurmExecutor):
    """Submits elastic runs: functions that run in every worker, or scripts.

    ::

        executor = ElasticExecutor("runs", min_nodes=2, max_nodes=4, workers_per_node=8)
        executor.update_parameters(timeout_min=240, slurm_partition="low")
        job = executor.submit(train, config)
        job.results()   # what train returned, by rank

    Args:
        folder: Folder for payloads, output and run directories, on a disk that all nodes share; may contain ``%j``, the
            job id.
        min_nodes: A round needs at least this many nodes; None for one.
        max_nodes: The job gets at most this many nodes; an array has this many elements.
        workers_per_node: Number of workers on each node; None for the number of its GPUs.
        shape: ``allocation`` for one job with all nodes, or ``array`` for a job array with one node per element, which
            Slurm preempts and requeues one by one.
        max_restarts: Number of worker failures that the run survives.
        agent_arguments: Further options of ``slurm-elastic agent``, such as ``--interface=ib0``.
        template: Batch script with your site's lines, as ``slurm-elastic template`` prints it; None for the file that
            SLURM_ELASTIC_TEMPLATE names, else the template of the package.
        max_pickle_size_gb: Maximum size of the pickled function and arguments, as in submitit.

    Raises:
        UsageError: The constructor and every method raise it for mistakes of the user; nothing was submitted then.
    """

    job_class = ElasticJob

    def __init__(
        self,
        folder: str | Path,
        min_nodes: int | None = None,
        max_nodes: int | None = None,
        workers_per_node: int | None = None,
        *,
        shape: Literal["allocation", "array"] = "allocation",
        max_restarts: int = 0,
        agent_arguments: Sequence[str] = (),
        template: str | Path | None = None,
        max_pickle_size_gb: float = 1.0,
    ) -> None:
        if shutil.which("sbatch") is None:
            raise NoClusterError("no sbatch in PATH: this machine belongs to no cluster; use LocalElasticExecutor here")
        super().__init__(folder, max_pickle_size_gb=max_pickle_size_gb)
        self.shape = Shape(shape)
        self.min_nodes, self.max_nodes = min_nodes, max_nodes
        self.agent_options = _agent_options(folder, workers_per_node, max_restarts, agent_arguments)
        self.template = template
        if self.shape is Shape.ARRAY and "%a" in str(folder):
            raise UsageError(f"folder {folder}: the elements of an array are one run with one folder; leave %a out")
        self.plan(())

    def submit(self, fn: Callable[..., core.R], *args: Any, **kwargs: Any) -> ElasticJob[core.R]:
        """Submit a function that every worker calls with these arguments."""
        return cast("ElasticJob[core.R]", super().submit(fn, *args, **kwargs))

    def submit_script(self, path: str | Path, *arguments: str) -> ElasticJob[None]:
        """Submit a script that every worker runs, as with torchrun; workers read the file when they start."""
        return self.submit(Script(str(path), arguments))

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        if kwargs.get("mem_gb") is not None:
            kwargs["mem_gb"] = slurm._convert_mem(kwargs["mem_gb"])
        # ``timeout_min``, which every executor knows, and ``slurm_time``, which the AutoExecutor accepts, are ``time``.
        names, equivalents = self._valid_parameters(), cast(Mapping[str, str], self._equivalence_dict())
        named: dict[str, Any] = {}
        for parameter, value in kwargs.items():
            name = parameter.removeprefix("slurm_")
            name = equivalents.get(name, name)
            if value is None:
                continue
            if name in named:
                raise UsageError(f"{parameter} and another parameter both mean {name}; leave one of them out")
            if name not in names:
                fix = did_you_mean(name, names, otherwise="others go into slurm_additional_parameters")
                raise UnknownParameterError(f"no parameter {name!r}; {fix}")
            named[name] = value
        merged = {**self.parameters, **named}
        self.plan((), merged)
        self.parameters = merged

    def _nodes(self, nodes: int | None) -> NodeRange:
        if nodes is not None:
            if self.min_nodes is not None or self.max_nodes is not None:
                raise UsageError("the number of nodes is given twice; leave slurm_nodes out and give max_nodes")
            return NodeRange(nodes, nodes)
        most = self.max_nodes if self.max_nodes is not None else self.min_nodes or 1
        # With a maximum alone the job takes the nodes that are free, at least one.
        return NodeRange(1 if self.min_nodes is None else self.min_nodes, most)

    def plan(self, program: tuple[str, ...], parameters: Mapping[str, Any] | None = None) -> BatchScript:
        """Return the plan of a submission: its batch script.

        Args:
            program: What the workers run, with its arguments; options of the agents may stand before it.
            parameters: In place of those of the executor.
        """
        parameters = self.parameters if parameters is None else parameters
        translated, without = _sbatch_options(parameters)
        delay = parameters.get("signal_delay_s")
        if delay is not None and (isinstance(delay, bool) or not isinstance(delay, int) or delay < 0):
            raise UsageError(f"signal_delay_s={delay!r} is no number of seconds; give 0 or more")
        warning = {} if delay is None else {"signal": f"USR2@{delay}"}
        setup, teardown, srun_options = (_lines(name, parameters) for name in _LISTS)
        for name in ("output", "error", "open-mode", "nodes"):
            if name in translated:
                raise UsageError(f"slurm_additional_parameters: the executor sets {name}; leave it out")
        paths = utils.JobPaths(self.folder)
        streams = {"output": str(paths.stdout), "error": str(paths.stderr)}
        if parameters.get("stderr_to_stdout"):
            del streams["error"]
        # The id of the run is that of the array, not that of an element.
        marks = {"%j_%t": "%A_%a", "%j": "%A"} if self.shape is Shape.ARRAY else {"%t": "0"}
        for mark, text in marks.items():
            streams = {name: path.replace(mark, text) for name, path in streams.items()}
        nodes = self._nodes(parameters.get("nodes"))
        options = {"job-name": "elastic", **translated, **streams, "open-mode": "append", **warning}
        return replace(
            BatchScript.from_template(read_template(self.template, self.shape)).with_options(
                options, nodes, self.shape, without
            ),
            arguments=(nodes.for_agents, *self.agent_options, *program),
            setup=(*environment_lines(), *setup),
            srun_options=srun_options,
            teardown=teardown,
        )

    def _internal_process_submissions(
        self, delayed_submissions: Sequence[utils.DelayedSubmission]
    ) -> list[core.Job[Any]]:
        # To the agents a job array is one run, so each submission of a batch is a job of its own.
        return [self._submit_one(delayed) for delayed in delayed_submissions]

    def _submit_one(self, delayed: utils.DelayedSubmission) -> core.Job[Any]:
        delayed.set_timeout(self.parameters.get("time", 0), self.max_num_timeout)
        uid = uuid.uuid4().hex
        payload = Payload(delayed, self.folder, uid, self.max_pickle_size_gb)
        file = writable_folder(self.folder) / f".submission_file_{uid}.sh"
        try:
            file.write_text(self.plan((*payload.agent_options, *payload.words)).text())
            self._throttle()
            self._last_job_submitted = time.time()
            job: ElasticJob[Any] = self.job_class(folder=self.folder, job_id=submit([str(file)]))
        except BaseException:
            payload.discard()
            file.unlink(missing_ok=True)
            raise
        payload.keep_for(job)
        job.paths.move_temporary_file(file, "submission_file", keep_as_symlink=True)
        return job


class LocalElasticExecutor(local.LocalExecutor):
    """Runs on this machine without Slurm; each agent represents a node.

    It accepts the parameters of `ElasticExecutor` and those of submitit's LocalExecutor: ``timeout_min``,
    ``gpus_per_node``, ``visible_gpus``, ``setup``. It ignores parameters of Slurm.

    Args:
        max_nodes: The executor starts this number of agents. The other arguments are those of `ElasticExecutor`.
        max_num_timeout: How often the run starts again after a time-out, as with submitit's executors.

    Raises:
        UsageError: The constructor and every method raise it for mistakes of the user.
    """

    job_class = LocalElasticJob

    def __init__(
        self,
        folder: str | Path,
        min_nodes: int | None = None,
        max_nodes: int | None = None,
        workers_per_node: int | None = None,
        *,
        max_restarts: int = 0,
        agent_arguments: Sequence[str] = (),
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
    ) -> None:
        most = max_nodes if max_nodes is not None else min_nodes or 1
        self.nodes = NodeRange(most if min_nodes is None else min_nodes, most)
        self.agent_options = _agent_options(folder, workers_per_node, max_restarts, agent_arguments)
        super().__init__(folder, max_num_timeout=max_num_timeout, max_pickle_size_gb=max_pickle_size_gb)
        # submitit's controller starts the agents.
        self.parameters["tasks_per_node"] = self.nodes.most

    def submit(self, fn: Callable[..., core.R], *args: Any, **kwargs: Any) -> LocalElasticJob[core.R]:
        """Submit a function that every worker calls with these arguments."""
        return cast("LocalElasticJob[core.R]", super().submit(fn, *args, **kwargs))

    def submit_script(self, path: str | Path, *arguments: str) -> LocalElasticJob[None]:
        """Submit a script that every worker runs."""
        return self.submit(Script(str(path), arguments))

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        if kwargs.get("tasks_per_node", 1) != 1:
            raise UsageError(
                f"tasks_per_node={kwargs['tasks_per_node']}: give workers_per_node; each agent starts them"
            )
        if "nodes" in kwargs:
            raise UsageError("the number of nodes is given twice; leave nodes out and give max_nodes")
        mine = {name: value for name, value in kwargs.items() if not name.startswith("slurm_")}
        super()._internal_update_parameters(**mine | {"tasks_per_node": self.nodes.most})

    def _internal_process_submissions(
        self, delayed_submissions: Sequence[utils.DelayedSubmission]
    ) -> list[core.Job[Any]]:
        return [self._submit_one(delayed) for delayed in delayed_submissions]

    def _submit_one(self, delayed: utils.DelayedSubmission) -> core.Job[Any]:
        delayed.set_timeout(self.parameters.get("timeout_min", 0), self.max_num_timeout)
        uid = uuid.uuid4().hex
        payload = Payload(delayed, self.folder, uid, self.max_pickle_size_gb)
        base = utils.JobPaths.get_first_id_independent_folder(self.folder)
        words = (self.nodes.for_agents, *self.agent_options, *payload.agent_options, *payload.words)
        command = shlex.join(
            [sys.executable, "-m", "slurm_elastic.cli.local_agent", uid, str(self.max_num_timeout), str(base), *words]
        )
        started: local.LocalJob[Any] = self._submit_command(command)
        job: LocalElasticJob[Any] = LocalElasticJob(folder=self.folder, job_id=started.job_id, process=started._process)
        job.run_id = f"{job.job_id}-{uid[:8]}"
        payload.keep_for(job)
        return job


class DebugElasticExecutor(debug.DebugExecutor):
    """Runs in this process, as the only worker, when the caller asks for the result.

    It accepts the parameters of `ElasticExecutor`.
    """

    def __init__(self, folder: str | Path, *_given: Any, **_named: Any) -> None:
        super().__init__(folder)

    def submit_script(self, path: str | Path, *arguments: str) -> core.Job[None]:
        """Submit a script."""
        return self.submit(Script(str(path), arguments))

    def _internal_process_submissions(self, delayed_submissions: list[utils.DelayedSubmission]) -> list[core.Job[Any]]:
        jobs = super()._internal_process_submissions(delayed_submissions)
        for job in jobs:
            assert isinstance(job, debug.DebugJob)
            function = job.submission().function
            if isinstance(function, Script):
                function.require_exists()
            # torch.distributed.init_process_group() needs the variables that an agent sets.
            job.environ.update(_only_worker(job.job_id))
        return jobs


def _only_worker(job_id: str) -> dict[str, str]:
    zeros = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "TORCHELASTIC_RESTART_COUNT", "SLURM_ELASTIC_ROUND")
    ones = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")
    return {
        **dict.fromkeys(zeros, "0"),
        **dict.fromkeys(ones, "1"),
        "MASTER_ADDR": "127.0.0.1",
        # The store of the only worker takes a free port when it is made: one chosen here may be taken by then.
        "MASTER_PORT": "0",
        "SLURM_ELASTIC_RUN_ID": job_id,
        "SLURM_ELASTIC_NODE": "localhost",
        "SLURM_ELASTIC_REASON": "start",
    }
