"""The executor: what submitit's SlurmExecutor does, with one elastic agent on each node in the place of its tasks."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from submitit.core import core, utils
from submitit.slurm import slurm

from slurm_elastic.errors import UsageError, did_you_mean
from slurm_elastic.submission.entry import Script
from slurm_elastic.submission.job import ElasticJob
from slurm_elastic.submission.parameters import SlurmParameters, long_names, slurm_parameters
from slurm_elastic.submission.plan import NodeRange, Plan, Shape, environment_lines, read_template
from slurm_elastic.submission.sbatch import submit
from slurm_elastic.submission.store import Stored, writable_folder

__all__ = ["AgentWish", "ElasticExecutor"]

_SAID_OTHERWISE = {
    "--nnodes": "min_nodes and max_nodes",
    "--nproc-per-node": "workers_per_node",
    "--max-restarts": "max_restarts",
    "--rdzv-id": None,
    "--run-id": None,
    "--run-dir": "folder",
    "--standalone": None,
}


@dataclass(frozen=True, slots=True)
class AgentWish:
    """What the agents are told beside what follows from the job.

    Attributes:
        workers_per_node: None for the GPUs of the node.
        max_restarts: how many failures of workers the run survives.
        arguments: other options, as on the agent's command line.
    """

    workers_per_node: int | None = None
    max_restarts: int = 0
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.workers_per_node is not None and self.workers_per_node < 1:
            raise UsageError(f"workers_per_node={self.workers_per_node}: give a number from 1 on")
        if self.max_restarts < 0:
            raise UsageError(f"max_restarts={self.max_restarts} is negative; give 0 or more")
        for argument in self.arguments:
            name = argument.partition("=")[0].replace("_", "-")
            if name in _SAID_OTHERWISE:
                mend = _SAID_OTHERWISE[name]
                raise UsageError(f"{argument}: {f'say it by {mend}' if mend else 'a submission decides that itself'}")
            if not argument.startswith("-") or argument == "--":
                raise UsageError(f"{argument!r} is no option of the agents; write options as --name=value")

    def words(self, run_dir: Path) -> tuple[str, ...]:
        """The options."""
        workers = () if self.workers_per_node is None else (f"--nproc-per-node={self.workers_per_node}",)
        restarts = (f"--max-restarts={self.max_restarts}",) if self.max_restarts else ()
        return (*workers, *restarts, f"--run-dir={run_dir}", *self.arguments)


class ElasticExecutor(slurm.SlurmExecutor):
    """Submits elastic runs: functions that run in every worker, or scripts.

    ::

        executor = ElasticExecutor("runs", min_nodes=2, max_nodes=4, workers_per_node=8)
        executor.update_parameters(timeout_min=240, slurm_partition="low")
        job = executor.submit(train, config)
        job.results()   # what train returned, by rank

    Args:
        folder: on a disk that all nodes share; may hold ``%j``, the job id.
        min_nodes: a round needs at least as many; without it the run goes on with what is left.
        max_nodes: the job gets at most as many; an array has as many elements.
        workers_per_node: the GPUs that the job has on a node, if not given.
        shape: ``allocation``, one job of so many nodes, or ``array``, a job array with a node from every element, which
            Slurm preempts and starts again one by one.
        max_restarts: how many failures of workers the run survives.
        agent_arguments: other options of ``slurm-elastic agent``, as ``--interface=ib0``.
        template: a batch script with your site's lines, as ``slurm-elastic template`` prints it; else the file that
            SLURM_ELASTIC_TEMPLATE names, else the package's own.
        max_pickle_size_gb: see submitit.

    Raises:
        UsageError: here and in every method, for what a person has to mend; one line, and nothing was submitted.
    """

    job_class = ElasticJob

    def __init__(
        self,
        folder: str | Path,
        min_nodes: int | None = None,
        max_nodes: int | None = None,
        workers_per_node: int | None = None,
        *,
        shape: str = "allocation",
        max_restarts: int = 0,
        agent_arguments: Sequence[str] = (),
        template: str | Path | None = None,
        max_pickle_size_gb: float = 1.0,
    ) -> None:
        if shutil.which("sbatch") is None:
            raise UsageError("no sbatch in PATH: this machine is no part of a cluster; LocalElasticExecutor runs here")
        super().__init__(folder, max_pickle_size_gb=max_pickle_size_gb)
        self.shape = Shape.parse(shape)
        self.min_nodes, self.max_nodes = min_nodes, max_nodes
        self.agent = AgentWish(workers_per_node, max_restarts, tuple(agent_arguments))
        self.template = template
        if self.shape is Shape.ARRAY and "%a" in str(folder):
            raise UsageError(f"folder {folder}: the elements of an array are one run with one folder; leave %a out")
        self.plan(())

    def submit_script(self, path: str | Path, *arguments: str) -> core.Job[None]:
        """Submit a script that every worker runs, as with torchrun; it is taken from where it lies when it starts."""
        return self.submit(Script(str(path), arguments))

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        if kwargs.get("mem_gb") is not None:
            kwargs["mem_gb"] = slurm._convert_mem(kwargs["mem_gb"])
        named = long_names(kwargs, cast(Mapping[str, str], self._equivalence_dict()), "slurm_")
        known = self._valid_parameters()
        for name in named:
            if name not in known:
                mend = did_you_mean(name, known, otherwise="others go into slurm_additional_parameters")
                raise UsageError(f"no parameter {name!r}; {mend}")
        merged = {**self.parameters, **named}
        self._planned((), slurm_parameters(merged))
        self.parameters = merged

    def _nodes(self, parameters: SlurmParameters) -> NodeRange:
        if parameters.nodes is not None:
            if self.min_nodes is not None or self.max_nodes is not None:
                raise UsageError("the number of nodes is said twice: leave slurm_nodes out, max_nodes is it")
            return NodeRange(None, parameters.nodes)
        most = self.max_nodes if self.max_nodes is not None else self.min_nodes or 1
        # With a maximum alone the job takes what is free, from one node on.
        least = self.min_nodes if self.min_nodes is not None or self.max_nodes is None else 1
        return NodeRange(least, most)

    def plan(self, entry: tuple[str, ...]) -> Plan:
        """Return what a submission is now, given what the workers run; options of the agents may stand before it."""
        return self._planned(entry, slurm_parameters(self.parameters))

    def _planned(self, entry: tuple[str, ...], parameters: SlurmParameters) -> Plan:
        for name in ("output", "error", "open-mode", "nodes"):
            if name in parameters.options:
                raise UsageError(f"slurm_additional_parameters: {name} is decided by the executor; leave it out")
        outputs = utils.JobPaths(self.folder)
        out, err = str(outputs.stdout), str(outputs.stderr)
        options: dict[str, str | None] = {"job-name": "elastic", **parameters.options}
        for name, path in (("output", out), ("error", err)):
            if name == "output" or not parameters.stderr_to_stdout:
                # An element's own job id is that of no run.
                options[name] = (
                    path.replace("%j_%t", "%A_%a").replace("%j", "%A")
                    if self.shape is Shape.ARRAY
                    else path.replace("%t", "0")
                )
        options["open-mode"] = "append"
        if parameters.signal_delay is not None:
            options["signal"] = f"USR2@{parameters.signal_delay}"
        base = utils.JobPaths.get_first_id_independent_folder(self.folder)
        return Plan(
            shape=self.shape,
            nodes=self._nodes(parameters),
            options=options,
            without=parameters.without,
            agent=self.agent.words(base),
            entry=entry,
            setup=(*environment_lines(), *parameters.setup),
            srun_options=parameters.srun_options,
            teardown=parameters.teardown,
        )

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        """Return the script: `command` is already all of it."""
        return command

    def _internal_process_submissions(
        self, delayed_submissions: Sequence[utils.DelayedSubmission]
    ) -> list[core.Job[Any]]:
        # An array of submitit's would be one run to the agents, so that each submission of a batch is a job of its own.
        return [self._submit_one(delayed) for delayed in delayed_submissions]

    def _submit_one(self, delayed: utils.DelayedSubmission) -> core.Job[Any]:
        template = read_template(self.template, self.shape)
        delayed.set_timeout(self.parameters.get("time", 0), self.max_num_timeout)
        uid = uuid.uuid4().hex
        stored = Stored(delayed, self.folder, uid, self.max_pickle_size_gb)
        file = writable_folder(self.folder) / f".submission_file_{uid}.sh"
        try:
            file.write_text(self.plan((*stored.agent, *stored.entry)).script(template).text())
            self._throttle()
            self._last_job_submitted = time.time()
            job = self.job_class(folder=self.folder, job_id=submit([str(file)]))
        except BaseException:
            stored.discard()
            file.unlink(missing_ok=True)
            raise
        stored.keep_for(job)
        job.paths.move_temporary_file(file, "submission_file", keep_as_symlink=True)
        return job
