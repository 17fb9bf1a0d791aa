"""The entry point by which torchrun finds the backend.

torch loads the entry points of torchrun.handlers while it imports torch.distributed.elastic.rendezvous (torch 2.13,
distributed/elastic/rendezvous/__init__.py). A module that imports that package itself, and is imported first, would
be loaded half-finished here; so this one imports nothing of torch, nor of etcd, before a handler is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters


def handler_factory() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return what makes a handler (torch 2.13, distributed/elastic/rendezvous/registry.py)."""
    return _create_handler


def _create_handler(params: RendezvousParameters) -> RendezvousHandler:
    from slurm_elastic.rendezvous.records.etcd.store import create_handler

    return create_handler(params)
