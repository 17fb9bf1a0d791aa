"""Writes snapshots to disk as checkpoints, in a process of its own: no heartbeat waits for it.

The process gets an order with the descriptors of slots, reads them where they are, and answers. While workers train it
writes with a low priority, but not the last checkpoint before its agent has to go. It ends when the process that
started it has ended; if it writes at that moment, it finishes this checkpoint first.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from slurm_elastic import typed_json
from slurm_elastic.rundir import list_names, publish_file
from slurm_elastic.snapshot.disk.checkpoints import Checkpoints, SupersededError
from slurm_elastic.snapshot.disk.lineage import CheckpointId
from slurm_elastic.snapshot.disk.stored import (
    DESCRIPTION,
    VERSION,
    StoredPart,
    digest,
    part_file,
    part_record,
    pieces_of,
    sealed,
    unsealed,
)
from slurm_elastic.snapshot.hand_over import Directory, receive, send
from slurm_elastic.snapshot.memory import HEADER, Contents, Slot
from slurm_elastic.snapshot.sharding import Layout, Planner, Region
from slurm_elastic.snapshot.state import PER_RANK, places_in, read_slot, rebuild, tensor_in
from slurm_elastic.text import printable

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


_LOW = 10
"""Nice value of the thread that writes, setpriority(2); the priority of its reads and writes follows (ioprio_set(2)).
With 19 it gets 1.5 % of a busy core: four busy processes on two cores kept a checkpoint from the disk for a minute.
"""
_EXTRA = "slurm_elastic.tensors"
"""Name in the checkpoint for tensors that have none, such as those in tuples."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that Slurm or a person sends to the job. The process ignores them: the agent says when it ends."""
_PROGRAM = (
    f"import sys; sys.path[:] = [{str(Path(__file__).parents[3])!r}, *filter(None, sys.path)]; "
    f"from {__name__} import main; main(int(sys.argv[1]))"
)
"""Without the working directory in the path: a script there may have the name of a module that torch imports."""

Task = Literal["state", "part", "complete", "look", "discard"]


@dataclass(frozen=True, slots=True)
class Order:
    """A snapshot to write.

    Attributes:
        task: To write the state of all ranks, or a part; to give the checkpoint its name if it is complete; to look
            whether another agent has; or to delete what was written of it.
        urgent: True if the agent ends when this is written.
    """

    directory: Directory
    checkpoint: CheckpointId
    task: Task
    urgent: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of an order.

    Attributes:
        written: True if that is on disk, or if another agent writes the part.
        size: Bytes on disk of a checkpoint that is not complete.
        superseded: Another group has taken over the directory, as one line; empty if not.
        error: Why the checkpoint cannot be written; empty if it was, or if a worker has overwritten the slot meanwhile.
    """

    written: bool = False
    size: int = 0
    superseded: str = ""
    error: str = ""


class Child(Protocol):
    """A process of an agent."""

    def kill(self) -> None:
        """Kill the process, unless it has ended."""

    def wait(self) -> int:
        """Wait until the process has ended, and return its exit code, or minus a signal's number."""


Fork = Callable[[str, Callable[[], bool]], "tuple[Child, socket.socket] | None"]
"""Forks a process that calls ``main(descriptor)`` of a module, as :func:`start_child` starts one, from a process that
has imported torch. None if that is not possible, or if the second argument, called every 0.1 s, has returned True."""


