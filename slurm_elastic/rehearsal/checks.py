"""The findings of a rehearsal, from what was seen of the run without mishaps and of the run with them. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath
from statistics import median

from slurm_elastic.errors import UsageError
from slurm_elastic.finding import Finding, Level
from slurm_elastic.rehearsal._changes import changes_of, first_steps, is_left_out, losses
from slurm_elastic.rehearsal.facts import RunFacts, StopSeen, WorkerSeen
from slurm_elastic.rehearsal.scenario import GRACE, Kind, Mishap, Plan

_GPU = re.compile(r"CUDA|NVIDIA|\bGPU|HIP|nccl", re.IGNORECASE)
_VALUE = re.compile(r"`(.*)`: ranks \d+ and \d+ differ")
_UNEQUAL = re.compile(r"^step \d+ of round \d+ is not the same on ")
_PARTS = re.compile(r"^no agent that is left holds part ")


def findings(planned: Plan, undisturbed: RunFacts, disturbed: RunFacts, tolerance: float) -> list[Finding]:
    """Judge a rehearsal.

    Args:
        planned: The mishaps.
        undisturbed: What was seen of the run without mishaps, which has ended well.
        disturbed: What was seen of the run with them.
        tolerance: By which part of themselves losses may differ.
    """
    warned = list(_snapshots(disturbed))
    return [
        _ends(planned, undisturbed, disturbed),
        *_failed_workers(planned, disturbed),
        *warned,
        *(_because_of(warned, finding) for finding in (_resume(disturbed), *_lost(disturbed))),
        _samples(undisturbed, disturbed),
        _losses(undisturbed, disturbed, tolerance),
        *_saving(disturbed),
        _asked(planned, undisturbed, disturbed),
        _files(undisturbed, disturbed),
        *_superseded(disturbed),
        _processes(undisturbed, disturbed),
    ]


def require_comparable(facts: RunFacts, mishaps: Sequence[Mishap] | None) -> int:
    """Return the number of steps of the run without mishaps.

    Raises:
        UsageError: The script cannot be rehearsed, or not with these mishaps.
    """
    why = facts.failures[-1].rstrip(".") if facts.failures else ""
    if facts.gave_up:
        raise UsageError(f"without any mishap {facts.gave_up}{_quoted(why)}; fix the script, or raise --timeout")
    if not facts.finished:
        fix = "fix it; it runs in an empty directory, and --link makes files visible there"
        if _GPU.search(why):
            fix = "rehearse it where there are GPUs, one for each worker at least, or let it train on a CPU, too"
        raise UsageError(f"the script fails without any mishap{_quoted(why)}; {fix}")
    if not facts.rounds:
        raise UsageError(
            "the script never calls slurm_elastic.trainer.should_stop, so no mishap can come at a step; call it after "
            "every step"
        )
    steps, first = facts.last_step, min((worker.first_step or 0 for worker in facts.rounds[0]), default=0)
    if steps is None:
        raise UsageError("the script never says at which step it is; call trainer.should_stop(step)")
    if first > 1:
        raise UsageError(
            f"the script begins with step {first}: it has found a checkpoint of an earlier training; let it keep its "
            "checkpoints in SLURM_ELASTIC_RUN_DIR, in its current directory, or below {run} in its arguments"
        )
    late = next((mishap for mishap in mishaps or () if mishap.step >= steps), None)
    if late is not None:
        raise UsageError(f"'{late}': the training ends with step {steps}; give a smaller step, or train longer")
    if mishaps is None and steps < 20:
        raise UsageError(f"the training has {steps} steps, too few for mishaps between them; let it take 20 or more")
    return steps


def _ends(planned: Plan, undisturbed: RunFacts, facts: RunFacts) -> Finding:
    codes = sorted({end.exit_code for end in facts.agents if not end.killed} - {0, 75})
    missed = len(planned.mishaps) - len(facts.happened)
    if facts.gave_up:
        text, fix = facts.gave_up, "look at the output, with --keep; slurm_elastic's --hang-timeout ends such a worker"
    elif not facts.finished:
        last = _quoted(facts.failures[-1]) if facts.failures else ""
        codes_ = f" with exit code {', '.join(map(str, codes))}" if codes else ""
        text, fix = f"the run failed{codes_}{last}", "see the rows below; --keep leaves the output and the logs"
    elif missed:
        text = f"the run ended before '{planned.mishaps[-missed]}'"
        fix = "a later round took fewer steps than the run without mishaps: see the rows below"
        began = min(first_steps(facts.rounds[0]), default=0) if facts.rounds else 0
        if began > 1:
            text = f"the run with mishaps began at step {began}: it found the checkpoints of the run without them"
            fix = "let it keep its checkpoints in SLURM_ELASTIC_RUN_DIR, in its current directory, or below {run}"
    elif (facts.last_step or 0) < (undisturbed.last_step or 0):
        return Finding(
            "run.ends",
            Level.LIMIT,
            f"the run ended after step {facts.last_step}, and after step {undisturbed.last_step} without mishaps",
            "the training is cut short, or has other steps where the number of ranks is another one",
            "load the position in the training with the checkpoint; keep the batch of the whole group the same",
        )
    else:
        return Finding("run.ends", Level.OK, "the run ended with 0 after all mishaps")
    return Finding("run.ends", Level.BROKEN, text, "the run does not survive what happens on a cluster", fix)


def _failed_workers(planned: Plan, facts: RunFacts) -> Iterator[Finding]:
    provoked = sum(happened.mishap.kind in (Kind.FAIL, Kind.HANG) for happened in facts.happened)
    charged = facts.restarts - provoked
    stopped = [worker for worker in facts.workers if worker.stop is not None]
    slow = {worker.round for worker in stopped if _too_slow(worker, facts)}
    after_stop = [worker for worker in stopped if worker.round in facts.cut_short and worker.round not in slow]
    if after_stop:
        nodes = {happened.node for happened in facts.happened if happened.round == after_stop[0].round}
        # The leaving node's workers have most likely failed: a failure elsewhere would have been charged.
        worker = next((failed for failed in after_stop if failed.node in nodes), after_stop[0])
        yield Finding(
            "worker.exit",
            Level.BROKEN,
            f"in round {worker.round} a worker that was told to stop after step {worker.last_step} did not end with 0"
            + (_quoted(facts.failures[-1]) if facts.failures else ""),
            "the agents take that for a failure: other workers are ended before they have saved, and on a node that "
            "stays it uses up --max-restarts",
            "save, leave the loop and end with exit code 0 on all ranks when should_stop returns a Stop",
            place=_short(worker.stop.place if worker.stop is not None else ""),
        )
    elif charged > 0 or not facts.finished:
        yield Finding(
            "worker.exit",
            Level.BROKEN,
            "a worker failed by itself" + (_quoted(facts.failures[-1]) if facts.failures else ""),
            "such a failure uses up --max-restarts",
            "fix what the line says; --keep leaves the logs",
        )
    else:
        yield Finding("worker.exit", Level.OK, f"{len(stopped)} workers were told to stop, and ended with 0")


def _too_slow(worker: WorkerSeen, facts: RunFacts) -> bool:
    """Return True if a worker that should stop was killed because its notice was over."""
    if worker.stop is None or worker.ended is not None:
        return False
    if worker.round not in facts.cut_short:
        return True
    for happened in facts.happened:
        if happened.round == worker.round and happened.mishap.seconds is not None:
            # Agents end workers before the deadline, at the earliest when half of the time is over.
            return facts.cut_short[worker.round] - happened.at > 0.4 * happened.mishap.seconds
    return False


def _told_to_stop(facts: RunFacts, round_: int) -> list[tuple[WorkerSeen, StopSeen]]:
    return [(worker, worker.stop) for worker in facts.workers if worker.round == round_ and worker.stop is not None]


def _resume(facts: RunFacts) -> Finding:
    changes = changes_of(facts)
    if not changes:
        return Finding("resume.step", Level.UNKNOWN, "no round followed the first one")
    for change in changes:
        in_time = change.announced and change.before not in facts.cut_short
        expected = change.last if in_time else change.checkpoint
        if change.resumed > change.last:
            return Finding(
                "resume.step",
                Level.BROKEN,
                f"after '{change.cause}' the next round began with step {change.resumed + 1}, and the last step "
                f"was {change.last}",
                "steps are left out",
                "count steps from the checkpoint",
                place=_short(change.place),
            )
        if expected is not None and change.resumed < expected:
            again = "from the beginning" if change.resumed <= 0 else f"from step {change.resumed}"
            return Finding(
                "resume.step",
                Level.BROKEN,
                f"after '{change.cause}' the script went on {again}, not from step {expected}",
                "work that was saved, or could be, is done again after every change of the nodes",
                "load the newest checkpoint at the start of the script, and save when should_stop returns a Stop",
                place=_short(change.place),
            )
        if expected is None and change.resumed <= 0 and change.last > 1:
            return Finding(
                "resume.step",
                Level.LIMIT,
                f"after '{change.cause}' the script began again; it has reported no checkpoint",
                "everything since the start is lost with a node",
                "save a checkpoint every few minutes, and call trainer.report_checkpoint(step)",
                place=_short(change.place),
            )
    froms = ", ".join(str(change.resumed) for change in changes)
    return Finding("resume.step", Level.OK, f"rounds went on from step {froms}")


def _snapshots(facts: RunFacts) -> Iterator[Finding]:
    """Take over what agents and workers have warned of: it has causes that steps do not show."""
    named: set[str] = set()
    for warning in sorted(facts.warnings, key=lambda text: _VALUE.match(text) is None):
        fact, _, fix = warning.partition("; ")
        if _UNEQUAL.search(warning):
            # The agents see that a value differs, and the workers which one.
            if named:
                continue
            fix = "give all ranks the same plain values, or pass what each rank has of its own as per_rank={...}"
        elif _PARTS.search(warning):
            fix = "keep copies on another node (--snapshot-replicas 1), and checkpoints on disk (snapshot.to_disk)"
        elif (value := _VALUE.match(warning)) is None or value[1] in named:
            continue
        else:
            named.add(value[1])
        yield Finding("snapshot.usable", Level.LIMIT, fact, "a later round does not start from this snapshot", fix)


def _because_of(warned: Sequence[Finding], finding: Finding) -> Finding:
    """Return a finding about steps with the fix of the snapshot that the script could not start from."""
    if not warned or finding.level not in (Level.LIMIT, Level.BROKEN):
        return finding
    return replace(finding, fix=f"fix the snapshot first (snapshot.usable): {warned[0].fix}")


def _lost(facts: RunFacts) -> Iterator[Finding]:
    changes = changes_of(facts)
    announced = [change for change in changes if change.announced]
    if announced:
        lost = sum(change.lost for change in announced)
        if lost:
            yield Finding(
                "steps.announced",
                Level.BROKEN,
                f"{lost} steps were taken again after {len(announced)} announced changes",
                "an announced change need not cost a step",
                "save in the same step in which should_stop returns a Stop, on all ranks, before the grace is over",
            )
        else:
            yield Finding("steps.announced", Level.OK, f"no step lost in {len(announced)} announced changes")
    others = [change for change in changes if not change.announced]
    if others:
        amounts = ", ".join(f"{change.lost} ('{change.cause}')" for change in others)
        yield Finding("steps.killed", Level.OK, f"steps lost without notice: {amounts}")


def _samples(undisturbed: RunFacts, disturbed: RunFacts) -> Finding:
    expected, seen = _counted_samples(undisturbed), _counted_samples(disturbed)
    if not expected or not seen:
        return Finding(
            "samples.once",
            Level.UNKNOWN,
            "which samples were trained on is unknown",
            "",
            "use slurm_elastic.data.ElasticSampler, or call trainer.record_samples(epoch, samples) before should_stop",
        )
    again, never = seen - expected, expected - seen
    if not again and not never:
        return Finding(
            "samples.once", Level.OK, f"all {sum(seen.values())} samples were trained on as often as they should"
        )
    return Finding(
        "samples.once",
        Level.BROKEN,
        f"{sum(again.values())} samples were trained on more often than in the undisturbed run, and "
        f"{sum(never.values())} less often",
        "the model sees other data than it should",
        "save the position in the epoch with the checkpoint: sampler.state_dict() and load_state_dict()",
        place=_short(disturbed.rounds[-1][0].saved or disturbed.rounds[-1][0].asked),
    )


def _counted_samples(facts: RunFacts) -> Counter[tuple[int, int]]:
    """Count the samples of the steps that were not taken again."""
    kept: list[tuple[int, int, int]] = []
    for round_ in facts.rounds:
        first = min(first_steps(round_), default=0)
        kept = [sample for sample in kept if sample[0] < first]
        kept += [sample for worker in round_ for sample in worker.samples]
    return Counter((epoch, number) for _, epoch, number in kept)


def _losses(undisturbed: RunFacts, disturbed: RunFacts, tolerance: float) -> Finding:
    expected, seen = losses(undisturbed), losses(disturbed)
    common = sorted(set(expected) & set(seen))
    if not common:
        return Finding(
            "losses.match",
            Level.UNKNOWN,
            "the script reports no loss",
            "",
            "call trainer.report(step, loss=...) after every step",
        )
    scale = median(abs(loss) for loss in expected.values())
    for step in common:
        difference = abs(seen[step] - expected[step])
        # A loss that is no number differs from everything.
        if not difference <= tolerance * max(abs(expected[step]), scale):
            return Finding(
                "losses.match",
                Level.BROKEN,
                f"at step {step} the loss is {seen[step]:.6g}, and {expected[step]:.6g} without mishaps",
                "the model is not trained as it would be without mishaps",
                "load all of the state: model, optimizer, scheduler, position of the data; keep the batch of the whole "
                "group the same at every number of ranks; if more is right for you, raise --tolerance",
            )
    worst = max(abs(seen[step] - expected[step]) for step in common)
    return Finding("losses.match", Level.OK, f"losses of {len(common)} steps differ by {worst:.2g} at most")


def _saving(facts: RunFacts) -> Iterator[Finding]:
    """Judge how long workers took from the answer to stop to their end, against the notice."""
    worst: Finding | None = None
    for happened in facts.happened:
        notice = happened.mishap.seconds
        if notice is None:
            continue
        for worker, stop in _told_to_stop(facts, happened.round):
            seconds = None if worker.ended is None else worker.ended - stop.at
            place = _short(worker.saved or stop.place)
            if seconds is None and not _too_slow(worker, facts):
                continue
            if seconds is None:
                yield Finding(
                    "save.grace",
                    Level.BROKEN,
                    f"rank {worker.rank} was killed before it had ended: {notice:g} s of notice were too short",
                    "the checkpoint is lost, and with it all steps since the one before",
                    "save faster: less state, sharded, or in memory (slurm_elastic.snapshot); or ask the site for a "
                    "longer grace",
                    place=place,
                )
                return
            text = f"saving and ending took {seconds:.1f} s of {notice:g} s of notice"
            if seconds > notice / 2:
                fix = "save faster, or ask the site for a longer grace"
                why = "a busy file system makes that too long"
                worst = Finding("save.grace", Level.LIMIT, text, why, fix, place=place)
            elif worst is None:
                worst = Finding("save.grace", Level.OK, text)
    if worst is not None:
        yield worst


def _asked(planned: Plan, undisturbed: RunFacts, disturbed: RunFacts) -> Finding:
    for happened in disturbed.happened:
        if happened.mishap.announced and not _told_to_stop(disturbed, happened.round):
            return Finding(
                "stop.asked",
                Level.BROKEN,
                f"'{happened.mishap}': no worker was told to stop at a step",
                "the workers were ended without notice",
                "call should_stop on all ranks, equally often",
                place=_short(next((worker.asked for worker in disturbed.workers if worker.asked), "")),
            )
    notice = min((mishap.seconds for mishap in planned.mishaps if mishap.seconds is not None), default=GRACE)
    worker = max((*undisturbed.workers, *disturbed.workers), key=lambda candidate: candidate.pause)
    text = f"should_stop is called at least every {worker.pause:.2g} s"
    if worker.pause <= notice / 2:
        return Finding("stop.asked", Level.OK, text)
    return Finding(
        "stop.asked",
        Level.BROKEN if worker.pause > notice else Level.LIMIT,
        f"{worker.pause:.1f} s passed between two calls of should_stop, with {notice:g} s of notice",
        "a stop waits for the next call",
        "call it after every step, and in long evaluations, too",
        place=_short(worker.asked),
    )


def _files(undisturbed: RunFacts, disturbed: RunFacts) -> Finding:
    check, why = "checkpoint.atomic", "a node that is killed while it saves leaves half a checkpoint"
    saved = _short(next((worker.saved for worker in disturbed.workers if worker.saved), ""))
    paths = sorted({*undisturbed.overwritten, *disturbed.overwritten})
    if paths:
        return Finding(
            check,
            Level.BROKEN,
            f"overwritten in place: {', '.join(paths[:5])}",
            f"{why}, and the one before is gone, too",
            "write a file of another name and rename it: os.replace(temporary, final)",
            place=saved,
        )
    taken = [name for round_, name in disturbed.halves.items() if not is_left_out(round_, disturbed)]
    if taken:
        return Finding(
            check,
            Level.BROKEN,
            f"the script does not go on from an older checkpoint beside half of {taken[0]}",
            f"{why}, which has its name already",
            "write a file or directory of another name and rename it when it is complete; or load the newest one whose "
            "last file is there",
            place=saved,
        )
    left_out = "".join(f"; half of {name} was left out" for name in disturbed.halves.values())
    return Finding(check, Level.OK, f"no file was overwritten in place{left_out}")


def _superseded(facts: RunFacts) -> Iterator[Finding]:
    """Judge whether a group that was paused has replaced the checkpoint of the one that took its place."""
    woken = [worker for worker in facts.workers if worker.woken]
    for worker in woken:
        if worker.late:
            yield Finding(
                "checkpoint.superseded",
                Level.BROKEN,
                f"rank {worker.rank} was paused, others took its place and saved; then it reported a checkpoint "
                f"of step {worker.late[-1]} over theirs",
                "steps that others have taken are lost, and the run goes back",
                "ask trainer.can_publish_checkpoint() right before the new checkpoint gets its name",
                place=_short(worker.saved),
            )
            return
    if woken and any(worker.checkpoints for worker in facts.workers):
        yield Finding("checkpoint.superseded", Level.OK, "a group that was paused has replaced no newer checkpoint")
    elif woken:
        yield Finding(
            "checkpoint.superseded",
            Level.UNKNOWN,
            "the script reports no checkpoints",
            "",
            "call trainer.report_checkpoint(step) when a checkpoint has its name",
        )


def _processes(undisturbed: RunFacts, disturbed: RunFacts) -> Finding:
    left = (*undisturbed.left, *disturbed.left)
    if not left:
        return Finding("processes.left", Level.OK, "no process stayed")
    return Finding(
        "processes.left",
        Level.LIMIT,
        f"{len(left)} processes stayed: {', '.join(left[:3])}",
        "they take memory, GPUs and ports from the next round",
        "end what the script starts",
    )


def _short(place: str) -> str:
    file, _, line = place.rpartition(":")
    return f"{PurePath(file).name}:{line}" if file else place


def _quoted(text: str) -> str:
    return f" ({' '.join(text.split())})" if text else ""
