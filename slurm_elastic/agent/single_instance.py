"""One agent per node and job: a second one for the same step is refused."""

from __future__ import annotations

import contextlib
import errno
import hmac
import socket
from collections.abc import Iterator

from slurm_elastic.errors import UsageError
from slurm_elastic.slurm import SlurmJob

__all__ = ["claim"]


@contextlib.contextmanager
def claim(secret: bytes, node: str, job: SlurmJob | None) -> Iterator[None]:
    """Hold this node for this agent.

    The claim is an abstract socket address, unix(7): the kernel frees it however the agent ends, and it needs neither
    locks of a network file system nor a file that could be left behind. It lies in the network namespace, so the name
    tells nodes apart that share one. The secret makes it unknown to other users.

    Outside Slurm there is nothing to tell a second agent from another run, and nothing is claimed.

    Raises:
        UsageError: another agent has it.
    """
    if job is None:
        yield
        return
    words = "\0".join((node, job.job_id, str(job.restart_count), job.step_id or "batch"))
    address = f"\0slurm_elastic.{hmac.digest(secret, words.encode(), 'sha256').hex()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as claimed:
        try:
            claimed.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise UsageError(
                f"an agent of job {job.job_id} is running on {node} already; start one per node: "
                "srun --ntasks-per-node=1"
            ) from None
        yield