def start_child() -> tuple[Child, socket.socket]:
    """Start a fresh process that calls :func:`main`; returns it and our end of its socket, or raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", _PROGRAM, str(theirs.fileno())]
    # Slurm sends signals to all processes of a job step. They are blocked until the process ignores them: threads have
    # masks of their own, and children inherit them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        with theirs:
            streams, passed = subprocess.DEVNULL, [theirs.fileno()]
            return subprocess.Popen(command, stdin=streams, stdout=streams, pass_fds=passed), ours
    except OSError:
        ours.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class WriterProcess:
    """The process that writes; started by the first order. For one thread.

    Args:
        fork: Starts it at once if it can; else, and with None, it imports torch for some seconds.
    """

    def __init__(self, fork: Fork | None = None) -> None:
        self._fork = fork
        self._process: Child | None = None
        self._socket: socket.socket | None = None
        self._killed = False

    def start(self) -> None:
        """Start the process; raises OSError."""
        forked = None if self._fork is None else self._fork(__name__, lambda: self._killed)
        self._process, self._socket = forked or start_child()

    def carry_out(self, order: Order, *slots: Slot) -> Outcome:
        """Carry out an order, and wait until that is done.

        The slots have the state of all ranks, and the part; none is needed to complete or discard.
        """
        if self._killed:
            return Outcome(error="the process that writes was killed")
        try:
            if self._socket is None:
                self.start()
            assert self._socket is not None
            send(self._socket, order, slots)
            received, why = receive(self._socket, Outcome), "the process that writes has ended"
        except OSError as error:
            received, why = None, str(error)
        if received is None:
            self.close()
            return Outcome(error=why)
        outcome: Outcome = received[0]
        return outcome

    def kill(self) -> None:
        """Kill the process, which is not started again; for other threads, too."""
        self._killed = True
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
        # A thread of its own: a process without privileges cannot take its own priority back. Linux has a priority for
        # each thread, here the calling one, and threads inherit it (sched(7)).
        with ThreadPoolExecutor(1, initializer=os.setpriority, initargs=(os.PRIO_PROCESS, 0, _LOW)) as thread:
            while (received := receive(orders, Order)) is not None:
                order, slots = received
                outcome = _carry_out(*received) if order.urgent else thread.submit(_carry_out, *received).result()
                for slot in slots:
                    slot.close()
                with contextlib.suppress(BrokenPipeError):
                    send(orders, outcome)


def _carry_out(order: Order, slots: Sequence[Slot]) -> Outcome:
    checkpoints, checkpoint, writer = Checkpoints(Path(order.directory.path)), order.checkpoint, order.directory.start
    before = [slot.contents() for slot in slots]
    matching = [contents for contents in before if contents is not None and contents.copy.id.step == checkpoint.step]
    if len(matching) < len(slots):
        return Outcome()

    def unchanged() -> bool:
        return [slot.contents() for slot in slots] == before

    try:
        match order.task:
            case "state" | "part" if checkpoints.path_of(checkpoint).exists():
                return Outcome(written=True)
            case "state":
                directory = checkpoints.unfinished(checkpoint, writer)
                return Outcome(written=_write_state(directory, slots[0], matching[0], unchanged))
            case "part":
                directory = checkpoints.unfinished(checkpoint, writer)
                return Outcome(written=_write_part(directory, slots, matching, unchanged))
            case "complete":
                if checkpoints.publish(checkpoint, writer, _finish, order.directory.keep, is_last=order.urgent):
                    return Outcome(written=True)
                return Outcome(size=checkpoints.unfinished_size(checkpoint, writer) or 0)
            case "look":
                size = checkpoints.unfinished_size(checkpoint, writer)
                written = checkpoint in checkpoints.present()
                return Outcome(written, size or 0, error="" if written or size is not None else "it was given up")
            case "discard":
                checkpoints.discard(checkpoint, writer)
        return Outcome(written=True)
    except SupersededError as error:
        return Outcome(superseded=str(error))
    except BaseException as error:
        # A slot that is overwritten meanwhile may hold anything.
        return Outcome(error=_one_line(error) if unchanged() else "")


def _one_line(error: BaseException) -> str:
    # The text of torch's CheckpointException is a traceback; it has the error of each rank.
    for cause, _ in getattr(error, "failures", {}).values():
        error = cause
    return f"{type(error).__name__}: {printable(error)}"


_metadata: dict[Path, Metadata] = {}
"""What torch has written about the state of all ranks, of checkpoints that are not complete yet. It is kept here
because nothing that others may have written is unpickled."""


def _save(state: dict[str, Any], directory: Path) -> Metadata:
    """Have torch write a state, and return its description, with the places of tensors."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.checkpoint.storage import WriteResult

    class Writer(FileSystemWriter):
        def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
            super().finish(metadata, results)
            # torch 2.11 writes the places into a copy, and returns what lacks them.
            metadata.storage_data = {result.index: result.storage_data for written in results for result in written}

    saved: Metadata = save(state, storage_writer=Writer(directory), no_dist=True)
    return saved


