"""Who is lost, and who only seems to be."""

from __future__ import annotations

from slurm_elastic.rendezvous.membership.advance import next_deadline
from slurm_elastic.rendezvous.membership.events import Disconnected, SignsOfLife, Tick
from tests.unit.rendezvous.helpers.scenario import Scenario


def test_ticks_come_however_much_is_going_on() -> None:
    run = Scenario(heartbeat_limit=3.0)
    run.join("n0", "n1")
    began = run.now
    while "n1" in run.state.agents:
        run.now += 0.01
        run.on(SignsOfLife((("n0", run.now),)))
        if next_deadline(run.state) <= run.now:
            run.on(Tick())
        assert run.now - began < 4.0


def test_a_pause_of_the_leader_puts_no_broken_connection_into_the_future() -> None:
    """0.242 + (13.19 - 0.242) is later than 13.19, as it is rounded."""
    run = Scenario(min_nodes=2, reconnect_grace=30.0)
    run.now = 0.242
    run.join("n0", "n1")
    run.on(Disconnected("n0"))
    run.now = 13.19
    run.on(Disconnected("n1"))
    assert run.state.broken == {"n0": 13.19, "n1": 13.19}
    assert run.state.first_broken_at == 13.19
