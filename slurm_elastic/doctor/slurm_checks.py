"""Checks of Slurm's configuration: pure functions of its answers.

Sources: slurm.conf(5) and preempt.html, Slurm 22.05 to 26.05.
"""

from __future__ import annotations

from collections.abc import Iterator

from slurm_elastic.doctor.facts import SiteFacts
from slurm_elastic.finding import Finding, Level
from slurm_elastic.rendezvous.options import RendezvousOptions
from slurm_elastic.slurm import NEWEST_RELEASE, OLDEST_RELEASE, ClusterConfig, PartitionView

_CRED_EXPIRE = 120
"""Default of AuthInfo's cred_expire in seconds: a requeued job waits until credentials of its last start are void."""
_SLOW_SLURMD = 600
_SHORT_LIMIT = 600
"""Seconds of a time limit below which most of a job is its start and its end."""


def slurm_findings(site: SiteFacts) -> Iterator[Finding]:
    """Judge what Slurm's controller has said."""
    config = site.slurm.config
    if config is None:
        yield Finding(
            "slurm.controller",
            Level.BROKEN,
            "scontrol gets no answer from slurmctld",
            "jobs cannot be submitted, and agents do not learn why they are signalled",
            "run `scontrol ping`; on a machine of the cluster with slurmctld up it says UP",
        )
        return
    yield _release(config)
    # Of several Slurm tells the one that a job has got.
    partition = next(iter(site.slurm.chosen(site.partition)), None)
    if partition is not None:
        yield _state(partition)
        yield _preemption(site, config, partition)
        yield _grace(site, config, partition)
        yield _time_limit(partition)
    else:
        yield Finding(
            "slurm.partition",
            Level.UNKNOWN,
            "there is no default partition",
            "what preemption and time limits mean for runs depends on the partition",
            "name one by --partition",
        )
    yield _kill_wait(config)
    yield _requeue(config)
    yield _requeue_delay(config)
    yield _proctrack(config)
    yield _slurmd_timeout(config)
    yield _unkillable(config)
    yield _user_signal(config)
    yield _bad_exit(config)
    yield _memory_accounting(config)
    yield _submit_limits(site)
    yield _topology(config)


def save_seconds(grace: float) -> float:
    """Return the seconds of a grace in which workers can save; the agent needs the rest."""
    return grace - min(RendezvousOptions().leave_margin, grace / 2)


def _release(config: ClusterConfig) -> Finding:
    text = config.text("SLURM_VERSION")
    numbers = tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
    check, tested = "slurm.release", "{}.{:02d} to {}.{:02d}".format(*OLDEST_RELEASE, *NEWEST_RELEASE)
    if len(numbers) == 2 and numbers < OLDEST_RELEASE:
        return Finding(
            check,
            Level.LIMIT,
            text,
            "agents may misread why a job has to end, and not requeue it",
            f"update Slurm; the tested releases are {tested}",
        )
    if numbers[:2] > NEWEST_RELEASE:
        return Finding(
            check, Level.UNKNOWN, text, f"the tested releases are {tested}", "look for a newer release of slurm_elastic"
        )
    return Finding(check, Level.OK, text, f"the tested releases are {tested}")


def _submit_limits(site: SiteFacts) -> Finding:
    limits = "; ".join(site.slurm.submit_limits) or "none is known"
    return Finding("slurm.submit_limits", Level.OK, limits, "jobs of slurm-elastic grow count, also while they wait")


def _topology(config: ClusterConfig) -> Finding:
    check, plugin = "slurm.topology", config.text("TopologyPlugin")
    if plugin in ("topology/tree", "topology/block"):
        domains = "switch" if plugin == "topology/tree" else "block"
        why = f"ranks of a {domains} are in a row, and copies of snapshots go to another {domains}"
        return Finding(check, Level.OK, plugin, why)
    why = "Slurm tells no failure domains: ranks are in its order of nodes, copies of snapshots go to the next node"
    return Finding(check, Level.OK, plugin or "none", f"{why}; where racks fail, --failure-domain names them")


