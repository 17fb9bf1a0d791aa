"""Our handler as torch's agent uses it; what torch's own tests say of its dynamic handler, where we keep it.

See test/distributed/elastic/rendezvous/dynamic_rendezvous_test.py in torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import pytest
from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from slurm_elastic.errors import UsageError
from slurm_elastic.rendezvous.membership.events import Waiting
from slurm_elastic.rendezvous.torch_handler import SlurmRendezvousHandler, create_handler, handler_factory
from tests.local.agents import HANG, eventually
from tests.local.rendezvous.helpers.parties import Run, options

StartRun = Callable[..., Run]
T = TypeVar("T")


class Handlers:
    """Handlers of one run, each of which is used by a thread of its own."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._threads = ThreadPoolExecutor(8)

    def make(self, position: int, **changes: object) -> SlurmRendezvousHandler:
        party = self.run.party(position, **changes)
        return SlurmRendezvousHandler(party.config, party.link)

    def all_of(self, nodes: int) -> list[SlurmRendezvousHandler]:
        return [SlurmRendezvousHandler(party.config, party.link) for party in self.run.all_of(nodes)]

    def start(self, action: Callable[[], T]) -> Future[T]:
        return self._threads.submit(action)

    def next(self, handler: SlurmRendezvousHandler) -> Future[RendezvousInfo]:
        return self.start(handler.next_rendezvous)

    def form(self, *handlers: SlurmRendezvousHandler) -> list[RendezvousInfo]:
        """All join at once."""
        return [future.result(HANG) for future in [self.next(handler) for handler in handlers]]


@pytest.fixture
def handlers(start_run: StartRun) -> Callable[..., Handlers]:
    return lambda **settings: Handlers(start_run(**settings))


MakeHandlers = Callable[..., Handlers]


def test_all_nodes_join(handlers: MakeHandlers) -> None:
    some = handlers()
    first, second = some.all_of(2)
    infos = some.form(second, first)[::-1]
    assert [(info.rank, info.world_size) for info in infos] == [(0, 2), (1, 2)]
    addresses = {(info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) for info in infos}
    assert len(addresses) == 1
    assert first.get_backend() == "slurm"
    assert first.get_run_id() == "run"
    assert first.use_agent_store
    assert not first.is_closed()
    assert first.num_nodes_waiting() == second.num_nodes_waiting() == 0


def test_the_store_is_shared_and_fresh_each_round(handlers: MakeHandlers) -> None:
    some = handlers()
    pair = some.all_of(2)
    ports = set()
    for round_ in range(2):
        one, other = some.form(*pair)
        ports.add(one.bootstrap_store_info.master_port)
        PrefixStore("worker", other.store).set("key", f"round {round_}")
        assert PrefixStore("worker", one.store).get("key") == f"round {round_}".encode()
        assert not one.store.check(["stale"])
        one.store.set("stale", "")
    assert len(ports) == 2


def test_the_store_of_a_round_waits_no_longer_than_it_is_told(handlers: MakeHandlers) -> None:
    some = handlers()
    (info,) = some.form(*some.all_of(1))
    with pytest.raises(Exception, match=r"(?i)timeout"):
        info.store.wait(["never"], timedelta(seconds=0.05))


def test_a_late_node_is_seen_waiting_and_taken_in(handlers: MakeHandlers) -> None:
    some = handlers()
    first = some.make(0)
    some.form(first)
    second = some.make(1)
    waiting = some.next(second)
    eventually(lambda: first.num_nodes_waiting() == 1)
    assert not waiting.done()
    (info,) = some.form(first)
    assert (info.world_size, waiting.result(HANG).rank) == (2, 1)
    assert first.num_nodes_waiting() == 0


def test_a_redundant_node_waits_and_ends_with_the_others(handlers: MakeHandlers) -> None:
    some = handlers(max_nodes=2)
    first, second = some.make(0, min_nodes=2), some.make(1)
    some.form(first, second)
    spare = some.make(2)
    third = some.next(spare)
    eventually(lambda: any(getattr(told, "message", None) == Waiting() for told in some.run.parties[0].decisions))
    assert second.shutdown()
    # Who goes with success leaves the round as it is.
    assert first.num_nodes_waiting() == 0
    assert not third.done()
    going = some.start(first.shutdown)
    with pytest.raises(RendezvousGracefulExitError):
        third.result(HANG)
    assert spare.shutdown()
    assert going.result(HANG)
    assert some.run.run_dir.is_done()


