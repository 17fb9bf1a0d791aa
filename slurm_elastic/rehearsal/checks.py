"""The findings of a rehearsal, from what was seen of the run without mishaps and of the run with them. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath
from statistics import median

from slurm_elastic.errors import UsageError
from slurm_elastic.finding import Check, Finding, Level
from slurm_elastic.rehearsal.facts import RunFacts, WorkerSeen, changes_of, counted, first_steps, losses
from slurm_elastic.rehearsal.scenario import GRACE, Kind, Mishap, Plan

_GPU = re.compile(r"CUDA|NVIDIA|\bGPU|HIP|nccl", re.IGNORECASE)
_VALUE = re.compile(r"`(.*)`: ranks \d+ and \d+ differ")
_UNEQUAL = re.compile(r"^step \d+ of round \d+ is not the same on ")
_PARTS = re.compile(r"^no agent that is left holds part ")


def findings(planned: Plan, undisturbed: RunFacts, disturbed: RunFacts, tolerance: float) -> list[Finding]:
    """Judge a rehearsal, whose run without mishaps has ended well."""
    warned = list(_snapshots(disturbed))
    found = (
        _ends(planned, undisturbed, disturbed),
        _failed_workers(disturbed),
        *warned,
        *(_because_of(warned, finding) for finding in (_resume(disturbed), *_lost(disturbed))),
        _samples(undisturbed, disturbed),
        _losses(undisturbed, disturbed, tolerance),
        *_saving(disturbed),
        _asked(planned, undisturbed, disturbed),
        _files(undisturbed, disturbed),
        *_superseded(disturbed),
        _processes(undisturbed, disturbed),
    )
    return [replace(finding, place=_short(finding.place)) for finding in found]


def require_comparable(facts: RunFacts, mishaps: Sequence[Mishap] | None) -> int:
    """Return the number of steps of the run without mishaps; raises UsageError if it cannot be rehearsed with these."""
    why = _last_failure(facts)
    if facts.gave_up:
        raise UsageError(f"without any mishap {facts.gave_up}{why}; fix the script, or raise --timeout")
    if not facts.finished:
        fix = "fix it; it runs in an empty directory, and --link makes files visible there"
        if _GPU.search(why):
            fix = "rehearse it where there are GPUs, one for each worker at least, or let it train on a CPU, too"
        raise UsageError(f"the script fails without any mishap{why}; {fix}")
    if not facts.rounds:
        raise UsageError(
            "the script never calls slurm_elastic.trainer.should_stop, so no mishap can come at a step; call it after "
            "every step"
        )
    steps, first = facts.last_step, min(first_steps(facts.rounds[0]), default=0)
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
    check = Check("run.ends")
    missed = len(planned.mishaps) - len(facts.happened)
    if facts.gave_up:
        text, fix = facts.gave_up, "look at the output, with --keep; slurm_elastic's --hang-timeout ends such a worker"
    elif not facts.finished:
        text = f"the run failed{_last_failure(facts)}"
        fix = "see the rows below; --keep leaves the output and the logs"
    elif missed:
        text = f"the run ended before '{planned.mishaps[-missed]}'"
        fix = "a later round took fewer steps than the run without mishaps: see the rows below"
        began = min(first_steps(facts.rounds[0]), default=0) if facts.rounds else 0
        if began > 1:
            text = f"the run with mishaps began at step {began}: it found the checkpoints of the run without them"
            fix = "let it keep its checkpoints in SLURM_ELASTIC_RUN_DIR, in its current directory, or below {run}"
    elif (facts.last_step or 0) < (undisturbed.last_step or 0):
        found = f"the run ended after step {facts.last_step}, and after step {undisturbed.last_step} without mishaps"
        why = "the training is cut short, or has other steps where the number of ranks is another one"
        fix = "load the position in the training with the checkpoint; keep the batch of the whole group the same"
        return check.limit(found, why, fix)
    else:
        return check.ok("the run ended with 0 after all mishaps")
    return check.broken(text, "the run does not survive what happens on a cluster", fix)


def _failed_workers(facts: RunFacts) -> Finding:
    check = Check("worker.exit")
    provoked = sum(happened.mishap.kind in (Kind.FAIL, Kind.HANG) for happened in facts.happened)
    stopped = [worker for worker in facts.workers if worker.stop is not None]
    slow = {worker.round for worker in stopped if _too_slow(worker, facts)}
    after_stop = [worker for worker in stopped if worker.round in facts.cut_short and worker.round not in slow]
    if after_stop:
        worker = after_stop[0]
        told = f"in round {worker.round} a worker that was told to stop after step {worker.last_step}"
        return check.broken(
            f"{told} did not end with 0{_last_failure(facts)}",
            "the agents take that for a failure: other workers are ended before they have saved, and on a node that "
            "stays it uses up --max-restarts",
            "save, leave the loop and end with exit code 0 on all ranks when should_stop returns a Stop",
            place=worker.asked,
        )
    if facts.restarts > provoked or not facts.finished:
        why = "such a failure uses up --max-restarts"
        fix = "fix what the line says; --keep leaves the logs"
        return check.broken(f"a worker failed by itself{_last_failure(facts)}", why, fix)
    return check.ok(f"{len(stopped)} workers were told to stop, and ended with 0")


def _too_slow(worker: WorkerSeen, facts: RunFacts) -> bool:
    """Return True if a worker that was told to stop was killed because its notice was over."""
    killed = facts.cut_short.get(worker.round)
    if worker.ended is not None or killed is None:
        return worker.ended is None
    # Agents end workers before the deadline, at the earliest when half of the time is over.
    notices = [(one.at, one.mishap.seconds) for one in facts.happened if one.round == worker.round]
    return any(seconds is not None and killed - at > 0.4 * seconds for at, seconds in notices)


def _resume(facts: RunFacts) -> Finding:
    check, changes = Check("resume.step"), changes_of(facts)
    if not changes:
        return check.unknown("no round followed the first one")
    for change in changes:
        in_time = change.announced and change.before not in facts.cut_short
        expected = change.last if in_time else change.checkpoint
        after = f"after '{change.cause}' the"
        if change.resumed > change.last:
            fact = f"{after} next round began with step {change.resumed + 1}, and the last step was {change.last}"
            return check.broken(fact, "steps are left out", "count steps from the checkpoint", place=change.place)
        if expected is not None and change.resumed < expected:
            again = "from the beginning" if change.resumed <= 0 else f"from step {change.resumed}"
            found = f"{after} script went on {again}, not from step {expected}"
            why = "work that was saved, or could be, is done again after every change of the nodes"
            fix = "load the newest checkpoint at the start of the script, and save when should_stop returns a Stop"
            return check.broken(found, why, fix, place=change.place)
        if expected is None and change.resumed <= 0 and change.last > 1:
            found = f"{after} script began again; it has reported no checkpoint"
            why = "everything since the start is lost with a node"
            fix = "save a checkpoint every few minutes, and call trainer.report_checkpoint(step)"
            return check.limit(found, why, fix, place=change.place)
    return check.ok(f"rounds went on from step {', '.join(str(change.resumed) for change in changes)}")


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
        yield Check("snapshot.usable").limit(fact, "a later round does not start from this snapshot", fix)


def _because_of(warned: Sequence[Finding], finding: Finding) -> Finding:
    """Return a finding about steps with the fix of the snapshot that the script could not start from."""
    if not warned or finding.level not in (Level.LIMIT, Level.BROKEN):
        return finding
    return replace(finding, fix=f"fix the snapshot first (snapshot.usable): {warned[0].fix}")


def _lost(facts: RunFacts) -> Iterator[Finding]:
    check, changes = Check("steps.announced"), changes_of(facts)
    announced = [change for change in changes if change.announced]
    lost, number = sum(change.lost for change in announced), f"{len(announced)} announced changes"
    if lost:
        why = "an announced change need not cost a step"
        fix = "save in the same step in which should_stop returns a Stop, on all ranks, before the grace is over"
        yield check.broken(f"{lost} steps were taken again after {number}", why, fix)
    elif announced:
        yield check.ok(f"no step lost in {number}")
    others = [change for change in changes if not change.announced]
    if others:
        amounts = ", ".join(f"{change.lost} ('{change.cause}')" for change in others)
        yield Check("steps.killed").ok(f"steps lost without notice: {amounts}")


def _samples(undisturbed: RunFacts, disturbed: RunFacts) -> Finding:
    check, expected, seen = Check("samples.once"), _counted_samples(undisturbed), _counted_samples(disturbed)
    if not expected or not seen:
        use = "use slurm_elastic.data.ElasticSampler, or call trainer.record_samples(epoch, samples) before should_stop"
        return check.unknown("which samples were trained on is unknown", fix=use)
    again, never = (seen - expected).total(), (expected - seen).total()
    if not again and not never:
        return check.ok(f"all {seen.total()} samples were trained on as often as they should")
    found = f"{again} samples were trained on more often than in the undisturbed run, and {never} less often"
    why = "the model sees other data than it should"
    fix = "save the position in the epoch with the checkpoint: sampler.state_dict() and load_state_dict()"
    return check.broken(found, why, fix, place=disturbed.rounds[-1][0].saved or disturbed.rounds[-1][0].asked)


def _counted_samples(facts: RunFacts) -> Counter[tuple[int, int]]:
    return Counter((epoch, number) for _, epoch, number in counted(facts, lambda worker: worker.samples))


def _losses(undisturbed: RunFacts, disturbed: RunFacts, tolerance: float) -> Finding:
    check, expected, seen = Check("losses.match"), losses(undisturbed), losses(disturbed)
    differences = {step: abs(seen[step] - expected[step]) for step in sorted(expected.keys() & seen.keys())}
    if not differences:
        return check.unknown("the script reports no loss", fix="call trainer.report(step, loss=...) after every step")
    scale = median(abs(loss) for loss in expected.values())
    for step, difference in differences.items():
        # A loss that is no number differs from everything.
        if not difference <= tolerance * max(abs(expected[step]), scale):
            return check.broken(
                f"at step {step} the loss is {seen[step]:.6g}, and {expected[step]:.6g} without mishaps",
                "the model is not trained as it would be without mishaps",
                "load all of the state: model, optimizer, scheduler, position of the data; keep the batch of the whole "
                "group the same at every number of ranks; if more is right for you, raise --tolerance",
            )
    return check.ok(f"losses of {len(differences)} steps differ by {max(differences.values()):.2g} at most")


def _saving(facts: RunFacts) -> list[Finding]:
    """Judge how long workers took from the answer to stop to their end, against the notice."""
    check = Check("save.grace")
    worst: list[Finding] = []
    for happened in facts.happened:
        notice = happened.mishap.seconds
        for worker in facts.workers:
            if notice is None or worker.round != happened.round or worker.stop is None:
                continue
            place = worker.saved or worker.asked
            if worker.ended is None:
                if not _too_slow(worker, facts):
                    continue
                fact = f"rank {worker.rank} was killed before it had ended: {notice:g} s of notice were too short"
                why = "the checkpoint is lost, and with it all steps since the one before"
                fix = "save faster: less state, sharded, or in memory (slurm_elastic.snapshot)"
                return [check.broken(fact, why, f"{fix}; or ask the site for a longer grace", place=place)]
            seconds = worker.ended - worker.stop
            text = f"saving and ending took {seconds:.1f} s of {notice:g} s of notice"
            if seconds > notice / 2:
                fix = "save faster, or ask the site for a longer grace"
                worst = [check.limit(text, "a busy file system makes that too long", fix, place=place)]
            elif not worst:
                worst = [check.ok(text)]
    return worst


def _asked(planned: Plan, undisturbed: RunFacts, disturbed: RunFacts) -> Finding:
    check = Check("stop.asked")
    for happened in disturbed.happened:
        stopped = (worker.stop is not None for worker in disturbed.workers if worker.round == happened.round)
        if happened.mishap.announced and not any(stopped):
            return check.broken(
                f"'{happened.mishap}': no worker was told to stop at a step",
                "the workers were ended without notice",
                "call should_stop on all ranks, equally often",
                place=next((worker.asked for worker in disturbed.workers if worker.asked), ""),
            )
    notice = min((mishap.seconds for mishap in planned.mishaps if mishap.seconds is not None), default=GRACE)
    worker = max((*undisturbed.workers, *disturbed.workers), key=lambda candidate: candidate.pause)
    if worker.pause <= notice / 2:
        return check.ok(f"should_stop is called at least every {worker.pause:.2g} s")
    fact = f"{worker.pause:.1f} s passed between two calls of should_stop, with {notice:g} s of notice"
    judge = check.broken if worker.pause > notice else check.limit
    fix = "call it after every step, and in long evaluations, too"
    return judge(fact, "a stop waits for the next call", fix, place=worker.asked)


def _files(undisturbed: RunFacts, disturbed: RunFacts) -> Finding:
    check, why = Check("checkpoint.atomic"), "a node that is killed while it saves leaves half a checkpoint"
    saved = next((worker.saved for worker in disturbed.workers if worker.saved), "")
    paths = sorted({*undisturbed.overwritten, *disturbed.overwritten})
    if paths:
        why = f"{why}, and the one before is gone, too"
        fix = "write a file of another name and rename it: os.replace(temporary, final)"
        return check.broken(f"overwritten in place: {', '.join(paths[:5])}", why, fix, place=saved)
    # After these rounds the next one went on from the newest whole checkpoint.
    passed = {change.before for change in changes_of(disturbed) if change.resumed >= (change.checkpoint or 0)}
    taken = [name for round_, name in disturbed.halves.items() if round_ not in passed]
    if taken:
        return check.broken(
            f"the script does not go on from an older checkpoint beside half of {taken[0]}",
            f"{why}, which has its name already",
            "write a file or directory of another name and rename it when it is complete; or load the newest one whose "
            "last file is there",
            place=saved,
        )
    left_out = "".join(f"; half of {name} was left out" for name in disturbed.halves.values())
    return check.ok(f"no file was overwritten in place{left_out}")


def _superseded(facts: RunFacts) -> Iterator[Finding]:
    """Judge whether a group that was paused has replaced the checkpoint of the one that took its place."""
    check, woken = Check("checkpoint.superseded"), [worker for worker in facts.workers if worker.woken]
    late = next((worker for worker in woken if worker.late), None)
    if late is not None:
        yield check.broken(
            f"rank {late.rank} was paused, others took its place and saved; then it reported a checkpoint of step "
            f"{late.late[-1]} over theirs",
            "steps that others have taken are lost, and the run goes back",
            "ask trainer.can_publish_checkpoint() right before the new checkpoint gets its name",
            place=late.saved,
        )
    elif woken and any(worker.checkpoints for worker in facts.workers):
        yield check.ok("a group that was paused has replaced no newer checkpoint")
    elif woken:
        fix = "call trainer.report_checkpoint(step) when a checkpoint has its name"
        yield check.unknown("the script reports no checkpoints", fix=fix)


def _processes(undisturbed: RunFacts, disturbed: RunFacts) -> Finding:
    check, left = Check("processes.left"), (*undisturbed.left, *disturbed.left)
    if not left:
        return check.ok("no process stayed")
    fact = f"{len(left)} processes stayed: {', '.join(left[:3])}"
    return check.limit(fact, "they take memory, GPUs and ports from the next round", "end what the script starts")


def _short(place: str) -> str:
    file, _, line = place.rpartition(":")
    return f"{PurePath(file).name}:{line}" if file else place


def _last_failure(facts: RunFacts) -> str:
    """Return the last failure of a worker in brackets, without a full stop at its end; empty if there is none."""
    words = " ".join(facts.failure.rstrip(".").split())
    return f" ({words})" if words else ""
