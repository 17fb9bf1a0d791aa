"""Each row of a rehearsal's findings, by facts as runs with that mistake, and without it, have left them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from slurm_elastic.errors import UsageError
from slurm_elastic.finding import Finding, Level
from slurm_elastic.rehearsal import kill, pause, preempt
from slurm_elastic.rehearsal.checks import findings, require_comparable
from slurm_elastic.rehearsal.facts import Happened, RunFacts, WorkerSeen, changes_of, losses
from slurm_elastic.rehearsal.scenario import plan

NOTICE = preempt(node=1, step=4, seconds=10)
LOSS = kill(node=1, step=4)


def worker(round_: int, rank: int, first: int, last: int, **fields: object) -> WorkerSeen:
    """A worker that takes a step each second, from 100 s times its round on, and trains on the sample of its step."""
    begun = 100.0 * round_
    steps = range(first, last + 1)
    values: dict[str, object] = {
        "node": f"node{rank}",
        "steps": steps,
        "pause": 1.0,
        "asked": "train.py:9",
        "losses": {step: 1 / step for step in steps},
        "samples": tuple((step, 0, 2 * step + rank) for step in steps),
        "ended": begun + last + 1,
        "saved": "train.py:5",
    }
    return WorkerSeen(round_, rank, **{**values, **fields})  # type: ignore[arg-type]


def alone(first: int, last: int, **fields: object) -> WorkerSeen:
    """The worker of the node that is left in round 1: it trains on the samples of both ranks."""
    samples = tuple((step, 0, 2 * step + rank) for step in range(first, last + 1) for rank in (0, 1))
    return worker(1, 0, first, last, **{"samples": samples, **fields})


UNDISTURBED = RunFacts(workers=(worker(0, 0, 1, 8), worker(0, 1, 1, 8)), finished=True)


def stopped(rank: int, **fields: object) -> WorkerSeen:
    """A worker that is told to stop after step 4, at 104 s, and has saved half a second later."""
    values: dict[str, object] = {"stop": 4.0, "ended": 4.5, "checkpoints": (4,)}
    return worker(0, rank, 1, 4, **{**values, **fields})


def after_notice(**fields: object) -> RunFacts:
    """A run of which a node is preempted after step 4; one node goes on."""
    values: dict[str, object] = {
        "workers": (stopped(0), stopped(1), alone(5, 8)),
        "happened": (Happened(NOTICE, 3.9, 0),),
        "finished": True,
    }
    return RunFacts(**{**values, **fields})  # type: ignore[arg-type]


def rows(facts: RunFacts, mishap: object = NOTICE, undisturbed: RunFacts = UNDISTURBED) -> dict[str, Finding]:
    planned = plan([mishap], 2)  # type: ignore[list-item]
    return {each.check: each for each in findings(planned, undisturbed, facts, 0.01)}


def wrong(found: dict[str, Finding]) -> set[str]:
    return {name for name, each in found.items() if each.level is not Level.OK}


def test_a_script_that_is_right() -> None:
    found = rows(after_notice())
    assert wrong(found) == set()
    assert found["resume.step"].found == "rounds went on from step 4"
    assert found["save.grace"].found == "saving and ending took 0.5 s of 10 s of notice"
    assert [change.lost for change in changes_of(after_notice())] == [0]


def test_a_run_that_finds_the_checkpoints_of_the_one_before_it_is_told_so() -> None:
    rest = RunFacts(workers=(worker(0, 0, 8, 8), worker(0, 1, 8, 8)), finished=True)
    ends = rows(rest)["run.ends"]
    assert ends.found == "the run with mishaps began at step 8: it found the checkpoints of the run without them"
    assert "SLURM_ELASTIC_RUN_DIR" in ends.fix


def test_a_kill_costs_the_steps_since_the_last_checkpoint() -> None:
    workers = (worker(0, 0, 1, 4, checkpoints=(2,), ended=None), worker(0, 1, 1, 4, ended=None))
    facts = after_notice(workers=(*workers, alone(3, 8)), happened=(Happened(LOSS, 4.1, 0),))
    found = rows(facts, LOSS)
    assert wrong(found) == set()
    assert found["steps.killed"].found == "steps lost without notice: 2 ('at step 4 kill node 1')"
    assert sum(change.lost for change in changes_of(facts)) == 2


def test_half_a_checkpoint_that_was_left_out_is_right() -> None:
    found = rows(after_notice(halves={0: "step_5"}))["checkpoint.atomic"]
    assert (found.level, found.found) == (Level.OK, "no file was overwritten in place; half of step_5 was left out")
    failed = after_notice(workers=(stopped(0), stopped(1)), finished=False, halves={0: "step_5"})
    assert rows(failed)["checkpoint.atomic"].level is Level.BROKEN


VALUE = "`progress.best`: ranks 0 and 1 differ at step 16 (0.83 and 1e9), so no round can start from this snapshot"
UNEQUAL = "step 16 of round 0 is not the same on node0 and node1; it starts from no snapshot"
PARTS = (
    "no agent that is left holds part 2 of the 4 parts of step 6 of round 0: they are lost; it starts from no snapshot"
)


@pytest.mark.parametrize(
    ("warnings", "found", "fix"),
    [
        ((UNEQUAL, f"{VALUE}; give all ranks the same value"), VALUE, "give all ranks the same value"),
        ((f"{VALUE}; give this", f"{VALUE.replace('16', '8')}; give that"), VALUE, "give this"),
        ((UNEQUAL,), UNEQUAL.partition(";")[0], "give all ranks the same plain values"),
        ((PARTS,), PARTS.partition(";")[0], "--snapshot-replicas 1"),
    ],
)
def test_a_warning_about_a_snapshot_is_why_steps_are_lost(warnings: tuple[str, ...], found: str, fix: str) -> None:
    rows_ = rows(begins_again(warnings=warnings))
    assert (rows_["snapshot.usable"].level, rows_["snapshot.usable"].found) == (Level.LIMIT, found)
    assert fix in rows_["snapshot.usable"].fix
    assert fix in rows_["resume.step"].fix
    assert "load the newest checkpoint" in rows(begins_again())["resume.step"].fix


def test_a_warning_that_follows_from_a_mishap_is_no_finding() -> None:
    told = ("workers that started from step 4 of round 0 failed before the next snapshot",)
    assert "snapshot.usable" not in rows(after_notice(warnings=told))


def begins_again(**fields: object) -> RunFacts:
    return after_notice(workers=(stopped(0), stopped(1), worker(1, 0, 1, 8), worker(1, 1, 1, 8)), **fields)


def forgets_place() -> RunFacts:
    again = tuple((step + 4, epoch, sample) for step, epoch, sample in alone(1, 4).samples)
    return after_notice(workers=(stopped(0), stopped(1), alone(5, 8, samples=again)))


def saves_slowly() -> RunFacts:
    workers = (stopped(0, ended=None, checkpoints=()), stopped(1, ended=None, checkpoints=()))
    return after_notice(workers=(*workers, alone(3, 8)), cut_short={0: 9.0})


def fails_while_another_saves() -> RunFacts:
    facts = saves_slowly()
    workers = (stopped(0, ended=None, checkpoints=()), stopped(1, checkpoints=()), facts.workers[2])
    return replace(facts, workers=workers, cut_short={0: 4.6})


def nearly_too_slow() -> RunFacts:
    return after_notice(workers=(stopped(0), stopped(1, ended=10.0), alone(5, 8)))


def seldom_asks() -> RunFacts:
    return after_notice(workers=(stopped(0, pause=11.0), stopped(1), alone(5, 8)))


def never_told() -> RunFacts:
    return after_notice(workers=(stopped(0, stop=None), stopped(1, stop=None), alone(5, 8)))


def other_losses() -> RunFacts:
    rest = alone(5, 8, losses={5: 0.2, 6: float("nan"), 7: 1 / 7, 8: 1 / 8})
    return after_notice(workers=(stopped(0), stopped(1), rest))


def ends_early() -> RunFacts:
    return after_notice(workers=(stopped(0), stopped(1), alone(5, 6)))


MISTAKES: list[tuple[Callable[[], RunFacts], dict[str, str]]] = [
    (begins_again, {"resume.step": "went on from the beginning, not from step 4", "steps.announced": "4 steps"}),
    (forgets_place, {"samples.once": "8 samples were trained on more often"}),
    (saves_slowly, {"save.grace": "killed before it had ended", "steps.announced": "2 steps"}),
    (nearly_too_slow, {"save.grace": "took 6.0 s of 10 s"}),
    (seldom_asks, {"stop.asked": "11.0 s passed between two calls"}),
    (never_told, {"stop.asked": "no worker was told to stop at a step"}),
    (other_losses, {"losses.match": "at step 6 the loss is nan, and 0.166667 without mishaps"}),
    (lambda: after_notice(cut_short={0: 4.6}), {"worker.exit": "did not end with 0"}),
    (fails_while_another_saves, {"worker.exit": "did not end with 0", "steps.announced": "2 steps"}),
    (lambda: after_notice(restarts=1, failure="ValueError: no"), {"worker.exit": r"by itself \(ValueError: no\)"}),
    (lambda: after_notice(overwritten=("last.pt",)), {"checkpoint.atomic": "overwritten in place: last.pt"}),
    (
        lambda: begins_again(halves={0: "step_5"}),
        {"resume.step": "", "steps.announced": "", "checkpoint.atomic": "an older checkpoint beside half of step_5"},
    ),
    (lambda: after_notice(left=("python server.py",)), {"processes.left": "1 processes stayed: python server.py"}),
    (lambda: after_notice(gave_up="no worker has taken a step for 9 s"), {"run.ends": "no worker has taken a step"}),
    (ends_early, {"run.ends": "ended after step 6, and after step 8 without", "samples.once": "4 less often"}),
    (lambda: after_notice(happened=()), {"run.ends": "ended before 'at step 4 preempt node 1"}),
]


@pytest.mark.parametrize(("facts", "expected"), MISTAKES)
def test_a_mistake_is_named_with_its_fix(facts: Callable[[], RunFacts], expected: dict[str, str]) -> None:
    found = rows(facts())
    assert wrong(found) == set(expected)
    for name, text in expected.items():
        assert re.search(text, found[name].found), found[name].found
        assert found[name].fix


def paused(**fields: object) -> RunFacts:
    """A run whose rank 0 is paused after step 4; rank 1 goes on from the checkpoint of step 3, and saves at 8."""
    workers = (worker(0, 0, 1, 4, checkpoints=(3,), woken=True, **fields), worker(0, 1, 1, 4, ended=None))
    rest = alone(4, 8, checkpoints=(8,))
    return after_notice(workers=(*workers, rest), happened=(Happened(pause(step=4), 4.1, 0),))


def test_a_group_that_wakes_too_late_may_not_replace_a_checkpoint() -> None:
    planned = plan([pause(step=4)], 3)

    def found(facts: RunFacts) -> dict[str, Finding]:
        return {each.check: each for each in findings(planned, UNDISTURBED, facts, 0.01)}

    assert wrong(found(paused())) == set()
    late = found(paused(late=(4,)))
    assert wrong(late) == {"checkpoint.superseded"}
    assert "reported a checkpoint of step 4 over theirs" in late["checkpoint.superseded"].found
    assert late["checkpoint.superseded"].place == "train.py:5"


def test_what_a_script_does_not_say_is_unknown() -> None:
    silent = tuple(replace(each, losses={}, samples=()) for each in after_notice().workers)
    found = rows(after_notice(workers=silent))
    unknown = {name for name, each in found.items() if each.level is Level.UNKNOWN}
    assert unknown == wrong(found) == {"losses.match", "samples.once"}


def test_losses_are_those_of_the_steps_that_counted_and_the_mean_of_all_ranks() -> None:
    first = (replace(stopped(0), losses={1: 1.0, 2: 3.0}), replace(stopped(1), losses={1: 2.0}))
    again = replace(worker(1, 0, 2, 3), losses={2: 4.0})
    assert losses(after_notice(workers=(*first, again))) == {1: 1.5, 2: 4.0}


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        (RunFacts(finished=True), "never calls slurm_elastic.trainer.should_stop"),
        (RunFacts(failure="RuntimeError: No CUDA GPUs are available"), "rehearse it where there are GPUs"),
        (RunFacts(failure="FileNotFoundError: data"), r"\(FileNotFoundError: data\); fix it; .* --link"),
        (RunFacts(gave_up="no worker has taken a step for 9 s"), "no worker has taken a step for 9 s; .*--timeout"),
        (RunFacts(workers=(worker(0, 0, 5, 8),), finished=True), "begins with step 5: it has found a checkpoint"),
        (
            RunFacts(workers=(replace(worker(0, 0, 1, 2), steps=(None, None)),), finished=True),
            "never says at which step it is",
        ),
    ],
)
def test_a_script_that_cannot_be_rehearsed_is_one_line(facts: RunFacts, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        require_comparable(facts, None)


def test_mishaps_after_the_end() -> None:
    assert require_comparable(UNDISTURBED, [NOTICE]) == 8
    with pytest.raises(UsageError, match="'at step 8 kill node 1': the training ends with step 8"):
        require_comparable(UNDISTURBED, [kill(node=1, step=8)])
    with pytest.raises(UsageError, match="has 8 steps, too few"):
        require_comparable(UNDISTURBED, None)
