"""The names that torch documents for its elastic agent and rendezvous, over this project's rendezvous, etcd and health.

For programs that make an agent of their own; `slurm-elastic agent` and `launch` need none of it. The table in
docs/reference.md says where each differs from torch's. What is not here is torch's own and works with these:
WorkerSpec, RunResult, SimpleElasticAgent, DynamicRendezvousHandler, RendezvousParameters.
"""

from __future__ import annotations

from slurm_elastic.agent.health.server import create_healthcheck_server
from slurm_elastic.rendezvous.records.etcd.client import EtcdClient
from slurm_elastic.rendezvous.records.etcd.server import EtcdServer
from slurm_elastic.rendezvous.records.etcd.store import EtcdStore, create_backend
from slurm_elastic.rendezvous.records.etcd.store import EtcdV3RendezvousBackend as EtcdRendezvousBackend
from slurm_elastic.rendezvous.torch_handler import SlurmRendezvousHandler, create_handler
from slurm_elastic.torchelastic._local_agent import LocalElasticAgent

__all__ = [
    "EtcdClient",
    "EtcdRendezvousBackend",
    "EtcdServer",
    "EtcdStore",
    "LocalElasticAgent",
    "SlurmRendezvousHandler",
    "create_backend",
    "create_handler",
    "create_healthcheck_server",
]