def _write_state(directory: Path, slot: Slot, contents: Contents, unchanged: Callable[[], bool]) -> bool:
    from torch import empty

    tree, tensors, layout = read_slot(slot, contents)
    # What takes the places of sharded tensors gets their names from torch.
    sharded = [empty(0) for _ in (layout.tensors if layout is not None else ())]
    state = rebuild(tree, tensors, sharded)
    # torch stores a tuple as a whole: tensors in one have no place of their own there, so they get one more.
    paths, sharded_paths = _paths(tree, "x", len(tensors)), _paths(tree, "s", len(sharded))
    extra = {str(index): tensors[index] for index, path in enumerate(paths) if path is None}
    extra |= {f"s{index}": sharded[index] for index, path in enumerate(sharded_paths) if path is None}
    with warnings.catch_warnings():
        # That this is a single process is what is meant.
        warnings.simplefilter("ignore")
        saved = _save({**state, _EXTRA: extra} if extra else state, directory)
    if not unchanged():
        return False
    names = {tuple(map(str, path)): name for name, path in saved.planner_data.items()}
    places = {index.fqn: place for index, place in saved.storage_data.items()}
    entries = [places[names[path or (_EXTRA, str(index))]] for index, path in enumerate(paths)]
    # An agent that ends may have two that wait for parts.
    while len(_metadata) > 1:
        _metadata.pop(next(iter(_metadata)))
    _metadata[directory] = saved
    written = [(place.relative_path, place.offset, place.length) for place in entries]
    files: dict[str, list[tuple[int, int]]] = {}
    for place in saved.storage_data.values():
        files.setdefault(place.relative_path, []).append((place.offset, place.length))
    digests = {name: [*pieces_of(directory / name, places)] for name, places in files.items()}
    # State and layout are as in the description of a snapshot. Tensors have file, offset and length; pieces, by file,
    # have offset, length and digest.
    described = {"version": VERSION, "state": tree, "tensors": written, "layout": msgspec.to_builtins(layout)}
    publish_file(directory / DESCRIPTION, sealed({**described, "pieces": digests}))
    return True


def _write_part(
    directory: Path, slots: Sequence[Slot], slot_contents: Sequence[Contents], unchanged: Callable[[], bool]
) -> bool:
    import torch

    _, _, layout = read_slot(slots[0], slot_contents[0])
    number, of = slot_contents[1].copy.part, slot_contents[1].copy.parts
    planner = None if layout is None else Planner(layout)
    if number is None or layout is None or planner is None or planner.parts != of:
        raise ValueError("the part does not fit the layout")
    memory = slots[1].memory()[HEADER : HEADER + slot_contents[1].shards]
    path = directory / part_file(number)
    try:
        file = path.open("xb")
    except FileExistsError:
        # Another agent writes it.
        return True

    def put(value: Any) -> tuple[int, int]:
        begin = file.tell()
        torch.save(value, file)
        return begin, file.tell() - begin

    try:
        with file:
            shards: list[tuple[int, int] | None] = []
            places, _ = planner.shards(planner.part_numbers.index(number))
            for tensor, place in zip(layout.tensors, places, strict=True):
                if place is None or not place[1].count:
                    shards.append(None)
                else:
                    shards.append(put(tensor_in(memory, tensor.dtype, place[1].size, place[0])))
            own = None
            if layout.own:
                own_tree, own_tensors, _ = read_slot(slots[1], slot_contents[1])
                own = put(rebuild(own_tree, own_tensors)[PER_RANK])
            file.flush()
            os.fsync(file.fileno())
        if not unchanged():
            raise ValueError("overwritten meanwhile")
        written = sorted({place for place in (*shards, own) if place is not None})
        record = StoredPart(tuple(shards), own, tuple(pieces_of(path, written)))
        publish_file(directory / part_record(number), msgspec.json.encode(record))
    except BaseException:
        # Another attempt may write it.
        path.unlink(missing_ok=True)
        raise
    return True


