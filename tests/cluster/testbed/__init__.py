"""A real Slurm cluster on one Debian machine, for tests and for trying things by hand.

Every node is a set of namespaces (network, host name, processes, mounts, System V IPC) with its own
munged and slurmd; the controller and the accounting database are machines of the same kind. Nothing of
the cluster is visible in the host's own network, so any number of clusters can be up side by side.

`python3 -m tests.cluster.testbed --help` is the tool, `Cluster` the same for tests. Needs root and what
`.ci/setup` installs; uses Python's standard library alone.
"""

from .cluster import Cluster
from .errors import TestbedError
from .processes import Process
from .settings import Settings

__all__ = ["Cluster", "Process", "Settings", "TestbedError"]
