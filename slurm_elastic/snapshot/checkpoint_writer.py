"""Writes snapshots to disk as checkpoints, in a process of its own: no heartbeat waits for it.

While workers train it writes with the lowest priority, but not the last checkpoint before its agent has to go.

The process gets an order with the descriptor of a slot, reads the slot where it is, and answers. It ends when the
process that started it has ended. If that happens while it writes, it finishes this checkpoint first.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurm_elastic.snapshot.checkpoint_lineage import CheckpointId
from slurm_elastic.snapshot.checkpoints import Checkpoints, SupersededError, describe_files
from slurm_elastic.snapshot.memory import Slot
from slurm_elastic.snapshot.slots import HEADER, Contents
from slurm_elastic.snapshot.state import read_description, rebuild
from slurm_elastic.text import printable

__all__ = ["Order", "Outcome", "WriterProcess"]

_LIMIT = 1 << 16
_LOWEST = 19
"""Of a thread for the CPU, setpriority(2); the priority of its reads and writes follows from it (ioprio_set(2))."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Slurm sends these to all processes of a job step, those that write included."""
_PACKAGE_ROOT = Path(__file__).parents[2]
_PROGRAM = (
    f"import sys; sys.path[:] = [{str(_PACKAGE_ROOT)!r}, *filter(None, sys.path)]; "
    "from slurm_elastic.snapshot.checkpoint_writer import main; main(int(sys.argv[1]))"
)
"""Without the working directory in the path: a script there may have the name of a module that torch imports."""
_EXTRA = "slurm_elastic.tensors"
"""Name in the checkpoint for tensors that have none, such as those in tuples."""


@dataclass(frozen=True, slots=True)
class Order:
    """A snapshot to write.

    Attributes:
        directory: Of the checkpoints.
        start: Number of the start that took the snapshot.
        step: Of the snapshot.
        keep: Number of checkpoints that stay.
        urgent: True if the agent ends when this is written.
    """

    directory: str
    start: int
    step: int
    keep: int
    urgent: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of an order.

    Attributes:
        written: True if the checkpoint is on disk.
        superseded: Another group has taken over the directory, as one line; empty if not.
        error: Why the checkpoint cannot be written; empty if it was, or if a worker has overwritten the slot meanwhile.
    """

    written: bool = False
    superseded: str = ""
    error: str = ""


class WriterProcess:
    """The process that writes; started by the first order. For one thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Start the process, which imports torch for some seconds.

        Raises:
            OSError: It cannot be started.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-c", _PROGRAM, str(theirs.fileno())]
        # Blocked until the process ignores them. Threads have masks of their own, and children inherit them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
                )
        except OSError:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._socket = ours

    def write(self, order: Order, slot: Slot) -> Outcome:
        """Write the snapshot in a slot; waits until that is done."""
        try:
            if self._socket is None:
                self.start()
            assert self._socket is not None
            socket.send_fds(self._socket, [json.dumps(asdict(order)).encode()], [slot.descriptor])
            answer = self._socket.recv(_LIMIT)
        except OSError as error:
            answer, why = b"", str(error)
        else:
            why = "the process that writes has ended"
        if not answer:
            self.close()
            return Outcome(error=why)
        return Outcome(**json.loads(answer))

    def kill(self) -> None:
        """Kill the process; for other threads, too."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process; one that writes is killed."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def main(descriptor: int) -> None:
    """Carry out orders until the other side ends."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    with socket.socket(fileno=descriptor) as orders:
        import torch

        # All that writing needs is imported before the first order: that may be the last one, with seconds left.
        import torch.distributed.checkpoint

        torch.set_num_threads(1)
        while True:
            content, descriptors, _, _ = socket.recv_fds(orders, _LIMIT, 1)
            if not content:
                return
            slot, order = Slot(descriptors[0]), Order(**json.loads(content))
            outcome = _carry_out(order, slot) if order.urgent else _with_low_priority(order, slot)
            slot.close()
            with contextlib.suppress(BrokenPipeError):
                orders.send(json.dumps(asdict(outcome)).encode())


def _with_low_priority(order: Order, slot: Slot) -> Outcome:
    """Work in a thread of its own: a process without privileges cannot take its own priority back."""
    outcomes: list[Outcome] = []

    def run() -> None:
        # Linux has a priority for each thread, and threads inherit it (sched(7)).
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
        outcomes.append(_carry_out(order, slot))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return outcomes[0]


def _carry_out(order: Order, slot: Slot) -> Outcome:
    contents = slot.contents()
    if contents is None or contents.copy.id.step != order.step:
        return Outcome()
    try:
        written = Checkpoints(Path(order.directory)).publish(
            CheckpointId(order.start, order.step),
            lambda directory: _write(directory, slot, contents),
            lambda: slot.contents() == contents,
            order.keep,
        )
    except SupersededError as error:
        return Outcome(superseded=str(error))
    except BaseException as error:
        # A slot that is overwritten meanwhile may hold anything.
        return Outcome(error=_one_line(error) if slot.contents() == contents else "")
    return Outcome(written=written)


def _one_line(error: BaseException) -> str:
    # The text of torch's CheckpointException is a traceback; it has the error of each rank.
    for cause, _ in getattr(error, "failures", {}).values():
        error = cause
    return f"{type(error).__name__}: {printable(error)}"


def _write(directory: Path, slot: Slot, contents: Contents) -> bytes:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    body = slot.memory()[HEADER : contents.size]
    tree, tensors = read_description(bytes(body[contents.tensors :]), body[: contents.tensors])
    state = rebuild(tree, tensors)
    # torch stores a tuple as a whole: tensors in one have no place of their own there, so they get one more.
    paths = _paths(tree, len(tensors))
    extra = {str(index): tensors[index] for index, path in enumerate(paths) if path is None}
    with warnings.catch_warnings():
        # That this is a single process is what is meant.
        warnings.simplefilter("ignore")
        saved: Any = save(
            {**state, _EXTRA: extra} if extra else state, storage_writer=FileSystemWriter(directory), no_dist=True
        )
    names = {tuple(map(str, path)): name for name, path in saved.planner_data.items()}
    places = {index.fqn: place for index, place in saved.storage_data.items()}
    found = [places[names[path or (_EXTRA, str(index))]] for index, path in enumerate(paths)]
    return describe_files(tree, [(place.relative_path, place.offset, place.length) for place in found])


def _paths(tree: Any, count: int) -> list[tuple[str, ...] | None]:
    """Return the path of each tensor in the state; None for one in a tuple, or under a key that is no plain value."""
    found: list[tuple[str, ...] | None] = [None] * count

    def walk(node: Any, path: tuple[str, ...] | None) -> None:
        if not isinstance(node, dict):
            return
        ((kind, content),) = node.items()
        if kind == "x":
            found[content] = path
        elif kind == "d":
            for key, each in content:
                walk(each, None if path is None or isinstance(key, dict) else (*path, str(key)))
        elif kind in "lt":
            for index, each in enumerate(content):
                walk(each, None if path is None or kind == "t" else (*path, str(index)))

    for name, each in tree.items():
        walk(each, (name,))
    return found
