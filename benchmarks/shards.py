"""What a part of a snapshot costs on its way from one agent to another, from which a worker starts after a loss.

    python -m benchmarks.shards [--json FILE]

A part of 256 MiB goes from one process to another over the loopback interface, as shards do that a node needs and does
not hold, and what the transfer consists of is measured alone: the memory of the receiver, and the digest that both
sides compute. No Slurm, and no training beside it.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from blake3 import blake3

from benchmarks.options import make_parser
from benchmarks.tables import Results, Table, median
from slurm_elastic.snapshot.agent_side import AgentMemory
from slurm_elastic.snapshot.lineage import Copy, Holder, SnapshotId, read_inventories
from slurm_elastic.snapshot.memory import HEADER, Contents, Slot
from slurm_elastic.snapshot.transfer import Request, Settings, receive

_MIB = 256
_SIZE = _MIB << 20
_TIMES = 7
_PART = Copy.of_part(SnapshotId(0, 1), 0, 2)
_SETTINGS = Settings(bytes(32), "benchmark", "sender", "sender", "127.0.0.1")


def main() -> int:
    """Measure and show."""
    options = make_parser("shards").parse_args()
    results = Results.of("shards")
    here, there = multiprocessing.Pipe()
    sender = multiprocessing.get_context("fork").Process(target=_send, args=(there,))
    sender.start()
    holder: Holder = here.recv()
    taken: list[tuple[float, float, float]] = []
    for _ in range(_TIMES):
        used = _asked(here)
        begin, own = time.perf_counter(), time.process_time()
        slot = Slot.make()
        receive(Request(_PART, ((0, _SIZE),)), slot, [holder], _SETTINGS, lambda: False)
        seconds = time.perf_counter() - begin
        taken.append((seconds, _asked(here) - used, time.process_time() - own))
        slot.close()
    here.send(False)
    sender.join()
    moved, sends, receives = zip(*taken, strict=True)
    memory = bytes(_SIZE)
    rows = {
        "the transfer": moved,
        "CPU time of the sender": sends,
        "CPU time of the receiver": receives,
        "of it: memory of the receiver": [_timed(lambda: _write(memory)) for _ in range(_TIMES)],
        "of each: digest": [_timed(lambda: blake3(memory)) for _ in range(_TIMES)],
    }
    table = Table(
        f"Shards of {_MIB} MiB from one agent to another on the same machine (s)",
        ["", "median", "slowest"],
        note=f"{_TIMES} times. Sender and receiver each compute the digest, in the thread that sends or receives.",
    )
    for name, times in rows.items():
        table.rows.append([name, f"{median(times) or 0:.3f}", f"{max(times):.3f}"])
    results.add(table)
    return results.finish(options.json)


def _send(connection: Connection) -> None:
    with tempfile.TemporaryDirectory() as directory:
        agent = AgentMemory(Path(directory), _SETTINGS)
        agent._parts[0] = [slot := Slot.make()]
        slot.grow(HEADER + _SIZE + 1)
        slot.fill(Contents(_PART, _SIZE, 1, _SIZE), lambda: None)
        connection.send(read_inventories([agent.inventory()])[0].holder)
        while connection.recv():
            connection.send(time.process_time())
        agent.close()


def _asked(connection: Connection) -> float:
    """Return the CPU time of the sender so far."""
    connection.send(True)
    found: float = connection.recv()
    return found


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _write(content: bytes) -> None:
    slot = Slot.make()
    for start in range(0, _SIZE, 1 << 20):
        slot.put(HEADER + start, memoryview(content)[start : start + (1 << 20)])
    slot.close()


if __name__ == "__main__":
    raise SystemExit(main())
