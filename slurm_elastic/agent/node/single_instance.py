"""Refuses a second agent for the same node and Slurm step."""

from __future__ import annotations

import contextlib
import errno
import hmac
import socket
from collections.abc import Iterator

from slurm_elastic.errors import UsageError
from slurm_elastic.slurm import SlurmJob


@contextlib.contextmanager
def claim(secret: bytes, node: str, job: SlurmJob | None) -> Iterator[None]:
    """Claim this node for this agent, during a with block.

    The claim is an abstract socket address, unix(7): the kernel frees it however the agent ends, and it needs neither
    locks of a network file system nor a file that could be left behind. The address is in the network namespace, which
    nodes may share, so it contains the node's name. Other users cannot guess it without the secret.

    Outside Slurm a second agent cannot be distinguished from another run, so there is no claim.

    Args:
        secret: The secret of the run.
        node: Slurm's name of this node.
        job: The Slurm job this agent runs in; None outside Slurm.

    Raises:
        UsageError: Another agent has claimed the node.
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
