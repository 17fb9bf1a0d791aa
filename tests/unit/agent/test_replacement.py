from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slurm_elastic.agent.job import replacement
from slurm_elastic.agent.job.replacement import (
    Cancel,
    Claim,
    Claims,
    Replacer,
    Result,
    Shortage,
    Submit,
    comment,
    decide,
    intended_size,
    read_claims,
)
from slurm_elastic.agent.lifecycle.actions import AnnounceLeave
from slurm_elastic.agent.option_values import OptionValues
from slurm_elastic.cli.commands.status import facts
from slurm_elastic.errors import ExitCode
from slurm_elastic.observe.records import read_records
from slurm_elastic.observe.status import _replacing
from slurm_elastic.observe.views import RunState, RunStatus
from slurm_elastic.rendezvous.connect import RendezvousConfig
from slurm_elastic.rendezvous.membership.agents import LeaveReason
from slurm_elastic.rendezvous.thread import Led
from slurm_elastic.rundir import RunDir
from slurm_elastic.slurm import Controller, JobView, QueuedJob

SHORT = Shortage(1, short_for=20.0)
WAITS = (("31", 1),)


@pytest.mark.parametrize(
    ("shortage", "decision"),
    [
        (SHORT, Submit(1)),
        (SHORT._replace(missing=3), Submit(3)),
        (SHORT._replace(missing=0), None),
        (SHORT._replace(short_for=19.9), None),
        # One at a time, and never while it is not known whether there is one.
        (SHORT._replace(pending=WAITS), None),
        (SHORT._replace(missing=3, pending=WAITS), None),
        (SHORT._replace(unresolved=True), None),
        (SHORT._replace(submitted=2), Submit(1)),
        (SHORT._replace(submitted=3), None),
        # What is not needed any more goes, whatever else holds.
        (Shortage(0, WAITS, submitted=3, unresolved=True), Cancel("31")),
        (SHORT._replace(pending=(("31", 2),)), Cancel("31")),
        (SHORT._replace(pending=(*WAITS, ("32", 1))), Cancel("32")),
        (SHORT._replace(missing=2, pending=(*WAITS, ("32", 1))), None),
    ],
)
def test_what_is_done_about_missing_nodes(shortage: Shortage, decision: Submit | Cancel | None) -> None:
    assert decide(shortage, 20.0, 3) == decision


FIRST: Claims = {0: (Claim(4), None)}
GONE: Claims = {1: (Claim(1, "1970-01-01T00:00:25+00:00"), Result("31", end="gone"))}


def formed(nodes: int) -> dict[str, Any]:
    return {"event": "round_formed", "nodes": [f"n{number}" for number in range(nodes)]}


def left(why: str) -> dict[str, Any]:
    return {"event": "node_left", "nodes": ["n1"], "why": why}


@pytest.mark.parametrize(
    ("events", "claims", "size"),
    [
        ([], FIRST, None),
        ([formed(2)], {}, 2),
        ([formed(2)], FIRST, 4),
        ([formed(4), formed(2), formed(3)], FIRST, 4),
        ([formed(4), formed(6), formed(5)], FIRST, 6),
        ([formed(4), left("time_limit"), left("preempted"), formed(2)], FIRST, 4),
        ([formed(4), left("drained"), left("cancelled"), formed(2)], FIRST, 2),
        # Grown again after that.
        ([formed(4), left("drained"), left("drained"), formed(2), formed(3)], FIRST, 3),
        ([formed(2), formed(1)], GONE, 1),
        ([formed(2), formed(1), formed(2), formed(1)], {1: (Claim(1), Result("31", end="failed"))}, 2),
    ],
)
def test_the_size_that_a_run_is_to_have(events: list[dict[str, Any]], claims: Claims, size: int | None) -> None:
    assert intended_size(((10.0 * number, event) for number, event in enumerate(events)), claims) == size


class KilledError(BaseException):
    """The leader's process is killed."""


