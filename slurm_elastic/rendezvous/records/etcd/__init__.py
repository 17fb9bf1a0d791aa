"""etcd v3: a store outside of the run, which outlives every node.

EtcdStore and the backend for torch's own handler are in ``store`` and ``backend``, which import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_elastic._lazy import lazy

if TYPE_CHECKING:
    from slurm_elastic.rendezvous.records.etcd.client import EtcdClient
    from slurm_elastic.rendezvous.records.etcd.config import EtcdConfig, load_config
    from slurm_elastic.rendezvous.records.etcd.errors import (
        EtcdError,
        EtcdInterruptedError,
        EtcdLeaseLostError,
        EtcdUnavailableError,
    )
    from slurm_elastic.rendezvous.records.etcd.failover_channel import Limits
    from slurm_elastic.rendezvous.records.etcd.leases import Lease
    from slurm_elastic.rendezvous.records.etcd.server import EtcdServer
    from slurm_elastic.rendezvous.records.etcd.transactions import (
        Compare,
        Delete,
        Get,
        KeyValue,
        Put,
        TransactionResult,
    )
    from slurm_elastic.rendezvous.records.etcd.watch import Watch
    from slurm_elastic.rendezvous.records.etcd.watch_stream import Event, EventKind
else:
    # Every agent reads options of etcd here, and most runs do without it.
    __getattr__ = lazy(
        __name__,
        {
            "Compare": "transactions",
            "Delete": "transactions",
            "EtcdClient": "client",
            "EtcdConfig": "config",
            "EtcdError": "errors",
            "EtcdInterruptedError": "errors",
            "EtcdLeaseLostError": "errors",
            "EtcdServer": "server",
            "EtcdUnavailableError": "errors",
            "Event": "watch_stream",
            "EventKind": "watch_stream",
            "Get": "transactions",
            "KeyValue": "transactions",
            "Lease": "leases",
            "Limits": "failover_channel",
            "Put": "transactions",
            "TransactionResult": "transactions",
            "Watch": "watch",
            "load_config": "config",
        },
    )

__all__ = [
    "Compare",
    "Delete",
    "EtcdClient",
    "EtcdConfig",
    "EtcdError",
    "EtcdInterruptedError",
    "EtcdLeaseLostError",
    "EtcdServer",
    "EtcdUnavailableError",
    "Event",
    "EventKind",
    "Get",
    "KeyValue",
    "Lease",
    "Limits",
    "Put",
    "TransactionResult",
    "Watch",
    "load_config",
]
