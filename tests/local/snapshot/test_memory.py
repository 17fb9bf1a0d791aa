"""Agents' memory over rounds, on one machine: workers save and start from it, other agents fetch it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_elastic import snapshot
from slurm_elastic.rendezvous.transport.session import Role, Session
from slurm_elastic.snapshot import _worker_side, agent_side, transfer
from slurm_elastic.snapshot import memory as memory_module
from slurm_elastic.snapshot.agent_side import AgentMemory
from slurm_elastic.snapshot.hand_over import VARIABLE, Request, ask
from slurm_elastic.snapshot.lineage import ALONE, Copy, Group, SnapshotId, choose, read_inventories, read_origin
from slurm_elastic.snapshot.memory import HEADER, Contents, OutOfMemoryError, Reserve, Slot, free_memory, require_memory
from tests.local.snapshot.memories import Agents, in_worker, loads, raised_by, saves
from tests.local.waiting import eventually


def test_a_round_starts_from_the_newest_snapshot_on_every_node(agents: Agents) -> None:
    one, two = agents.add("one"), agents.add("two")
    first = agents.next_round([one, two])
    assert in_worker(first[0], loads) is None
    assert all(in_worker(variables, saves(1, 2, 3, 4, 5)) for variables in first)
    # A node that has nothing fetches it.
    three = agents.add("three")
    for variables in agents.next_round([one, two, three]):
        assert in_worker(variables, loads) == (5.0, 5)
    # And serves it, when the others are gone.
    for variables in agents.next_round([three, agents.add("four")]):
        assert in_worker(variables, loads) == (5.0, 5)


def test_a_worker_that_is_killed_while_it_saves_leaves_the_snapshot_before(agents: Agents) -> None:
    one = agents.add("one")
    (variables,) = agents.next_round([one])

    def work() -> None:
        saves(1, 2, 3)()

        def killed(*arguments: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        torch._foreach_copy_ = killed  # type: ignore[assignment]
        saves(4)()

    in_worker(variables, work)
    assert agents.alone(one, loads) == (3.0, 3)


def test_state_may_grow_and_change_its_shape(agents: Agents) -> None:
    one = agents.add("one")
    assert agents.alone(one, lambda: saves(1, size=10)() and saves(2, size=100_000)() and saves(3, size=50_000)())
    for _ in range(2):
        assert agents.alone(one, loads) == (3.0, 3)


class Shows(torch.nn.Linear):
    """A module that notes whether what it loads is in its own parameters already."""

    def load_state_dict(self, state_dict: Mapping[str, Any], *arguments: Any, **options: Any) -> Any:
        self.has_it = [state_dict[name].data_ptr() == each.data_ptr() for name, each in self.named_parameters()]
        return super().load_state_dict(state_dict, *arguments, **options)


def test_a_module_is_loaded_without_a_second_copy_and_nothing_else_is_overwritten(agents: Agents) -> None:
    def save() -> bool:
        model = Shows(3, 3)
        torch.nn.init.constant_(model.weight, 7)
        snapshot.save(1, model=model, half=model, mean=torch.full((3,), 7.0))
        return True

    def load() -> tuple[list[bool], list[bool], list[list[float]]]:
        model, half, given = Shows(3, 3), Shows(3, 3).half(), torch.zeros(3)
        mean = snapshot.load(model=model, half=half, mean=given)
        shown = (model.weight, half.weight, mean, given)
        return model.has_it, half.has_it, [sorted({*each.flatten().tolist()}) for each in shown]

    one = agents.add("one")
    assert agents.alone(one, save)
    found = agents.alone(one, load)
    assert found == ([True, True], [False, False], [[7.0], [7.0], [7.0], [0.0]])


def test_what_a_cut_off_group_has_saved_is_dropped(agents: Agents) -> None:
    one, two = agents.add("one"), agents.add("two")
    first = agents.next_round([one, two])
    assert in_worker(first[0], saves(1, 2))
    assert in_worker(first[1], saves(1, 2, 3))
    # Round 1 is formed without the second node, which goes on.
    (variables,) = agents.next_round([one])
    assert in_worker(variables, loads) == (2.0, 2)
    assert in_worker(first[1], saves(4, 5, 6))
    for variables in agents.next_round([one, two]):
        assert in_worker(variables, loads) == (2.0, 2)
    assert len(read_inventories([two.inventory()])[0].copies) == 1


def test_state_that_ranks_do_not_share_is_not_restored(agents: Agents, caplog: pytest.LogCaptureFixture) -> None:
    one, two = agents.add("one"), agents.add("two")
    first = agents.next_round([one, two])
    for number, variables in enumerate(first):
        assert in_worker(variables, lambda number=number: snapshot.save(1, seed=number) or True)
    for variables in agents.next_round([one, two]):
        assert in_worker(variables, lambda: snapshot.load(seed="own")) == "own"
    assert "step 1 of round 0 is not the same on one and two; it starts from no snapshot" in caplog.text


def test_steps_are_counted_over_all_epochs(agents: Agents) -> None:
    one = agents.add("one")
    found = agents.alone(one, raised_by(saves(7, 8, 1)))
    assert found == "snapshot of step 1 after that of step 8: count steps over all epochs"
    (variables,) = agents.next_round([one])
    assert in_worker(variables, loads) == (8.0, 8)

    def twice() -> bool:
        snapshot.save(9, weights=torch.full((10,), 9.0), progress={"step": 9})
        snapshot.save(9, weights=torch.full((10,), 0.0), progress={"step": 0})
        return True

    assert in_worker(variables, twice)
    assert agents.alone(one, loads) == (9.0, 9)


def test_a_snapshot_is_loaded_before_it_is_overwritten_or_not_at_all(agents: Agents) -> None:
    one = agents.add("one")
    assert agents.alone(one, saves(1))
    (variables,) = agents.next_round([one])

    def late() -> None:
        saves(2, 3, 4)()
        loads()

    assert in_worker(variables, raised_by(late)).startswith("snapshot.load comes too late: call it on all ranks")


def test_other_ranks_of_a_node_read_and_do_not_write(agents: Agents) -> None:
    one = agents.add("one")
    (variables,) = agents.next_round([one])
    assert in_worker(variables, saves(1))
    assert in_worker({**variables, "LOCAL_RANK": "1"}, saves(1, 2, 3))
    (variables,) = agents.next_round([one])
    assert in_worker({**variables, "LOCAL_RANK": "1"}, loads) == (1.0, 1)


def test_a_state_with_nan_is_refused_if_that_is_asked_for(agents: Agents) -> None:
    one = agents.add("one")

    def work() -> bool:
        for step, value in ((1, 1.0), (2, float("nan")), (3, float("inf"))):
            weights = torch.tensor([1.0, value])
            snapshot.save(step, check_finite=True, weights=weights, count=torch.tensor(step), progress={"step": step})
        return True

    assert agents.alone(one, work)
    assert agents.alone(one, lambda: snapshot.load(progress=None)) == {"step": 1}


def test_processes_of_a_data_loader_inherit_neither_memory_nor_descriptor(agents: Agents) -> None:
    one = agents.add("one")

    def work() -> tuple[int, int, int]:
        saves(1)()

        def count() -> int:
            return Path("/proc/self/maps").read_text().count("slurm-elastic-snapshot") + sum(
                "slurm-elastic-snapshot" in str(path.readlink())
                for path in Path("/proc/self/fd").iterdir()
                if path.exists()
            )

        before = count()
        reading, writing = os.pipe()
        if not (child := os.fork()):
            os.write(writing, b"%d" % count())
            os._exit(0)
        os.waitpid(child, 0)
        return before, int(os.read(reading, 10)), count()

    before, child, after = agents.alone(one, work)
    assert before == after
    # Of three slots: the descriptor, the mapping, and the descriptor that CPython's mmap keeps. What is left is of the
    # agent, which is in the process of the test, from which the worker was forked.
    assert before - child == 9


def test_a_worker_of_a_round_that_is_over_gets_no_memory(agents: Agents) -> None:
    one = agents.add("one")
    (old,) = agents.next_round([one])
    agents.next_round([one])

    assert "cannot be had: round 0 is over" in in_worker(old, raised_by(lambda: snapshot.save(1, x=1)))


def test_a_snapshot_that_no_agent_sends_ends_the_worker(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_TIMEOUT", 0.2)
    one = agents.add("one")
    assert agents.alone(one, saves(1))
    origin = choose(0, "", [one.inventory()])
    one.close()
    del agents._by_name["one"]
    two = agents.add("two")
    monkeypatch.setattr(transfer, "_GIVE_UP", 0.0)
    variables = two.begin(1, origin, ALONE)
    with pytest.raises(Exception, match=r"two cannot get it: 127\.0\.0\.1: .*refused"):
        ask(variables[VARIABLE], Request(1))


def out_of_descriptors() -> Slot:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_transfer_is_given_up_with_its_round(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = agents.add("one"), agents.add("two")
    assert agents.alone(one, saves(1))
    # A holder that takes connections and says nothing.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = read_origin(choose(0, "", [one.inventory()])).holders[0].port
        origin = choose(0, "", [one.inventory()]).replace(str(port), str(silent.getsockname()[1]))
        two.begin(1, origin, ALONE)
        with monkeypatch.context() as descriptors:
            # A wait for the silent holder would take 10 s, in the agent's main thread.
            descriptors.setattr(Slot, "make", out_of_descriptors)
            began = time.monotonic()
            assert two.inventory() == ""
            assert time.monotonic() - began < 5
    agents.round = 1
    agents.origin = origin
    for variables in agents.next_round([one, two]):
        assert in_worker(variables, loads) == (1.0, 1)


def test_a_snapshot_that_comes_when_its_round_is_over_takes_no_slot(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = agents.add("one"), agents.add("two")
    assert in_worker(agents.next_round([one])[0], saves(1))
    receive = agent_side.receive

    def late(request: transfer.Request, slot: Slot, *arguments: Any) -> None:
        receive(request, slot, *arguments)
        assert slot.contents() is not None
        two._end_round()

    monkeypatch.setattr(agent_side, "receive", late)
    agents.next_round([one, two])
    for thread in threading.enumerate():
        if thread.name == "slurm-elastic-snapshot-fetch":
            thread.join()
    assert two.inventory() == ""


def test_strangers_that_hold_all_connections_keep_no_agent_from_its_snapshot(agents: Agents) -> None:
    one, two = agents.add("one"), agents.add("two")
    assert agents.alone(one, saves(1))
    port = read_inventories([one.inventory()])[0].holder.port
    with contextlib.ExitStack() as silent:
        for _ in range(80):
            silent.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        began = time.monotonic()
        for variables in agents.next_round([one, two]):
            assert in_worker(variables, loads) == (1.0, 1)
        # A silent connection is given up after 10 s.
        assert time.monotonic() - began < 8


def test_an_agent_without_the_secret_gets_nothing(agents: Agents) -> None:
    one = agents.add("one")
    assert agents.alone(one, saves(1))
    port = read_inventories([one.inventory()])[0].holder.port
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        session = Session(Role.AGENT, b"x" * 32, "7.0 snapshot", agent="stranger", port=port)
        connection.sendall(session.start())
        received = b""
        while piece := connection.recv(4096):
            received += piece
    assert len(received) < 1000
    assert not session.established


SHARDS, TENSORS = 1 << 15, 1 << 16
PART = Copy.of_part(SnapshotId(0, 1), 0, 2)


def holds_a_part(agents: Agents) -> tuple[AgentMemory, Slot]:
    """An agent, and its slot with a part: shards, other tensors and a description, all of random bytes."""
    one, content = agents.add("one"), os.urandom(TENSORS)
    one._parts[0] = [slot := Slot.make()]
    slot.grow(HEADER + TENSORS + 100)

    def write() -> None:
        slot.memory()[HEADER : HEADER + TENSORS + len(b"description")] = content + b"description"

    slot.fill(Contents(PART, TENSORS, len(b"description"), SHARDS), write)
    return one, slot


RECEIVER = transfer.Settings(b"s" * 32, "7.0", "two", "two", "127.0.0.1")


def test_ranges_of_the_shards_of_a_part_come_alone(agents: Agents) -> None:
    one, whole = holds_a_part(agents)
    ranges = ((0, 10), (4000, 9000), (SHARDS - 1, SHARDS))
    slot, holder = Slot.make(), read_inventories([one.inventory()])[0].holder
    transfer.receive(transfer.Request(PART, ranges), slot, [holder], RECEIVER, lambda: False)
    # There are pages for what came, and for no more; below, bytes that are read get theirs.
    assert slot.allocated < slot.size - 2 * 4096
    assert slot.contents() == whole.contents()
    there, here = whole.memory()[HEADER:], slot.memory()[HEADER:]
    for begin, end in (*ranges, (SHARDS, TENSORS + len(b"description"))):
        assert here[begin:end] == there[begin:end]
    for begin, end in ((10, 4000), (9000, SHARDS - 1)):
        assert here[begin:end] == bytes(end - begin)


def test_ranges_that_a_part_does_not_have_are_refused(agents: Agents) -> None:
    holder = read_inventories([holds_a_part(agents)[0].inventory()])[0].holder
    for ranges in (((0, SHARDS + 1),), ((-1, 5),), ((5, 9), (8, 12)), ((9, 5),)):
        channel = transfer.connect(holder, RECEIVER)
        with channel.socket:
            channel.say(transfer.Request(PART, ranges))
            with pytest.raises(transfer.TransferError, match="the connection ends"):
                channel.next(Contents)


def test_a_snapshot_that_changes_on_its_way_is_not_committed(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = holds_a_part(agents)
    # The digest that arrives is that of other bytes.
    say = transfer.Channel.say

    def say_wrongly(channel: transfer.Channel, message: object) -> None:
        is_digest = isinstance(message, transfer.Digest)
        say(channel, transfer.Digest(message.digest[::-1]) if is_digest else message)

    monkeypatch.setattr(transfer.Channel, "say", say_wrongly)
    slot = Slot.make()
    channel = transfer.connect(read_inventories([one.inventory()])[0].holder, RECEIVER)
    with channel.socket, pytest.raises(transfer.TransferError, match="a wrong digest"):
        transfer._receive(channel, transfer.Request(PART), slot, lambda: False)
    assert slot.contents() is None


def test_a_snapshot_that_is_overwritten_while_it_is_sent_is_not_committed(agents: Agents) -> None:
    one, whole = holds_a_part(agents)
    slot, channel = Slot.make(), transfer.connect(read_inventories([one.inventory()])[0].holder, RECEIVER)
    with channel.socket:
        channel.say(transfer.Request(PART))
        contents = channel.next(Contents)
        whole.clear()
        with pytest.raises(transfer.TransferError, match="the connection ends"):
            channel.receive_body(slot, contents, transfer.bodies_of(contents), lambda: None)
    assert slot.contents() is None


def test_memory_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "free_memory", lambda: 5 << 20)
    slots = [Slot.make() for _ in range(3)]
    require_memory(1 << 20, slots)
    with pytest.raises(OutOfMemoryError) as raised:
        require_memory(4 << 20, slots)
    assert str(raised.value) == (
        "snapshots need 3 x 4 MiB = 12 MiB of memory on this node, 9 MiB more than they have, and 5 MiB are free;"
        " ask for more by --mem, hold two snapshots by --snapshot-slots 2 of the agent, or do not call snapshot.save"
    )
    assert [slot.size for slot in slots] == [1 << 20] * 3


def test_a_page_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def pwrite(descriptor: int, content: memoryview, offset: int) -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(memory_module, "free_memory", lambda: 5 << 20)
    monkeypatch.setattr(memory_module.os, "pwrite", pwrite)
    with pytest.raises(
        OutOfMemoryError, match=r"need 1 MiB of .* or do not call snapshot.save \(Cannot allocate memory\)"
    ):
        Slot.make().put(0, memoryview(bytes(1 << 20)))


def test_the_memory_of_a_node_is_one_sum() -> None:
    parts = Reserve(2 << 30, 1 << 30, 4, replicates=True)
    parts.require(0, 26 << 30)
    parts.require(20 << 30, 6 << 30)
    with pytest.raises(OutOfMemoryError) as raised:
        parts.require(2 << 30, 20 << 30)
    assert str(raised.value) == (
        "snapshots need 3 x 2 GiB of the state that all ranks have + 3 x 4 x 1 GiB of what each rank alone has"
        " + 2 x 4 x 1 GiB of copies from another node = 26 GiB of memory on this node, 24 GiB more than they have, and"
        " 20 GiB are free; ask for more by --mem, hold two snapshots by --snapshot-slots 2 of the agent, or do not call"
        " snapshot.save"
    )
    # Copies from another node are two in any case.
    two = replace(parts, slots=2)
    two.require(0, 20 << 30)
    with pytest.raises(OutOfMemoryError, match="= 20 GiB of memory on this node, 18 GiB more than they have"):
        two.require(2 << 30, 17 << 30)
    with pytest.raises(OutOfMemoryError, match="snapshots need 3 x 2 GiB = 6 GiB of memory on this node"):
        Reserve(2 << 30).require(0, 1 << 30)


@pytest.mark.parametrize(
    ("nodes", "workers", "borrowed"),
    [
        # All parts of the other node.
        (2, 1, 1),
        (2, 8, 8),
        # A third more than a node has, and those of which a worker needs a piece.
        (4, 1, 3),
        (4, 6, 9),
        (100, 8, 10),
    ],
)
def test_shards_that_workers_start_from_after_a_loss_are_in_the_sum(nodes: int, workers: int, borrowed: int) -> None:
    sizes = Reserve(1 << 30, 1 << 20, workers, replicates=True, nodes=nodes)
    without = replace(sizes, nodes=1)
    needs = (3 << 30) + 5 * workers * (1 << 20)
    without.require(0, needs)
    sizes.require(0, needs + borrowed * (1 << 20))
    with pytest.raises(OutOfMemoryError, match=r"\+ 1 x .*1 MiB of shards that workers start from = "):
        sizes.require(0, needs + borrowed * (1 << 20) - 1)
    # All of it may be there already.
    sizes.require(needs + borrowed * (1 << 20), 0)
    # Each rank reads what all ranks had of their own.
    others = (nodes - 1) * workers
    replace(sizes, own=1 << 20).require(0, needs + others * (1 << 20))
    with pytest.raises(OutOfMemoryError, match="of the other ranks' own state, which workers start from = "):
        replace(sizes, own=1 << 20).require(0, needs + others * (1 << 20) - 1)
    replace(sizes, own=1 << 10).require(0, needs + borrowed * (1 << 20) + others * (1 << 10))


def test_fewer_nodes_have_larger_shards_each() -> None:
    four = Reserve(1 << 30, (3 << 20) + 5, 2, replicates=True, nodes=4, own=5)
    assert four.with_nodes(3) == replace(four, part=(4 << 20) + 5, nodes=3)
    assert four.with_nodes(1) == Reserve(1 << 30, (12 << 20) + 5, 2, own=5)
    assert Reserve(1 << 30, nodes=4).with_nodes(1) == Reserve(1 << 30)


def test_a_line_says_that_the_memory_would_not_do_for_the_fewest_nodes(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    settings = transfer.Settings(b"s" * 32, "7.0", "one", "one", "127.0.0.1")
    one = AgentMemory(tmp_path / "one", settings, fewest_nodes=2)

    def work() -> list[str]:
        lines: list[str] = []
        _worker_side.logger.warning = lambda text, *words: lines.append(text % words)  # type: ignore[method-assign]
        for nodes, free in ((4, 10 << 20), (2, 12 << 20), (4, 12 << 20)):
            os.environ["GROUP_WORLD_SIZE"] = str(nodes)
            _worker_side.free_memory = lambda free=free: free  # type: ignore[attr-defined]
            memory = _worker_side._memory()
            assert memory is not None
            memory._check_memory(whole=1 << 20, part=1 << 20, own=0)
        return lines

    variables = one.begin(0, "", Group(0, 4, 1, 0, 4))
    (line,) = in_worker({**variables, "SLURM_ELASTIC_ROUND": "0", "LOCAL_RANK": "0", "RANK": "0"}, work)
    one.close()
    assert line.startswith(
        "a round with only 2 of the nodes, which --nnodes allows, would fail: snapshots need 3 x 1 MiB"
    )
    assert " + 3 x 2 MiB of what each rank alone has + 1 x 2 MiB of shards that workers start from = 11 MiB" in line


@pytest.mark.parametrize(("slots", "total"), [(3, "9.0"), (2, "6.0")])
def test_a_worker_checks_the_memory_of_its_node_before_the_first_copy(tmp_path: Path, slots: int, total: str) -> None:
    agents = Agents(tmp_path, slots=slots)
    one = agents.add("one")
    (variables,) = agents.next_round([one])

    def work() -> str:
        _worker_side.free_memory = lambda: 5 << 20  # type: ignore[attr-defined]
        text: str = raised_by(
            lambda: snapshot.save(1, weights=torch.zeros(1 << 18), per_rank={"own": torch.zeros(1 << 18)})
        )()
        return text

    text = in_worker({**variables, "LOCAL_WORLD_SIZE": "2"}, work)
    assert f" = {total}" in text
    assert f"{slots} x 2 x 1" in text
    assert ("--snapshot-slots 2" in text) == (slots == 3)
    assert one.held() == (0, None)
    # With memory for it, a later round does not count it twice.
    assert in_worker(variables, saves(1))
    assert one.inventory()
    assert one.held()[0] > 0
    agents.close()


def test_a_worker_that_gets_only_some_of_the_slots_says_so(agents: Agents) -> None:
    (variables,) = agents.next_round([agents.add("one")])

    def work() -> str:
        opened = [os.dup(0)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened[0] + 20, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.dup(0))
        # Of these the socket takes one.
        for descriptor in opened[-3:]:
            os.close(descriptor)
        text: str = raised_by(loads)()
        return text

    assert "this process may not open so many files; raise its limit (ulimit -n)" in in_worker(variables, work)


def test_the_limits_of_all_control_groups_count(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    (proc / "self" / "cgroup").write_text("0::/job/step\n")
    assert free_memory(proc, groups) == 4000 << 10
    for name, most, used in (("job", "3000000", 1000000), ("job/step", "max", 500000)):
        (groups / name).mkdir(parents=True)
        (groups / name / "memory.max").write_text(f"{most}\n")
        (groups / name / "memory.current").write_text(f"{used}\n")
        (groups / name / "memory.stat").write_text("anon 5\ninactive_file 200000\n")
    assert free_memory(proc, groups) == 2200000
    assert free_memory() > 0


def test_a_slot_cannot_be_shrunk_under_its_readers() -> None:
    slot = Slot.make()
    slot.grow(1 << 20)
    with pytest.raises(PermissionError):
        os.ftruncate(slot.descriptor, mmap.PAGESIZE)
    assert slot.contents() is None
    slot.fill(Contents(Copy(SnapshotId(0, 1), "0" * 16), 8, 2), lambda: None)
    assert slot.contents() is not None


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    made = Agents(tmp_path)
    one = made.add("one")
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    assert made.alone(one, saves(1))
    made.next_round([one])
    made.close()
    eventually(lambda: len(list(Path("/proc/self/fd").iterdir())) < descriptors, lambda: "descriptors stay open")
