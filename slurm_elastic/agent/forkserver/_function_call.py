"""Passes the call of a function to its worker, and the result back to the agent.

Both are in memory files that only the agent, the fork server and this one worker can open. The function has to be
importable, as with multiprocessing's spawn, which is torch elastic's default for functions.
"""

from __future__ import annotations

import multiprocessing.spawn
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from slurm_elastic.agent.forkserver._memfd import read_memory_file


def packed_call(name: str, function: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    """Return the content of the call file: the state of `__main__`, the function and its arguments, pickled.

    Raises:
        pickle.PicklingError, AttributeError, TypeError: The function or an argument cannot be pickled.
    """
    preparation = multiprocessing.spawn.get_preparation_data(name)
    # The key cannot be pickled outside of multiprocessing; the worker draws its own.
    preparation.pop("authkey", None)
    return pickle.dumps((preparation, pickle.dumps((function, tuple(arguments)))))


def unpacked_result(data: bytes) -> Any:
    """Return the value that the function has returned; None if the function has ended the process."""
    return pickle.loads(data) if data else None


def main() -> None:
    """In the worker: call the function, and write its result."""
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