def test_a_lost_node_is_noticed_and_replaced(handlers: MakeHandlers) -> None:
    some = handlers(max_nodes=2)
    first, second = some.make(0, min_nodes=2), some.make(1)
    some.form(first, second)
    third = some.next(some.make(2))
    some.run.parties[1].link.stop()
    eventually(lambda: first.num_nodes_waiting() == 1)
    some.form(first)
    assert third.result(HANG).rank == 1


def test_an_agent_that_joins_again_by_itself_restarts_all(handlers: MakeHandlers) -> None:
    some = handlers()
    first, second = some.all_of(2)
    some.form(first, second)
    # As torch's agent does when its workers failed and it may restart them.
    again = some.next(second)
    eventually(lambda: first.num_nodes_waiting() == 1)
    some.form(first)
    assert again.result(HANG).world_size == 2


def test_agents_that_join_again_at_once_do_so_once(handlers: MakeHandlers) -> None:
    some = handlers()
    first, second = some.all_of(2)
    for _ in range(10):
        some.form(first, second)
    assert first.num_nodes_waiting() == second.num_nodes_waiting() == 0
    assert some.run.run_dir.newest("rounds") == 9


def test_closed_for_everybody(handlers: MakeHandlers) -> None:
    some = handlers()
    first, second = some.all_of(2)
    some.form(first, second)
    second.set_closed()
    assert second.is_closed()
    eventually(first.is_closed)
    for handler in (first, second):
        with pytest.raises(RendezvousClosedError):
            handler.next_rendezvous()
        with pytest.raises(RendezvousClosedError):
            handler.num_nodes_waiting()
    assert not some.run.run_dir.is_done()


def test_shutdown_after_a_failure_closes_and_after_success_finishes(handlers: MakeHandlers) -> None:
    some = handlers()
    first, second = some.all_of(2)
    some.form(first, second)

    def launch_agent() -> None:
        # As torch's launcher does.
        try:
            raise ValueError("the workers failed")
        finally:
            second.shutdown()

    with pytest.raises(ValueError, match="the workers failed"):
        launch_agent()
    eventually(first.is_closed)
    # The second call does nothing.
    assert first.shutdown()
    assert first.shutdown()
    assert not some.run.run_dir.is_done()


@pytest.mark.usefixtures("_patient_search")
def test_too_few_nodes_time_out(handlers: MakeHandlers) -> None:
    some = handlers(min_nodes=2, options=options(join_timeout=0.3))
    with pytest.raises(RendezvousTimeoutError, match=r"1 of at least 2 nodes came within 0\.3 s"):
        some.make(0).next_rendezvous()


def test_no_leader_is_a_connection_error(handlers: MakeHandlers) -> None:
    some = handlers(options=options(join_timeout=0.3))
    with pytest.raises(RendezvousConnectionError, match=r"no leader on 127\.0\.0\.1"):
        some.make(1).next_rendezvous()


def _parameters(**config: object) -> RendezvousParameters:
    return RendezvousParameters("slurm", "", "none", 1, 1, **config)


def test_the_factory_needs_no_endpoint_and_no_id(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.chdir(str(tmp_path))
    create = handler_factory()
    assert callable(create)
    handler = create(_parameters(join_timeout=f"{HANG:g}", timeout=900))
    assert isinstance(handler, SlurmRendezvousHandler)
    try:
        info = handler.next_rendezvous()
        assert (info.rank, info.world_size) == (0, 1)
        assert handler.get_run_id().startswith("local-")
    finally:
        handler.shutdown()


def test_the_factory_refuses_unknown_options(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.chdir(str(tmp_path))
    with pytest.raises(UsageError, match="unknown key 'close_timer'"):
        create_handler(_parameters(close_timer="5"))