def _finish(directory: Path) -> bool:
    """Add the parts to what torch has written; False if one is missing."""
    names = set(list_names(directory))
    if DESCRIPTION not in names:
        return False
    description = unsealed((directory / DESCRIPTION).read_bytes())
    layout = typed_json.convert(description["layout"], Layout | None)
    if layout is None:
        _seal(directory, description, [])
        return True
    planner = Planner(layout)
    if any(part_record(number) not in names for number in range(planner.parts)):
        return False
    metadata = _metadata[directory]
    records = [(directory / part_record(number)).read_bytes() for number in range(planner.parts)]
    parts = [typed_json.decode(record, StoredPart) for record in records]
    paths = _paths(description["state"], "s", len(layout.tensors))
    _add_parts(metadata, planner, parts, [path or (_EXTRA, f"s{index}") for index, path in enumerate(paths)])
    publish_file(directory / ".metadata", pickle.dumps(metadata))
    _seal(directory, description, [part_record(number) for number in range(planner.parts)])
    return True


def _seal(directory: Path, description: dict[str, Any], records: Sequence[str]) -> None:
    """Put the digests of the parts' records and of torch's metadata into the record of a checkpoint, and its own."""
    description.pop("digest", None)
    description["records"] = {name: digest((directory / name).read_bytes()) for name in (*records, ".metadata")}
    publish_file(directory / DESCRIPTION, sealed(description))


def _add_parts(
    metadata: Metadata, planner: Planner, parts: Sequence[StoredPart], paths: Sequence[tuple[str, ...]]
) -> None:
    """Add sharded tensors, and the own state of ranks as a dict, as torch.distributed.checkpoint describes them.

    Parts are in the order of their numbers, paths those of the sharded tensors in the state.
    """
    import torch
    from torch.distributed.checkpoint import metadata as described

    # Part of the files' format: it is what torch's own reader finds in the metadata (torch 2.11 to 2.15).
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    names = {tuple(map(str, path)): name for name, path in metadata.planner_data.items()}
    for index, (tensor, path) in enumerate(zip(planner.layout.tensors, paths, strict=True)):
        name, chunks = names[path], []
        metadata.storage_data.pop(described.MetadataIndex(name, (0,)), None)
        whole = Region((0,) * len(tensor.shape), tensor.shape)
        for piece in planner.pieces(index, whole):
            place = parts[piece.part].shards[index]
            assert place is not None
            start, size = torch.Size(piece.shard.start), torch.Size(piece.shard.size)
            chunks.append(described.ChunkStorageMetadata(start, size))
            metadata.storage_data[described.MetadataIndex(name, start)] = _StorageInfo(part_file(piece.part), *place)
        properties = described.TensorProperties(getattr(torch, tensor.dtype))
        metadata.state_dict_metadata[name] = described.TensorStorageMetadata(
            properties, torch.Size(tensor.shape), chunks
        )
    for rank, part in enumerate(parts):
        if part.own is not None:
            name = f"{PER_RANK}.{rank}"
            metadata.state_dict_metadata[name] = described.BytesStorageMetadata()
            metadata.planner_data[name] = PER_RANK, str(rank)
            metadata.storage_data[described.MetadataIndex(name)] = _StorageInfo(part_file(rank), *part.own)


def _paths(tree: Any, content_kind: str, count: int) -> list[tuple[str, ...] | None]:
    """Return the path of each of the `count` tensors of a kind in the state.

    It is None for one in a tuple, or under a key that is no plain value.
    """
    paths: list[tuple[str, ...] | None] = [None] * count
    for kind, index, path, has_name in places_in(tree):
        if kind == content_kind and has_name:
            paths[index] = tuple(map(str, path))
    return paths