def _state(partition: PartitionView) -> Finding:
    check, fact = "slurm.partition", f"{partition.name}: {partition.state}, {partition.nodes} nodes"
    if partition.state != "UP" or not partition.nodes:
        return Finding(
            check, Level.BROKEN, fact, "no job of this partition starts", "choose another one by --partition"
        )
    return Finding(check, Level.OK, fact)


def _preempt_mode(site: SiteFacts, config: ClusterConfig, partition: PartitionView) -> str:
    """Return the mode in which Slurm preempts jobs of the user here: REQUEUE, CANCEL, SUSPEND or OFF."""
    kind = config.text("PreemptType")
    if kind in ("", "preempt/none"):
        return "OFF"
    mode = config.text("PreemptMode").upper()
    if kind == "preempt/qos":
        mode = next((qos.preempt_mode for qos in site.slurm.qos if qos.name == site.qos and qos.preempt_mode), mode)
    elif partition.preempt_mode:
        mode = partition.preempt_mode.upper()
    # GANG and WITHIN come beside the mode itself: GANG,SUSPEND.
    words = [word for word in mode.replace("+", ",").split(",") if word not in ("GANG", "WITHIN", "PRIORITY")]
    return words[0] if words else "OFF"


def _preemption(site: SiteFacts, config: ClusterConfig, partition: PartitionView) -> Finding:
    check, mode = "slurm.preemption", _preempt_mode(site, config, partition)
    fact = f"{config.text('PreemptType') or 'preempt/none'}, partition {partition.name}: {mode}"
    if mode == "OFF":
        return Finding(
            check,
            Level.OK,
            fact,
            "Slurm takes no node from a job here; runs shrink by lost nodes, time limits and drain only",
        )
    if mode == "SUSPEND":
        return Finding(
            check,
            Level.LIMIT,
            fact,
            "Slurm stops a preempted job without notice and keeps its memory; in an array the others go on without it",
            "ask for PreemptMode=REQUEUE, or submit to a partition that is not preempted",
        )
    if mode == "CANCEL":
        return Finding(
            check,
            Level.LIMIT,
            fact,
            "a preempted allocation.sbatch is over; a preempted element of array.sbatch does not come back",
            "ask for PreemptMode=REQUEUE; until then submit again after a preemption, with the same --run-id",
        )
    return Finding(
        check,
        Level.OK,
        fact,
        "a preempted allocation.sbatch saves, waits and starts again as a whole; of array.sbatch single elements do",
    )


def _grace_seconds(site: SiteFacts, config: ClusterConfig, partition: PartitionView) -> tuple[str, int] | None:
    """Return whose GraceTime counts, and the seconds; None where it is that of a QOS that is not known."""
    if config.text("PreemptType") != "preempt/qos":
        return f"partition {partition.name}", partition.grace
    own_qos = next((qos for qos in site.slurm.qos if qos.name == site.qos), None)
    return (f"QOS {own_qos.name}", own_qos.grace) if own_qos else None


