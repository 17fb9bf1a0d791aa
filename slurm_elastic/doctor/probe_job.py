"""Gathers the facts about a site: here, and by the doctor's own job, its batch script and the wait for its nodes."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from slurm_elastic.agent.option_values import seconds_or_zero
from slurm_elastic.doctor.facts import NodeFacts, ProbeResult, SiteFacts
from slurm_elastic.doctor.gather import etcd_facts, last_stop, node_facts, require_partition, run_dir_facts, slurm_facts
from slurm_elastic.doctor.probe import read_file, result_name
from slurm_elastic.errors import UsageError
from slurm_elastic.rendezvous.records.api import etcd_wanted
from slurm_elastic.rundir import RunDir
from slurm_elastic.slurm import AddressPreference, Controller
from slurm_elastic.submission.batch_script import BatchScript, NodeRange, Shape, environment_lines, read_template
from slurm_elastic.submission.sbatch import submit

_LEFT_OUT = ("array", "open-mode", "requeue", "signal", "no-kill")
"""Options of the template that are for trainings."""
_DEFAULTS = {"job-name": "slurm-elastic-doctor", "time": "5"}
_BODY = """\
command -v slurm-elastic >/dev/null || ((${#srun_options[@]} + ${#container[@]})) || {
  echo "no slurm-elastic on $SLURMD_NODENAME; activate its environment in the site block of the template" >&2
  exit 2
}
unset "${!SLURM_CPUS_PER_@}" SRUN_CPUS_PER_TASK "${!SLURM_MEM_@}" "${!SLURM_NTASKS@}" SLURM_NPROCS SLURM_TRES_PER_TASK
unset "${!SLURM_GPUS_PER_@}" SLURM_GPUS SLURM_GPU_BIND SLURM_TRES_BIND SLURM_GRES SLURM_EXACT SLURM_EXCLUSIVE
unset SLURM_OVERCOMMIT SLURM_HINT SLURM_CORE_SPEC SLURM_THREADS_PER_CORE "${!SLURM_DIST@}"
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \\
  --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --gpu-bind=none --export=ALL \\
  "${srun_options[@]}" "${container[@]}" slurm-elastic doctor "$@"
"""
_POLL = 0.5
_AFTER_THE_END = 3.0
"""Seconds that results may take to be seen here once the job is over."""
_LAST_LINES = 5


def batch_script(
    template: str, nodes: int, options: Mapping[str, str | None], arguments: Sequence[str], output: Path
) -> BatchScript:
    """Return the doctor's batch script: the template's options and site block, and the doctor in place of the agents.

    Args:
        template: The text of the user's template.
        nodes: Number of nodes.
        options: The user's options of sbatch, which replace the others.
        arguments: Those of the doctor on the nodes.
        output: File for what the job prints.

    Raises:
        UsageError: An option is not possible, or the template cannot be used.
    """
    made: dict[str, str | None] = {**_DEFAULTS, "nodes": str(nodes), "no-requeue": None, "output": str(output)}
    without = (*_LEFT_OUT, *(("exclusive",) if "cpus-per-task" in options else ()))
    script = BatchScript.from_template(template).with_options({**made, **options}, without=without)
    return replace(script, arguments=tuple(arguments), setup=environment_lines(), body=tuple(_BODY.splitlines()))


@contextlib.contextmanager
def removed_afterwards(run_dir: RunDir) -> Iterator[None]:
    """Remove the directory of the doctor's run, and the one above if there are no runs in it."""
    try:
        yield
    finally:
        shutil.rmtree(run_dir.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            run_dir.path.parent.rmdir()


def template_options(template: str | None) -> Mapping[str, str | None]:
    """Return the options of sbatch in the user's template.

    Raises:
        UsageError: The template cannot be read.
    """
    return dict(BatchScript.from_template(read_template(template, Shape.ALLOCATION)).options)


def node_count(text: str) -> int:
    """Return the value of ``--nodes``.

    Raises:
        UsageError: It is no number, or a range.
    """
    nodes = NodeRange.parse(text)
    if nodes.least != nodes.most:
        raise UsageError(f"--nodes {text}: the doctor looks at a fixed number of nodes; give one, such as {nodes.most}")
    return nodes.most


class ProbeJob:
    """The doctor's job while it waits, runs and ends.

    Args:
        run_dir: The directory of the doctor's run, opened.
        controller: Is asked about the job.
    """

    def __init__(self, run_dir: RunDir, controller: Controller) -> None:
        self._run_dir, self._controller = run_dir, controller
        self.id = ""
        self.nodes: tuple[str, ...] = ()
        self.partition = ""
        self.qos = ""

    @property
    def output(self) -> Path:
        """The file with what the job prints."""
        return self._run_dir.path / "job.out"

    def submit(
        self, nodes: int, options: Mapping[str, str | None], arguments: Sequence[str], template: str | None
    ) -> None:
        """Submit the job.

        Raises:
            UsageError: An option is not possible, or sbatch refuses the job.
        """
        text = read_template(template, Shape.ALLOCATION)
        self.id = submit(script=batch_script(text, nodes, options, arguments, self.output).text())

    def wait(self, report: Callable[[str], None]) -> tuple[ProbeResult, ...]:
        """Wait until the job is over, and return what its nodes have found out; cancel the job when interrupted.

        Args:
            report: Is given one line whenever there is news of the job.
        """
        said, over = "", None
        # As by Ctrl-C: a job that waits in the queue would be left behind.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            while True:
                line = self._look()
                if line and line != said:
                    report(line)
                    said = line
                if over is None and self._controller.is_queued(self.id) is False:
                    over = time.monotonic()
                results = self._results()
                all_there = len(results) == len(self.nodes) > 0
                if over is not None and (all_there or time.monotonic() - over > _AFTER_THE_END):
                    return results
                time.sleep(_POLL)
        except BaseException:
            self._controller.cancel(self.id)
            raise
        finally:
            signal.signal(signal.SIGTERM, before)

    def last_lines(self) -> tuple[str, ...]:
        """Return the last lines that the job has printed; empty if there are none here."""
        try:
            lines = self.output.read_text(errors="replace").splitlines()
        except OSError:
            return ()
        # srun says so wherever TaskPlugin is task/none, of --cpu-bind=none, too.
        said = [line for line in lines if not line.startswith("srun: cluster configuration lacks support")]
        return tuple(said[-_LAST_LINES:])

    def _look(self) -> str:
        """Ask for the job's state and nodes; it keeps its nodes in scontrol's answer after its end."""
        view = self._controller.job(self.id)
        if view is None:
            return ""
        if view.nodes:
            self.nodes = view.nodes
            self.partition, self.qos = view.partition or "", view.qos or ""
        if view.state == "PENDING":
            return f"job {self.id} waits" + (f" ({view.reason})" if view.reason else "")
        return f"job {self.id} runs on {', '.join(self.nodes)}" if view.state == "RUNNING" else ""

    def _results(self) -> tuple[ProbeResult, ...]:
        results = (read_file(self._run_dir, result_name(node), ProbeResult) for node in self.nodes)
        return tuple(result for result in results if result is not None)


def gather_site(options: argparse.Namespace, sbatch: Mapping[str, str | None]) -> SiteFacts:
    """Gather the facts about a site.

    Args:
        options: The parsed command line of the doctor.
        sbatch: Its options of sbatch.

    Raises:
        UsageError: An option is wrong, or there is no Slurm.
    """
    checkpoint = seconds_or_zero("--checkpoint", options.checkpoint) if options.checkpoint else None
    nodes = None if options.nodes is None else node_count(options.nodes)
    etcd = etcd_wanted(options.rdzv_endpoint, {}, os.environ)
    controller = Controller()
    slurm = slurm_facts(controller)
    all_options = {**template_options(options.template), **sbatch}
    partition, qos = all_options.get("partition") or "", all_options.get("qos") or ""
    require_partition(slurm, partition, nodes)
    base = Path(options.run_dir or Path.cwd()).absolute()
    run_dir = RunDir.for_run(base, f"doctor-{secrets.token_hex(4)}")
    with removed_afterwards(run_dir):
        run_dir_found = run_dir_facts(run_dir)
        job = ProbeJob(run_dir, controller)
        results = None
        if nodes is not None and slurm.config is not None and not run_dir_found.error:
            passed = {"--probe": run_dir.run_id, "--run-dir": base}
            passed |= {"--interface": options.interface, "--node-pattern": options.node_pattern}
            words = [f"{name}={value}" for name, value in passed.items() if value]
            job.submit(nodes, sbatch, words, options.template)
            results = job.wait(lambda line: print(f"slurm-elastic: {line}", file=sys.stderr, flush=True))
        lines = job.last_lines()
    # This machine stands in for nodes that were not looked at; torch takes seconds.
    name = os.uname().nodename
    here = node_facts(name, AddressPreference(), controller) if results is None else NodeFacts(name)
    return SiteFacts(
        here=here,
        slurm=slurm,
        run_dir=run_dir_found,
        partition=job.partition or partition,
        qos=job.qos or qos,
        checkpoint=checkpoint,
        last_stop=last_stop(base) if checkpoint is None else None,
        expected=job.nodes,
        results=results or (),
        job=job.id,
        job_output=lines,
        etcd=etcd_facts(etcd) if etcd else None,
    )
