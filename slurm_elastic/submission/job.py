"""A submitted run as a submitit Job: the results of all ranks of the last round, and the end of the run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from submitit.core import core, utils
from submitit.local import local
from submitit.slurm import slurm

from slurm_elastic import typed_json
from slurm_elastic.agent.root_cause import recorded_traceback, root_cause
from slurm_elastic.ownership import unpickle
from slurm_elastic.rendezvous.membership.agents import WorkerFailure
from slurm_elastic.rundir import RunDir, list_names, runs_of_job
from slurm_elastic.submission.job_states import RunStatus, is_final, latest_log, read_status, state_of_array
from slurm_elastic.submission.payload import Script, read_ranks, script_file
from slurm_elastic.submission.resize import further_jobs, resize

_LINES = 40
_USAGE = "slurm-elastic: error: "


class WorkerFailedError(utils.FailedJobError):
    """A failed worker ended the run; this is the root cause.

    Attributes:
        rank: Rank of the worker in the last round.
        node: Slurm's name of the worker's node.
        exit_code: Exit code of the worker; if negative, the signal that killed it.
    """

    def __init__(self, job_id: str, failure: WorkerFailure) -> None:
        """Say the worker's rank and node, its whole traceback, and the paths of its logs."""
        lines = root_cause(failure).splitlines()
        trace = recorded_traceback(failure.error_file).rstrip()
        if trace:
            rest = [line for line in lines[1:] if not line.startswith("  ")]
            lines = [lines[0], "-" * 22, trace, "-" * 22, *rest]
        super().__init__(f"job {job_id}: " + "\n".join(lines))
        self.rank, self.node, self.exit_code = failure.rank, failure.node, failure.exit_code


class _Run(core.Job[core.R]):
    """The methods that runs add to jobs of submitit. `task(k)` is rank k of the newest round, and a job of its own."""

    _rank: int | None = None
    _results_timeout_s = 15

    @property
    def run_dir(self) -> RunDir:
        """Directory of the run."""
        base = utils.JobPaths.get_first_id_independent_folder(self.paths._folder)
        # The only run of its job; its number is not that of the job alone where the site block has steps before it.
        return next(iter(runs_of_job(base, self.job_id)), RunDir.for_run(base, self.job_id))

    @property
    def num_tasks(self) -> int:
        """Number of workers in the newest round; 1 before the first round."""
        if self._rank is not None:
            return 1
        # This process does not read records in etcd; then only the number of ranks with results is known.
        return read_status(self.run_dir).world_size or read_ranks(self.paths) or 1

    def task(self, task_id: int) -> Any:
        """Return the job of the worker with this rank in the newest round."""
        if not 0 <= task_id < self.num_tasks:
            raise ValueError(f"task_id {task_id} must be between 0 and {self.num_tasks - 1}")
        if self._rank is not None:
            return self
        rank = self._of_rank(task_id)
        rank._rank = task_id
        return rank

    def _of_rank(self, rank: int) -> Any:
        return self.__class__(folder=self.paths._folder, job_id=self.job_id, tasks=(rank,))

    def submission(self) -> utils.DelayedSubmission:
        """Return the submitted function or script."""
        script = script_file(self.paths)
        return (
            utils.DelayedSubmission(typed_json.decode(script.read_text(), Script))
            if script.exists()
            else unpickle(self.paths.submitted_pickle)
        )

    def done(self, force_check: bool = False) -> bool:
        """Return True if the run has ended. The answer may be some seconds old, to spare Slurm's accounting."""
        status = read_status(self.run_dir)
        return status.done or status.failure is not None or self._has_ended(force_check)

    def _has_ended(self, force_check: bool) -> bool:
        return bool(super().done(force_check))

    def results(self) -> list[core.R]:
        """Wait for the end and return the results of the function by rank in the last round.

        Raises:
            WorkerFailedError: A failed worker ended the run.
            UncompletedJobError: The run ended in another way, such as by a time limit.
        """
        error = self.exception()
        if error is not None:
            raise error
        if self._rank is not None:
            return [self._value()]
        return [self.task(rank)._value() for rank in range(self.num_tasks)]

    def _value(self) -> Any:
        if script_file(self.paths).exists():
            return None
        path, give_up = self.paths.result_pickle, time.monotonic() + self._results_timeout_s
        # A slow file system may show it a moment after the end of the run.
        while path.name not in list_names(path.parent) and time.monotonic() < give_up:
            time.sleep(1)
        try:
            outcome, value = unpickle(path)
        except FileNotFoundError:
            raise utils.UncompletedJobError(f"job {self.job_id} has no result: {path} is missing") from None
        if outcome != "success":
            raise utils.UncompletedJobError(f"{self.paths.result_pickle} holds no result of this run")
        return value

    def exception(self) -> utils.UncompletedJobError | None:
        """Wait for the end and return the error of a run without results; None if it has results."""
        self.wait()
        status = read_status(self.run_dir)
        # The exit code says it, too, for records that this process does not read.
        if status.done or self.state == "COMPLETED":
            return None
        if status.failure is not None:
            return WorkerFailedError(self.job_id, status.failure)
        return utils.UncompletedJobError(self._description(status))

    def _description(self, status: RunStatus) -> str:
        output = (self.stderr() or self.stdout() or "").splitlines()
        usage = [line.removeprefix(_USAGE) for line in output if line.startswith(_USAGE)]
        how = f"job {self.job_id} ended in state {self.state}, its run unfinished"
        if usage:
            return f"{how}: {usage[0]}"
        if not output and status.world_size is None:
            return (
                f"{how} and without output; if it has started, {self.paths.folder} may not be on a disk that all nodes "
                "share"
            )
        return "\n".join([f"{how}; its last output:", *output[-_LINES:]])

    def _get_logs_string(self, name: str) -> str | None:
        """Return the output of all workers, also of agents on stderr; for a task, of its rank in the last round."""
        if self._rank is not None:
            log = latest_log(self.run_dir, self._rank, name)
            return None if log is None else log.read_text(errors="replace")
        # The job has one file, an array one for each element, a run on one machine one for each agent.
        pattern = Path(self.paths.stdout if name == "stdout" else self.paths.stderr)
        files = sorted(pattern.parent.glob(pattern.name.replace(f"{self.job_id}_0_", f"{self.job_id}_*_")))
        return "\n".join(file.read_text(errors="replace") for file in files) if files else None


