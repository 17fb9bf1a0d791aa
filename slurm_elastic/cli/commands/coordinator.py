"""``slurm-elastic coordinator``, formerly ``store``: leads a run from a process that has no workers."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from slurm_elastic.cli._command import Command, Parser
from slurm_elastic.errors import UsageError

if TYPE_CHECKING:
    from slurm_elastic.agent.signals import Notices
    from slurm_elastic.rendezvous.connect import RendezvousConfig
    from slurm_elastic.rundir import RunDir
    from slurm_elastic.slurm import Controller, SlurmJob


class Coordinator(Command):
    """Leads a run from a job that is not preempted; if it ends before the run, an agent takes over the leadership."""

    name = "coordinator"
    summary = "lead a run without workers, for instance from a small job that is not preempted"
    examples = """\
  slurm-elastic coordinator 1234 --nnodes 2:8              lead the array 1234
  slurm-elastic coordinator my-run --nnodes 2:8            lead the agents with --run-id my-run
  slurm-elastic coordinator --nnodes 2:8 --submit --array=0-7 array.sbatch train.py
                                                           submit the run, and lead it from its beginning

The bounds of the leader count: give the agents the same --nnodes. With --submit they get it from here.
"""

    def add_options(self, parser: Parser) -> None:
        parser.add_argument(
            "run_id", metavar="RUN", nargs="?", help="id of the run: id of the array, or the --run-id of the agents"
        )
        parser.add_argument("--nnodes", required=True, metavar="MIN:MAX", help="bounds of a round, as for the agents")
        for name, metavar in (("--node-unit", "K"), ("--valid-nodes", "N,N,..."), ("--segment", "K")):
            parser.add_argument(name, metavar=metavar, help="as for the agents")
        parser.add_argument("--max-restarts", default="0", metavar="N", help="as for the agents (default: 0)")
        parser.add_argument("--rdzv-conf", default="", metavar="KEY=VALUE,...", help="as for the agents")
        parser.add_argument(
            "--run-dir", metavar="DIR", help="as for the agents (default: the directory in which sbatch was called)"
        )
        parser.add_argument("--interface", metavar="NAME", help="network interface by which agents reach this node")
        parser.add_argument(
            "--local-addr", metavar="ADDRESS", help="address by which agents reach this node, used as it is"
        )
        parser.add_argument("--grace", metavar="SECONDS", help="seconds from SIGTERM to SIGKILL (default: 30)")
        help_text = (
            "last option: arguments of sbatch for the job of the run; the coordinator ends when that job has ended"
        )
        parser.add_argument("--submit", nargs=argparse.REMAINDER, metavar="...", help=help_text)

    def run(self, arguments: Sequence[str]) -> int:
        options = self._options(arguments)
        from slurm_elastic.agent.signals import record_signals

        notices = record_signals()
        from slurm_elastic.agent.console_log import configure_logging
        from slurm_elastic.agent.coordinator import coordinate
        from slurm_elastic.agent.workers.output import make_output_nonblocking
        from slurm_elastic.slurm import Reader, drop_foreign

        # Not by the submission alone, which would take PET_* below for leftovers in the environment of a worker.
        drop_foreign(os.environ, Reader.TASK)
        make_output_nonblocking()
        configure_logging(os.environ.get("SLURMD_NODENAME", "localhost"))
        rendezvous, grace, job = _rendezvous(options, os.environ, notices)

        def submit_run() -> str:
            from slurm_elastic.submission.sbatch import submit

            os.environ.update(_agent_variables(options, rendezvous.run_dir))
            submitted = submit(options.submit)
            print(f"submitted job {submitted}; its run is {rendezvous.run_id}", flush=True)
            return submitted

        with contextlib.closing(rendezvous.records):
            return int(coordinate(rendezvous, notices, grace, job, submit_run if options.submit else None))

    def _options(self, arguments: Sequence[str]) -> argparse.Namespace:
        options = self.parser().parse_args(arguments)
        if options.submit == []:
            raise UsageError("--submit: name a batch script, as in --submit --array=0-7 array.sbatch train.py")
        if options.run_id is None and options.submit is None:
            raise UsageError(
                "no run is named; give the id of its array or the --run-id of its agents, or submit the run by --submit"
            )
        return options


def _rendezvous(
    options: argparse.Namespace, environ: Mapping[str, str], notices: Notices
) -> tuple[RendezvousConfig, float, str | None]:
    """Return what the coordinator takes part with, the seconds from SIGTERM to its end, and the job to watch."""
    from slurm_elastic.agent.option_values import base_directory, node_range, read_options
    from slurm_elastic.observe.find import base_and_id
    from slurm_elastic.rendezvous.connect import RendezvousConfig
    from slurm_elastic.rendezvous.membership.agents import AgentIdentity
    from slurm_elastic.rendezvous.options import RendezvousOptions
    from slurm_elastic.rendezvous.records.api import etcd_wanted, open_records
    from slurm_elastic.rundir import RunDir, incarnation
    from slurm_elastic.slurm import Controller, SlurmJob, ephemeral_low, port_sequence
    from slurm_elastic.snapshot.lineage import choose

    job = SlurmJob.from_environment(environ)
    if not options.max_restarts.isdecimal():
        raise UsageError(f"--max-restarts {options.max_restarts!r} is no number; give 0 or more")
    config = _config(options.rdzv_conf) | {name: value for name, value in _sizes(options).items() if value}
    bounds = RendezvousOptions.from_config(config)
    least, most = bounds.node_range(*node_range(options.nnodes, 1))
    grace = read_options({"grace": options.grace}.get).grace
    own = f"store-{job.job_id if job else secrets.token_hex(4)}"
    run_dir = RunDir.for_run(*base_and_id(base_directory(options.run_dir, job), options.run_id or own))
    controller = Controller()
    watched = None if options.submit else _job_of_run(run_dir, controller)
    address = _address(options, job, controller)
    node, job_id, restarts = (job.node, job.job_id, job.restart_count) if job else ("localhost", "0", 0)
    # Jobs that start at different times join the run, and so does one that was started again.
    own_incarnation, etcd = incarnation(run_dir.run_id, 0), etcd_wanted(None, config, environ)

    def is_signalled() -> bool:
        return notices.first() is not None

    rendezvous = RendezvousConfig(
        run_id=run_dir.run_id,
        run_dir=run_dir.open(),
        records=open_records(run_dir, own_incarnation, etcd, limit=bounds.etcd_limit, interrupted=is_signalled),
        incarnation=own_incarnation,
        agent=str(AgentIdentity(node, job_id, restarts, os.getpid())),
        node=node,
        address=address,
        min_nodes=least,
        max_nodes=most,
        max_restarts=int(options.max_restarts),
        may_lead=True,
        leader_host=address,
        ports=port_sequence(run_dir.run_id, 0, ephemeral_low()),
        options=bounds,
        has_workers=False,
        choose_origin=choose,
    )
    return rendezvous, grace, watched


def _sizes(options: argparse.Namespace) -> dict[str, str | None]:
    return {"node_unit": options.node_unit, "valid_nodes": options.valid_nodes, "segment": options.segment}


def _config(text: str) -> dict[str, object]:
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    for key, sign, _ in pairs:
        if not sign:
            raise UsageError(f"--rdzv-conf: {key!r} is no KEY=VALUE; write it as in heartbeat_limit=3,on_tie=none")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _job_of_run(run_dir: RunDir, controller: Controller) -> str | None:
    """Return the id of the array to watch in the queue; None if the run id does not tell its jobs."""
    run_id = run_dir.run_id
    if not run_id.isdecimal():
        return None
    view = controller.job(run_id)
    if view is not None and view.array_job_id is None and view.job_id == run_id:
        raise UsageError(
            f"job {run_id} is no array, and becomes another run when Slurm requeues it; submit it with --run-id NAME "
            "for its agents, and give that name here"
        )
    queued = controller.is_queued(run_id)
    if queued is False and not run_dir.path.is_dir():
        raise UsageError(
            f"no job {run_id} is in the queue, and there is no such run in {run_dir.path.parent}; change to the "
            "directory in which sbatch was called, or give --run-dir"
        )
    return run_id if queued else None


def _address(options: argparse.Namespace, job: SlurmJob | None, controller: Controller) -> str:
    from slurm_elastic.slurm import AddressPreference, choose_address, gather_facts

    if job is None and not (options.local_addr or options.interface):
        raise UsageError("outside Slurm the address of this machine is unknown; give --local-addr or --interface")
    preference = AddressPreference(options.local_addr, options.interface)
    return choose_address(preference, gather_facts(preference, job.node if job else "localhost", controller=controller))


def _agent_variables(options: argparse.Namespace, run_dir: RunDir) -> dict[str, str]:
    variables = {
        "PET_RDZV_ID": run_dir.run_id,
        "PET_RUN_DIR": str(run_dir.path.parent.parent),
        "PET_NNODES": options.nnodes,
        "PET_MAX_RESTARTS": options.max_restarts,
    }
    variables |= {f"PET_{name.upper()}": value for name, value in _sizes(options).items() if value}
    return {**variables, "PET_RDZV_CONF": options.rdzv_conf} if options.rdzv_conf else variables