def _grace(site: SiteFacts, config: ClusterConfig, partition: PartitionView) -> Finding:
    check = "slurm.grace"
    if _preempt_mode(site, config, partition) in ("OFF", "SUSPEND"):
        return Finding(check, Level.OK, "no grace, as no job is told to end by preemption")
    grace = _grace_seconds(site, config, partition)
    if grace is None:
        graces = ", ".join(f"{qos.name} {qos.grace} s" for qos in site.slurm.qos) or "none is known"
        return Finding(
            check,
            Level.UNKNOWN,
            f"that of the job's QOS: {graces}",
            "a preempted job has this time to save",
            "name the QOS by --qos",
        )
    name, seconds = grace
    kill_wait = config.number("KillWait") or 0
    notice = seconds or kill_wait
    usable = save_seconds(notice)
    fact = f"{name}: {seconds} s"
    from_where = f"KillWait, {kill_wait} s" if not seconds else f"{seconds} s"
    # In an allocation and in an array alike; they differ in who has to save.
    why = f"a preempted job has {from_where} from the notice to SIGKILL, and its workers {usable:g} s of it to save"
    needed = site.checkpoint
    if needed is not None:
        fact += f"; a checkpoint takes {needed:g} s"
    elif site.last_stop is not None:
        needed = site.last_stop.seconds
        fact += f"; the last checkpoint of run {site.last_stop.run} took {needed:g} s, with the end of its workers"
    if needed is not None and needed > usable:
        return Finding(
            check,
            Level.LIMIT,
            fact,
            f"{why}: too little for a checkpoint of {needed:g} s, so each preemption loses the steps "
            "since the last one",
            f"save faster or at shorter intervals, or ask for a GraceTime of {_grace_for(needed):g} s",
        )
    if not seconds and needed is None:
        return Finding(
            check,
            Level.LIMIT,
            fact,
            why,
            "give the doctor --checkpoint SECONDS to see whether that is enough, or ask for a GraceTime",
        )
    return Finding(check, Level.OK, fact, why)


def _grace_for(checkpoint: float) -> float:
    """Return the grace in which a checkpoint fits."""
    return checkpoint + min(RendezvousOptions().leave_margin, checkpoint)


def _time_limit(partition: PartitionView) -> Finding:
    check, saves = "slurm.time_limit", "jobs save shortly before their time limit, and are requeued"
    most, default = partition.max_time, partition.default_time
    fact = f"{partition.name}: without --time {_time(default)}, MaxTime {_time(most)}"
    if most is not None and most < _SHORT_LIMIT:
        return Finding(
            check,
            Level.LIMIT,
            fact,
            f"{saves}: start and end are most of their time",
            "choose a partition with a longer MaxTime",
        )
    if default is not None and default < _SHORT_LIMIT:
        return Finding(
            check,
            Level.LIMIT,
            fact,
            saves,
            "give --time",
        )
    return Finding(check, Level.OK, fact, saves)


def _time(seconds: int | None) -> str:
    if seconds is None:
        return "no limit"
    return f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds / 60:g} min"


def _kill_wait(config: ClusterConfig) -> Finding:
    seconds = config.number("KillWait") or 0
    return Finding(
        "slurm.kill_wait",
        Level.OK,
        f"{seconds} s",
        f"after SIGTERM at a time limit or scancel, Slurm kills a job {seconds} s later; the batch scripts have "
        "their warning before that",
    )


def _requeue(config: ClusterConfig) -> Finding:
    check, allowed = "slurm.requeue", config.number("JobRequeue") != 0
    most = config.number("MaxBatchRequeue")
    fact = f"JobRequeue={int(allowed)}" + (f", MaxBatchRequeue={most}" if most is not None else "")
    why = (
        "the batch scripts ask for --requeue themselves; agents requeue by scontrol, which MaxBatchRequeue does "
        "not count"
    )
    if not allowed:
        why = "the batch scripts ask for --requeue, which counts more; a script of your own needs it, too"
    return Finding(check, Level.OK, fact, why)


def _requeue_delay(config: ClusterConfig) -> Finding:
    text = config.parameters("AuthInfo").get("cred_expire", "")
    seconds = int(text) if text.isdigit() else _CRED_EXPIRE
    expedited = "enable_expedited_requeue" in config.parameters("SlurmctldParameters")
    beside = "; `--requeue=expedite` is allowed" if expedited else ""
    return Finding(
        "slurm.requeue_delay",
        Level.OK,
        f"{seconds + 1} s{beside}",
        f"a requeued job can start {seconds + 1} s later at the earliest (AuthInfo, cred_expire)",
    )


