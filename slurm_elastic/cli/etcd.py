"""``slurm-elastic etcd``: runs a private etcd on this node for as long as a job needs it."""

from __future__ import annotations

import argparse
import os
import selectors
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_elastic.cli._command import Parser
from slurm_elastic.cli._serve import ServingCommand
from slurm_elastic.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from slurm_elastic.agent.signals import Notices

__all__ = ["Etcd"]

_EXAMPLES = """\
  slurm-elastic etcd --submit --nodes=2-8 elastic.sbatch train.py   serve this job while it is in the queue
  slurm-elastic etcd --dir /shared/me/etcd                          serve until a signal comes
"""

_CHECK_SECONDS = 10.0
"""Seconds between two checks of the queue and of etcd."""


class Etcd(ServingCommand):
    """Starts an etcd with TLS, a user and a password, and writes its address and credentials to a file."""

    name = "etcd"
    summary = "run a private etcd on this node, for one job or until a signal comes"
    examples = _EXAMPLES
    submit_help = "arguments of sbatch for a job that finds this etcd by its environment; etcd ends with that job"
    submit_example = "--nodes=2-8 elastic.sbatch train.py"

    def add_options(self, parser: Parser) -> None:
        """Add the options of the etcd server."""
        parser.add_argument("--dir", type=Path, help="shared directory for its files (default: elastic-etcd/<job id>)")
        parser.add_argument("--data-dir", type=Path, help="directory of etcd's data (default: in --dir)")
        parser.add_argument("--host", help="address by which other nodes reach this node (default: as for an agent)")
        parser.add_argument("--interface", help="network interface by which other nodes reach this node, such as ib0")
        parser.add_argument("--etcd", metavar="PATH", help="the etcd program (default: the one in PATH)")

    def serve(self, options: argparse.Namespace, notices: Notices, node: str) -> int:
        """Serve until a signal comes or the job has left the queue."""
        from slurm_elastic.rendezvous.records.etcd.secured_server import CREDENTIALS_VARIABLE, PrivateServer
        from slurm_elastic.submission.sbatch import submit

        try:
            server = PrivateServer(_directory(options.dir), _host(options, node), options.data_dir, options.etcd)
        except OSError as error:
            raise UsageError(f"{error.filename}: {error.strerror}; give another directory by --dir") from None
        try:
            server.start()
            print(f"etcd runs; {CREDENTIALS_VARIABLE}={server.credentials}", flush=True)
            job_id = None
            if options.submit:
                os.environ[CREDENTIALS_VARIABLE] = str(server.credentials)
                job_id = submit(options.submit)
                print(f"submitted job {job_id}; etcd ends with it", flush=True)
            return _wait(notices, lambda: server.server.pid is not None, job_id)
        finally:
            server.stop()


def _directory(given: Path | None) -> Path:
    if given is not None:
        return given.absolute()
    submitted = Path(os.environ.get("SLURM_SUBMIT_DIR") or Path.cwd())
    return submitted / "elastic-etcd" / os.environ.get("SLURM_JOB_ID", "local")


def _host(options: argparse.Namespace, node: str) -> str:
    if "SLURM_JOB_ID" not in os.environ and not (options.host or options.interface):
        return "127.0.0.1"
    from slurm_elastic.slurm import AddressPreference, Controller, choose_address, gather_facts
    from slurm_elastic.slurm.address import resolve

    preference = AddressPreference(local_addr=options.host, interface=options.interface)
    # etcd listens at addresses, not at names (etcd 3.4, embed/config.go, checkBindURLs).
    name = choose_address(preference, gather_facts(preference, node, controller=Controller()))
    address = resolve(name)
    if address is None:
        raise UsageError(f"--host {name} does not resolve on {node}; give an address of this node")
    return address


def _wait(notices: Notices, is_running: Callable[[], bool], job_id: str | None) -> int:
    from slurm_elastic.agent.queue_watch import QueueWatch
    from slurm_elastic.slurm import Controller

    with QueueWatch(job_id, Controller(), _CHECK_SECONDS) as watch, selectors.DefaultSelector() as selector:
        for fd in (notices.fd, watch.fd):
            selector.register(fd, selectors.EVENT_READ)
        while notices.first() is None:
            if not is_running():
                print("slurm-elastic: error: etcd has exited; its log is in its directory", file=sys.stderr)
                return ExitCode.FAILED
            if watch.is_over():
                print(f"job {job_id} is over", flush=True)
                break
            selector.select(_CHECK_SECONDS)
            notices.drain()
    return ExitCode.FINISHED