@dataclass
class World:
    """A run with its queue. Each effect of a leader is a step; `interruption` comes before and after each."""

    run_dir: RunDir
    interruption: Callable[[int], None] = lambda step: None
    limit: int = 3
    now: float = 0.0
    epoch: int = 1
    staying: tuple[str, ...] = ("n1/7.0/1", "n2/7.0/2")
    queue: dict[str, QueuedJob] = field(default_factory=dict)
    views: dict[str, str] = field(default_factory=dict)
    answers: bool = True
    refusal: str = ""
    submitted: list[Sequence[str]] = field(default_factory=list)
    most_waiting: int = 0
    cancelled: list[str] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self.happen(formed(2))
        self.leader = self.lead()

    def happen(self, event: dict[str, Any]) -> None:
        when = f"2026-01-01T00:{int(self.now) // 60:02d}:{self.now % 60:06.3f}+00:00"
        self.run_dir.append_event("n1", json.dumps({"time": when, **event}))

    def lead(self) -> Replacer:
        epoch = self.epoch
        records = SimpleNamespace(newest_epoch=self.newest_epoch)
        run = SimpleNamespace(
            run_dir=self.run_dir, expected_nodes=("n1", "n2"), min_nodes=1, max_nodes=8, records=records
        )
        return Replacer(
            OptionValues(replace_lost=20.0, replace_limit=self.limit),
            cast(RendezvousConfig, run),
            lambda ended: Led(epoch, self.staying),
            self,
            cast(Controller, self),
        )

    def newest_epoch(self) -> int:
        epoch = self.epoch
        self.step()
        return epoch

    def step(self) -> None:
        self.steps += 1
        self.interruption(self.steps)

    def pass_time(self, seconds: int) -> None:
        for _ in range(seconds // 5):
            self.now += 5
            try:
                self.leader.look(self.now)
            except KilledError:
                self.succeed()

    def succeed(self) -> None:
        """Another agent leads."""
        self.epoch += 1
        self.leader = self.lead()

    # Slurm.

    def time_limit(self, _: RunDir) -> str:
        return "1:00:00"

    def submit(self, run: RendezvousConfig, number: int, nodes: int, exclude: Sequence[str]) -> Result | None:
        self.step()
        if self.refusal:
            return Result(refused=self.refusal)
        job = str(31 + len(self.submitted))
        self.submitted.append(exclude)
        self.queue[job] = QueuedJob(job, job, "PENDING", nodes, comment(run.run_dir, number))
        self.most_waiting = max(self.most_waiting, len(self.waiting))
        self.step()
        return Result(job) if self.answers else None

    def own_jobs(self, *, by_element: bool) -> tuple[QueuedJob, ...] | None:
        self.step()
        return tuple(self.queue.values()) if self.answers else None

    def cancel(self, job: str, *, if_pending: bool = False) -> bool:
        self.step()
        if job in self.queue and not (if_pending and self.queue[job].state != "PENDING"):
            del self.queue[job]
            self.views[job] = "CANCELLED"
            self.cancelled.append(job)
        self.step()
        return True

    def job(self, job: str) -> JobView | None:
        return cast(JobView, SimpleNamespace(state=self.views[job])) if job in self.views else None

    # Events of the run.

    def lose(self, then: int = 0) -> None:
        """A node is lost, and then so many seconds pass."""
        self.staying = self.staying[:1]
        self.happen(formed(1))
        self.pass_time(then)

    def start(self) -> str:
        """The oldest replacement starts. Returns its job id."""
        job = min(self.queue)
        self.queue[job] = replace(self.queue[job], state="RUNNING")
        return job

    def join(self, then: int = 0) -> None:
        """The oldest replacement starts, if it has not, and its agent joins."""
        job = self.start()
        self.staying = (*self.staying, f"n3/{job}.0/3")
        self.run_dir.append_progress("n3", job, "{}")
        self.happen(formed(2))
        self.pass_time(then)

    @property
    def waiting(self) -> list[str]:
        return [name for name, job in self.queue.items() if job.state == "PENDING"]


@pytest.fixture
def make_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    monkeypatch.setattr(replacement.shutil, "which", lambda _: "/usr/bin/sbatch")
    monkeypatch.setattr(os, "fsync", lambda _: None)
    numbers = itertools.count()
    return lambda **facts: World(RunDir.for_run(tmp_path, f"7.{next(numbers)}").open(), **facts)


def test_a_leader_that_misses_no_node_looks_at_nothing_until_its_agents_change(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    world.pass_time(60)
    asked = world.steps

    def read(_: RunDir) -> Claims:
        raise AssertionError("the records are read")

    monkeypatch.setattr(replacement, "read_claims", read)
    world.pass_time(600)
    assert world.steps == asked
    with pytest.raises(AssertionError):
        world.lose(then=5)


def test_a_node_is_replaced_once_and_what_waits_is_cancelled(
    make_world: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "slurm_elastic")
    world = make_world()
    world.pass_time(60)
    world.lose(then=20)
    assert world.submitted == []
    world.pass_time(10)
    assert world.waiting == ["31"]
    world.pass_time(600)
    world.join(then=60)
    assert (len(world.submitted), world.waiting, world.cancelled) == (1, [], [])

    # Another one is lost, and comes back by itself.
    del world.queue["31"]
    world.lose(then=60)
    assert world.waiting == ["32"]
    world.staying = ("n1/7.0/1", "n2/7.1/2")
    world.pass_time(60)
    assert (world.waiting, world.cancelled) == ([], ["32"])

    # The last one that --replace-limit allows.
    world.lose(then=60)
    assert world.waiting == ["33"]
    world.join(then=60)
    del world.queue["33"]
    world.lose(then=600)
    assert len(world.submitted) == 3

    replacing = _replacing(read_records(world.run_dir))
    row = "replaces", "lost nodes, after 20 s; 3 of at most 3 jobs submitted"
    assert row in list(facts(RunStatus("7", "", RunState.RUNNING, replacing=replacing), 0.0))

    # What waits when the run ends, also if a person has asked for it.
    world.queue["40"] = QueuedJob("40", "40", "PENDING", 1, comment(world.run_dir))
    world.queue["41"] = QueuedJob("41", "41", "PENDING", 1, "mine")
    world.leader.run_ended()
    world.leader.close(ExitCode.LEFT, leads=True)
    world.leader.close(ExitCode.FINISHED, leads=False)
    assert world.waiting == ["40", "41"]
    # This leader has led for no look.
    world.succeed()
    world.leader.close(ExitCode.FINISHED, leads=True)
    assert world.waiting == ["41"]
    assert [line for line in caplog.messages if "replaced" in line] == [
        "lost nodes are replaced: after 20 s a job like the first one is submitted for them, one at a time, at most 3 "
        "in all of up to 1:00:00 each (--replace-lost, --replace-limit)",
        "lost nodes are not replaced any more: 3 jobs were submitted for them",
    ]


def test_no_node_is_replaced_that_left_by_the_users_wish(make_world: Callable[..., World]) -> None:
    world = make_world()
    world.pass_time(60)
    world.happen(left("drained"))
    world.lose(then=600)
    assert world.submitted == []
    # A person does not want the replacement.
    world = make_world()
    world.lose(then=60)
    world.cancel("31")
    world.pass_time(600)
    assert len(world.submitted) == 1

    # All of a run is drained.
    world = make_world()
    world.lose(then=60)
    world.staying = ()
    for reason, waiting in {LeaveReason.TIME_LIMIT: ["31"], LeaveReason.DRAINED: []}.items():
        world.leader.leave_announced(AnnounceLeave(reason, 30.0, ""))
        world.leader.run_ended()
        world.leader.close(ExitCode.LEFT, leads=False)
        assert world.waiting == waiting


def test_other_jobs_of_the_run_and_nodes_with_strikes(make_world: Callable[..., World]) -> None:
    world = make_world()
    world.queue["30"] = QueuedJob("30", "30", "PENDING", 1, comment(world.run_dir))
    world.happen({"event": "node_check_failed", "nodes": ["n9"]})
    world.lose(then=600)
    assert world.submitted == []
    del world.queue["30"]
    world.pass_time(60)
    assert len(world.submitted) == 1
    # Requeued after its agents had joined.
    world.join(then=60)
    world.queue["31"] = replace(world.queue["31"], state="PENDING")
    world.lose(then=600)
    assert (len(world.submitted), world.cancelled) == (1, [])


def test_refused_and_silent(make_world: Callable[..., World], caplog: pytest.LogCaptureFixture) -> None:
    world = make_world(refusal="sbatch refused the job: too many jobs", limit=1)
    world.lose(then=280)
    assert len(read_claims(world.run_dir)) == 2
    world.pass_time(900)
    assert len(read_claims(world.run_dir)) == 5
    assert sum("too many jobs; it is tried again every 5 minutes" in line for line in caplog.messages) == 1
    # The limit counts no refusal.
    world.refusal, world.answers = "", False
    world.pass_time(600)
    assert len(world.submitted) == 0
    world.answers = True
    world.pass_time(600)
    assert len(world.submitted) == 1
    assert [result.job for _, result in read_claims(world.run_dir).values() if result] == ["", "", "", "", "31"]


def play(world: World) -> None:
    """Two losses: of one the replacement comes, of the other it is not needed any more. The run ends with a third."""
    world.pass_time(10)
    world.lose(then=180)
    # A claim whose sbatch has not run counts, too.
    assert len(world.waiting) == 1
    world.start()
    world.pass_time(60)
    assert world.waiting == []
    world.join(then=180)
    assert world.waiting == []
    world.queue.clear()
    world.lose(then=180)
    assert len(world.waiting) <= 1
    world.staying = ("n1/7.0/1", "n2/7.1/2")
    world.pass_time(180)
    assert world.waiting == []
    world.lose(then=180)
    assert len(world.waiting) <= 1
    world.leader.run_ended()
    world.leader.close(ExitCode.FINISHED, leads=True)


LIMIT = 2


def play_with_kills(make_world: Callable[..., World]) -> None:
    """Play once for each step at which the leader can be killed."""
    whole = make_world(limit=LIMIT)
    play(whole)
    assert len(whole.submitted) == LIMIT
    for fatal in range(1, whole.steps + 1):

        def kill(step: int, fatal: int = fatal) -> None:
            if step == fatal:
                raise KilledError

        world = make_world(limit=LIMIT, interruption=kill)
        try:
            play(world)
        except KilledError:
            # At the end of the run.
            assert len(world.waiting) <= 1
            world.leader.close(ExitCode.FINISHED, leads=True)
        assert len(world.submitted) <= LIMIT
        assert world.most_waiting <= 1
        assert world.waiting == []


def play_with_a_silent_controller(make_world: Callable[..., World]) -> None:
    """sbatch gets no answer, and the job is in the queue 40 s later."""
    world = make_world()

    def vanish(step: int) -> None:
        world.answers = not world.submitted

    world.interruption = vanish
    world.lose(then=30)
    accepted = world.queue.copy()
    world.queue.clear()
    world.interruption, world.answers = lambda step: None, True
    world.pass_time(40)
    world.queue |= accepted
    world.pass_time(600)
    assert len(world.submitted) == 1


@pytest.mark.parametrize("play", [play_with_kills, play_with_a_silent_controller])
def test_no_node_is_replaced_twice_or_without_need(
    play: Callable[[Callable[..., World]], None], make_world: Callable[..., World]
) -> None:
    play(make_world)


@pytest.mark.parametrize(("seconds", "most"), [(60, 1), (180, 2)])
def test_leaders_that_go_on_after_another_one_has_led(
    make_world: Callable[..., World], seconds: int, most: int
) -> None:
    whole = make_world(limit=LIMIT)
    play(whole)
    for paused in range(1, whole.steps + 1):
        worlds: list[World] = []

        def pause(step: int, paused: int = paused, worlds: list[World] = worlds) -> None:
            if step == paused:
                worlds[0].succeed()
                worlds[0].pass_time(seconds)

        world = make_world(limit=LIMIT)
        world.interruption = pause
        worlds.append(world)
        play(world)
        assert len(world.submitted) <= LIMIT
        assert world.most_waiting <= most
        assert world.waiting == []


def test_a_leader_that_is_superseded_does_nothing(make_world: Callable[..., World]) -> None:
    world = make_world()
    world.epoch += 1
    world.lose(then=300)
    assert world.submitted == []


def test_an_image_without_sbatch_and_a_start_that_is_not_on_record(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world()
    world.lose()
    monkeypatch.setattr(world, "time_limit", lambda _: None)
    world.pass_time(180)
    monkeypatch.setattr(replacement.shutil, "which", lambda _: None)
    world.pass_time(180)
    assert (world.submitted, len(caplog.messages)) == ([], 2)
    assert "how the run was started is not on record" in caplog.messages[0]
    assert "there is no sbatch here" in caplog.messages[1]
    assert world.steps == 0
