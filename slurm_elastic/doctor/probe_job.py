"""Gathers the facts about a site: here, and by the doctor's own job, its batch script and the wait for its nodes."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from slurm_elastic.agent.option_values import seconds_or_zero
from slurm_elastic.doctor.facts import NodeFacts, SiteFacts
from slurm_elastic.doctor.gather import etcd_facts, node_facts, require_partition, run_dir_facts, slurm_facts
from slurm_elastic.doctor.probe import read_result
from slurm_elastic.errors import UsageError
from slurm_elastic.rendezvous.records.api import etcd_wanted
from slurm_elastic.rundir import RunDir
from slurm_elastic.slurm import AddressPreference, Controller, JobView
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
OUTPUT = "job.out"
"""The file in the run directory with what the job prints."""


def batch_script(
    template: BatchScript, nodes: int, options: Mapping[str, str | None], arguments: Sequence[str], output: Path
) -> BatchScript:
    """Return the doctor's batch script: the template's options and site block, and the doctor in place of the agents.

    Args:
        options: The user's options of sbatch, which replace the others.
        arguments: Those of the doctor on the nodes.
        output: File for what the job prints.

    Raises:
        UsageError: An option is not possible.
    """
    made: dict[str, str | None] = {**_DEFAULTS, "nodes": str(nodes), "no-requeue": None, "output": str(output)}
    without = (*_LEFT_OUT, *(("exclusive",) if "cpus-per-task" in options else ()))
    script = template.with_options({**made, **options}, without=without)
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


def node_count(text: str) -> int:
    """Return the value of ``--nodes``.

    Raises:
        UsageError: It is no number, or a range.
    """
    nodes = NodeRange.parse(text)
    if nodes.least != nodes.most:
        raise UsageError(f"--nodes {text}: the doctor looks at a fixed number of nodes; give one, such as {nodes.most}")
    return nodes.most


def with_results(site: SiteFacts, run_dir: RunDir, controller: Controller) -> SiteFacts:
    """Wait until the doctor's job is over, and add what its nodes have found out; cancel the job when interrupted."""
    said, over = "", None
    try:
        while True:
            view = controller.job(site.job)
            # The job keeps its nodes in scontrol's answer after its end.
            if view is not None and view.nodes:
                site = replace(
                    site, expected=view.nodes, partition=view.partition or site.partition, qos=view.qos or site.qos
                )
            line = _news(view) if view is not None else ""
            if line not in ("", said):
                print(f"slurm-elastic: job {site.job} {line}", file=sys.stderr, flush=True)
                said = line
            if over is None and controller.is_queued(site.job) is False:
                over = time.monotonic()
            results = tuple(filter(None, (read_result(run_dir, node) for node in site.expected)))
            all_there = len(results) == len(site.expected) > 0
            if over is not None and (all_there or time.monotonic() - over > _AFTER_THE_END):
                return replace(site, results=results, job_output=_last_lines(run_dir))
            time.sleep(_POLL)
    except BaseException:
        controller.cancel(site.job)
        raise


def _news(view: JobView) -> str:
    if view.state == "PENDING":
        return f"waits ({view.reason})" if view.reason else "waits"
    return f"runs on {', '.join(view.nodes)}" if view.state == "RUNNING" else ""


def _last_lines(run_dir: RunDir) -> tuple[str, ...]:
    """Return the last lines that the job has printed; empty if there are none here."""
    try:
        lines = (run_dir.path / OUTPUT).read_text(errors="replace").splitlines()
    except OSError:
        return ()
    # srun says so wherever TaskPlugin is task/none, of --cpu-bind=none, too.
    said = [line for line in lines if not line.startswith("srun: cluster configuration lacks support")]
    return tuple(said[-_LAST_LINES:])


def gather_site(options: argparse.Namespace, sbatch: Mapping[str, str | None]) -> SiteFacts:
    """Gather the facts about a site, given the command line of the doctor and its options of sbatch.

    Raises:
        UsageError: An option is wrong, or there is no Slurm.
    """
    checkpoint = seconds_or_zero("--checkpoint", options.checkpoint) if options.checkpoint else None
    nodes = None if options.nodes is None else node_count(options.nodes)
    etcd = etcd_wanted(options.rdzv_endpoint, {}, os.environ)
    controller, node = Controller(), os.uname().nodename
    slurm = slurm_facts(controller)
    template = BatchScript.from_template(read_template(options.template, Shape.ALLOCATION))
    wanted = {**dict(template.options), **sbatch}
    partition, qos = wanted.get("partition") or "", wanted.get("qos") or ""
    require_partition(slurm, partition, nodes)
    base = Path(options.run_dir or Path.cwd()).absolute()
    run_dir = RunDir.for_run(base, f"doctor-{secrets.token_hex(4)}")
    with removed_afterwards(run_dir):
        site = SiteFacts(NodeFacts(node), slurm, run_dir_facts(run_dir), partition, qos)
        if nodes is not None and slurm.config is not None and not site.run_dir.error:
            passed = {"--probe": run_dir.run_id, "--run-dir": base}
            passed |= {"--interface": options.interface, "--node-pattern": options.node_pattern}
            words = [f"{name}={value}" for name, value in passed.items() if value]
            script = batch_script(template, nodes, sbatch, words, run_dir.path / OUTPUT)
            site = with_results(replace(site, job=submit(script=script.text())), run_dir, controller)
    return replace(
        site,
        # This machine stands in for nodes that were not looked at; torch takes seconds.
        here=site.here if site.job else node_facts(node, AddressPreference(), controller),
        checkpoint=checkpoint,
        etcd=etcd_facts(etcd) if etcd else None,
    )
