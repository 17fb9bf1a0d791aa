"""Names a value on which ranks differ: a snapshot whose plain values are not the same on all nodes is none.

`save` calls this on the workers that copy for their nodes, which compare their values with those of rank 0 through the
store of the round. They do so at the calls number 1, 2, 4, 8, ... of a round, and wait for nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from slurm_elastic import typed_json
from slurm_elastic.snapshot.hand_over import round_store

logger = logging.getLogger("slurm_elastic")

_SHOWN = 24
"""Characters of a value that is shown; of a longer one there is a digest."""
_TIMEOUT = timedelta(seconds=5)
"""For a request to the store, which is on a node of the round."""


class RankValues:
    """Compares the values of this rank with those of rank 0, until they differ once.

    A round of one node has nothing to compare. Without a store it connects to that of the round.
    """

    def __init__(self, rank: int, nodes: int, round_: int, store: Any = None) -> None:
        self._rank, self._store, self._over = rank, store, nodes == 1
        self._prefix, self._calls = f"slurm_elastic/values/{round_}", 0
        self._pending: tuple[str, int, Mapping[str, str]] | None = None

    def saved(self, step: int, tree: Mapping[str, Any]) -> None:
        """Take note of the values of a snapshot: those of `flatten`, by name."""
        self._calls += 1
        due = self._calls & (self._calls - 1) == 0
        if self._over or not (due or self._pending):
            return
        try:
            self._compare(step, tree, due=due)
        except (RuntimeError, LookupError, ValueError, OSError) as error:
            # torch's errors of a store are RuntimeErrors. What is no store of a round tells nothing.
            self._over = True
            logger.debug("the values of ranks are not compared: %s", error)

    def _compare(self, step: int, tree: Mapping[str, Any], *, due: bool) -> None:
        store = self._store = self._store or round_store(_TIMEOUT)
        if due:
            key, own = f"{self._prefix}/{self._calls}", digests(tree)
            if self._rank == 0:
                store.set(key, json.dumps(own))
            else:
                self._pending = key, step, own
        if self._pending is None or not store.check([self._pending[0]]):
            return
        key, step, values = self._pending
        self._pending = None
        paths = difference(typed_json.loads(store.get(key)), values)
        if paths:
            self._over = True
            if store.add(f"{self._prefix}/told", 1) == 1:
                name, first, second = paths
                logger.warning(
                    "snapshots: `%s`: ranks 0 and %d differ at step %d (%s and %s), so no round can start from this"
                    " snapshot; give all ranks the same value (torch.distributed.broadcast_object_list), or pass what"
                    " each rank has of its own as per_rank={...}",
                    *(name, self._rank, step, first, second),
                )


def digests(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return each plain value of a state, two names deep, as text: short ones as they are. Tensors are left out."""
    texts: dict[str, str] = {}
    for name, value in tree.items():
        inner = value.get("d") if isinstance(value, dict) else None
        values = {name: value} if inner is None else {f"{name}.{key}": below for key, below in inner}
        for path, below in values.items():
            # Not the index of a tensor.
            if not (isinstance(below, dict) and below.keys() <= {"x", "s"}):
                texts[path] = _text(below)
    return texts


def difference(first: Mapping[str, str], second: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Return the first value on which two ranks differ: its name, and what each has; None if there is none."""
    missing = "nothing"
    for name in dict.fromkeys([*first, *second]):
        own, other = first.get(name, missing), second.get(name, missing)
        if own != other:
            return name, own, other
    return None


def _text(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