def _proctrack(config: ClusterConfig) -> Finding:
    check, kind = "slurm.proctrack", config.text("ProctrackType")
    name = kind.rpartition("/")[2]
    if name == "pgid":
        return Finding(
            check,
            Level.LIMIT,
            kind,
            "Slurm does not find processes that leave the process group of their task, and leaves them on the node",
            "ask for ProctrackType=proctrack/cgroup",
        )
    if name == "linuxproc":
        return Finding(
            check,
            Level.OK,
            kind,
            "Slurm signals workers and the batch script, too: workers that use the trainer API are not disturbed, "
            "others end on the notice itself",
        )
    return Finding(check, Level.OK, kind, "Slurm signals agents only, and they tell their workers")


def _memory_accounting(config: ClusterConfig) -> Finding:
    kind, parameters = config.text("JobAcctGatherType"), config.parameters("JobAcctGatherParams")
    settings = (kind or "none", config.text("JobAcctGatherParams"))
    check, fact = "slurm.memory_accounting", ", ".join(filter(None, settings))
    if "overmemorykill" in parameters and kind.endswith("/linux") and not parameters.keys() & {"usepss", "noshared"}:
        return Finding(
            check,
            Level.LIMIT,
            fact,
            "Slurm ends jobs by the sum of what their processes use, and counts memory that processes share, such as "
            "snapshots and what workers share with the process that has forked them, once for each of them",
            "ask for UsePss in JobAcctGatherParams, or for more memory by --mem",
        )
    return Finding(check, Level.OK, fact, "jobs are not ended for memory that their processes share")


def _slurmd_timeout(config: ClusterConfig) -> Finding:
    check, seconds = "slurm.slurmd_timeout", config.number("SlurmdTimeout")
    if not seconds:
        return Finding(
            check,
            Level.LIMIT,
            "0: never",
            "the run goes on without a lost node after seconds, but Slurm does not take it from the job, and a job "
            "whose first node was lost does not end by Slurm's doing",
            "ask for SlurmdTimeout=300",
        )
    why = f"the run goes on without a lost node after seconds; Slurm takes it from the job after {seconds} s"
    if seconds > _SLOW_SLURMD:
        return Finding(check, Level.LIMIT, f"{seconds} s", why, "ask for SlurmdTimeout=300")
    return Finding(check, Level.OK, f"{seconds} s", why)


def _unkillable(config: ClusterConfig) -> Finding:
    check, seconds = "slurm.unkillable_step", config.number("UnkillableStepTimeout")
    message = config.number("MessageTimeout") or 10
    if seconds is None:
        return Finding(check, Level.UNKNOWN, "not printed by scontrol")
    why = f"Slurm drains a node whose processes are not gone {seconds} s after SIGKILL"
    # slurm.conf(5): "should be at least 5 times larger than MessageTimeout".
    if seconds < 5 * message:
        return Finding(
            check,
            Level.LIMIT,
            f"{seconds} s",
            f"{why}, as when a GPU driver or a file system is slow; preempted nodes may not come back",
            f"ask for UnkillableStepTimeout of at least {5 * message}, five times MessageTimeout",
        )
    return Finding(check, Level.OK, f"{seconds} s", why)


def _user_signal(config: ClusterConfig) -> Finding:
    check = "slurm.send_user_signal"
    is_set = "preempt_send_user_signal" in config.parameters(
        "SlurmctldParameters"
    ) or "send_user_signal" in config.parameters("PreemptParameters")
    if is_set:
        return Finding(
            check,
            Level.OK,
            "on",
            "a preempted job gets the signal of --signal in place of SIGTERM: agents ask scontrol which of both it "
            "is, so it has to answer on the nodes",
        )
    return Finding(
        check, Level.OK, "off", "preempted jobs get SIGTERM, and the signal of --signal means the time limit"
    )


def _bad_exit(config: ClusterConfig) -> Finding:
    value = config.number("KillOnBadExit") or 0
    return Finding(
        "slurm.kill_on_bad_exit",
        Level.OK,
        str(value),
        "the batch scripts start agents with --kill-on-bad-exit=0; an srun of your own needs it"
        + (" here" if value else ", too"),
    )
