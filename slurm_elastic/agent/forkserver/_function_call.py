"""A function as entry point: how its call reaches the worker, and its result the agent.

Both lie in memory files that only the agent, the fork server and this one worker can open. The function has to be
importable, as with multiprocessing's spawn, which is torch elastic's default for functions.
"""

from __future__ import annotations

import multiprocessing.spawn
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from slurm_elastic.agent.forkserver._memfd import read_memory_file

__all__ = ["main", "packed_call", "unpacked_result"]


def packed_call(name: str, function: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    """Everything that a worker needs to make the call.

    Raises:
        pickle.PicklingError, AttributeError, TypeError: it cannot be pickled.
    """
    preparation = multiprocessing.spawn.get_preparation_data(name)
    # Cannot be pickled outside of multiprocessing; the worker has its own.
    preparation.pop("authkey", None)
    return pickle.dumps((preparation, pickle.dumps((function, tuple(arguments)))))


def unpacked_result(data: bytes) -> Any:
    """Return what the function returned; None if it ended the process itself."""
    return pickle.loads(data) if data else None


def main() -> None:
    """In the worker: make the call."""
    from torch.distributed.elastic.multiprocessing.errors import record

    call, result = (int(text) for text in os.environ.pop("SLURM_ELASTIC_CALL").split(":"))
    os.set_inheritable(result, False)
    preparation, packed = pickle.loads(read_memory_file(call))
    # Makes the agent's __main__ importable, as for a child of multiprocessing, so that its functions can be found.
    multiprocessing.spawn.prepare(preparation)
    function, arguments = pickle.loads(packed)
    returned = record(function)(*arguments)
    with os.fdopen(result, "wb") as file:
        file.write(pickle.dumps(returned))
