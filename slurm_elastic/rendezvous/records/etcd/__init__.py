"""etcd v3: a store outside of the run, which outlives every node.

EtcdStore and the backend for torch's own handler are in ``store``, which imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_elastic._lazy import lazy

if TYPE_CHECKING:
    from slurm_elastic.rendezvous.records.etcd.client import EtcdClient
    from slurm_elastic.rendezvous.records.etcd.config import EtcdConfig, load_config
    from slurm_elastic.rendezvous.records.etcd.server import EtcdServer
else:
    # Every agent reads options of etcd here, and most runs do without it.
    __getattr__ = lazy(
        __name__, {"EtcdClient": "client", "EtcdConfig": "config", "EtcdServer": "server", "load_config": "config"}
    )

__all__ = ["EtcdClient", "EtcdConfig", "EtcdServer", "load_config"]