class ElasticInfoWatcher(slurm.SlurmInfoWatcher):
    """Asks Slurm's accounting; treats an array as one run, and knows in which states a run goes on."""

    def read_info(self, string: str | bytes) -> dict[str, dict[str, str]]:
        """Parse the output of sacct as submitit does, and add each array to its elements."""
        info = super().read_info(string)
        arrays: dict[str, list[dict[str, str]]] = {}
        for job_id, fields in info.items():
            array, sign, _element = job_id.partition("_")
            if sign:
                arrays.setdefault(array, []).append(fields)
        for array, elements in arrays.items():
            nodes = [fields.get("NodeList", "") for fields in elements if fields.get("State", "").startswith("R")]
            state = state_of_array(fields.get("State", "") for fields in elements)
            info[array] = {"JobID": array, "State": state, "NodeList": ",".join(nodes)}
        return info

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Return True if the job, or the whole array, has ended."""
        return is_final(self.get_state(job_id, mode=mode))


class ElasticJob(_Run[core.R], slurm.SlurmJob[core.R]):
    """A run on a cluster. Its id is the id of the job or of the array."""

    watcher = ElasticInfoWatcher(delay_s=60)

    def resize(self, nodes: int, **options: str) -> str | None:
        """Give the run, which trains, another number of nodes, as ``slurm-elastic resize`` does.

        Args:
            nodes: Nodes that the run shall have, with those that were asked for before.
            options: Options of sbatch for a further job, such as ``partition="low"``.

        Returns:
            Id of the job that was submitted; None if none was.

        Raises:
            UsageError: The run does not train, or that is beyond its bounds, or sbatch refuses the job.
        """
        named: dict[str, str | None] = {name.replace("_", "-"): value for name, value in options.items()}
        return resize(self.run_dir, size=nodes, options=named).job or None

    def _has_ended(self, force_check: bool) -> bool:
        ended = self.watcher.is_done(self.job_id, mode="force" if force_check else "standard")
        # The run may go on in further jobs.
        return ended and not further_jobs(self.run_dir)

    @property
    def state(self) -> str:
        """Slurm's name of the job's state, read again when the run directory says that the run has ended."""
        state = self.watcher.get_state(self.job_id)
        if is_final(state):
            return state
        status = read_status(self.run_dir)
        ended = status.done or status.failure is not None
        return self.watcher.get_state(self.job_id, mode="force" if ended else "standard")


class LocalElasticJob(_Run[core.R], local.LocalJob[core.R]):
    """A run on this machine.

    Attributes:
        run_id: Id of the run. The job id is a process id, which another job may get later.
    """

    run_id: str | None = None

    @property
    def run_dir(self) -> RunDir:
        """Directory of the run; of several runs with this process id the newest, if the job was made from the id."""
        base = utils.JobPaths.get_first_id_independent_folder(self.paths._folder)
        if self.run_id is not None:
            return RunDir.for_run(base, self.run_id)
        paths = list(RunDir.for_run(base, self.job_id).path.parent.glob(f"{self.job_id}-*"))
        newest = max(paths, key=lambda path: path.stat().st_mtime, default=None)
        return RunDir.for_run(base, self.job_id if newest is None else newest.name)

    def _of_rank(self, rank: int) -> Any:
        task = self.__class__(folder=self.paths._folder, job_id=self.job_id, tasks=(rank,), process=self._process)
        task.run_id = self.run_id
        return task

    def get_info(self, mode: str = "force") -> dict[str, str]:
        """Return the state: RUNNING, FINISHED or INTERRUPTED."""
        if self._process is None and read_status(self.run_dir).done:
            return {"jobState": "FINISHED"}
        return super().get_info(mode)
