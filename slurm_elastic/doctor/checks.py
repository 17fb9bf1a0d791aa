"""All checks, and those of Slurm's configuration, the run directory and etcd: pure functions of gathered facts.

Sources: slurm.conf(5) and preempt.html, Slurm 22.05 to 26.05.
"""

from __future__ import annotations

from collections.abc import Iterator

from slurm_elastic.doctor.facts import SiteFacts
from slurm_elastic.doctor.node_checks import network_findings, node_findings
from slurm_elastic.finding import Check, Finding
from slurm_elastic.rendezvous.options import RendezvousOptions
from slurm_elastic.slurm import NEWEST_RELEASE, OLDEST_RELEASE, ClusterConfig, PartitionView, QosView, compress
from slurm_elastic.text import duration_text, size_text

_CRED_EXPIRE = 120
"""Default of AuthInfo's cred_expire in seconds: a requeued job waits until credentials of its last start are void."""
_SLOW_SLURMD = 600
_SHORT_LIMIT = 600
"""Seconds of a time limit below which most of a job is its start and its end."""
_LOCAL_FILESYSTEMS = frozenset({"btrfs", "ext2", "ext3", "ext4", "overlay", "ramfs", "tmpfs", "xfs", "zfs"})
_LITTLE_SPACE = 1 << 30
_SLOW_RECORD = 1.0
_SLOW_WRITE = 50e6


def findings(site: SiteFacts) -> list[Finding]:
    """Return what there is to say about a site, in the order of its table."""
    return [*_slurm(site), *_run_dir(site), *node_findings(site), *network_findings(site), *_etcd(site)]


def _slurm(site: SiteFacts) -> Iterator[Finding]:
    config = site.slurm.config
    if config is None:
        why = "jobs cannot be submitted, and agents do not learn why they are signalled"
        fix = "run `scontrol ping`; on a machine of the cluster with slurmctld up it says UP"
        yield Check("slurm.controller").broken("scontrol gets no answer from slurmctld", why, fix)
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
        why = "what preemption and time limits mean for runs depends on the partition"
        yield Check("slurm.partition").unknown("there is no default partition", why, "name one by --partition")
    for judge in (_proctrack, _slurmd_timeout, _unkillable, _memory_accounting):
        yield judge(config)
    yield _topology(site, config)


def _release(config: ClusterConfig) -> Finding:
    text = config.text("SLURM_VERSION")
    check, numbers = Check("slurm.release"), config.release
    tested = "the tested releases are {}.{:02d} to {}.{:02d}".format(*OLDEST_RELEASE, *NEWEST_RELEASE)
    if numbers is not None and numbers < OLDEST_RELEASE:
        why = "agents may misread why a job has to end, and not requeue it"
        return check.limit(text, why, f"update Slurm; {tested}")
    if numbers is not None and numbers > NEWEST_RELEASE:
        return check.unknown(text, tested, "look for a newer release of slurm_elastic")
    return check.ok(text, tested)


def _topology(site: SiteFacts, config: ClusterConfig) -> Finding:
    check, plugin = Check("slurm.topology"), config.text("TopologyPlugin")
    domain = {"topology/tree": "switch", "topology/block": "block"}.get(plugin)
    if domain is None:
        why = "Slurm tells no failure domains: ranks are in its order of nodes, copies of snapshots go to the next node"
        return check.ok(plugin or "none", f"{why}; where racks fail, --failure-domain names them")
    nodes: dict[str, list[str]] = {}
    for node in site.nodes if site.results else ():
        nodes.setdefault(node.failure_domain, []).append(node.node)
    shown = "; ".join(f"{compress(names)} in {label or 'none'}" for label, names in nodes.items())
    why = f"ranks of a {domain} are in a row, and copies of snapshots go to another {domain} where there is one"
    return check.ok(f"{plugin}: {shown}" if shown else plugin, why)


def _state(partition: PartitionView) -> Finding:
    check, fact = Check("slurm.partition"), f"{partition.name}: {partition.state}, {partition.nodes} nodes"
    if partition.state != "UP" or not partition.nodes:
        return check.broken(fact, "no job of this partition starts", "choose another one by --partition")
    return check.ok(fact)


def _preempted_by(site: SiteFacts, config: ClusterConfig, partition: PartitionView) -> PartitionView | QosView | None:
    """Return whose PreemptMode and GraceTime count; None where it is a QOS that is not known."""
    if config.text("PreemptType") != "preempt/qos":
        return partition
    return next((qos for qos in site.slurm.qos if qos.name == site.qos), None)


def _preempt_mode(config: ClusterConfig, preempted_by: PartitionView | QosView | None) -> str:
    """Return the mode in which Slurm preempts jobs of the user here: REQUEUE, CANCEL, SUSPEND or OFF."""
    if config.text("PreemptType") in ("", "preempt/none"):
        return "OFF"
    mode = (preempted_by.preempt_mode if preempted_by is not None else "") or config.text("PreemptMode")
    # GANG and WITHIN come beside the mode itself: GANG,SUSPEND.
    words = mode.upper().replace("+", ",").split(",")
    return next((word for word in words if word not in ("", "GANG", "WITHIN", "PRIORITY")), "OFF")


def _preemption(site: SiteFacts, config: ClusterConfig, partition: PartitionView) -> Finding:
    check, mode = Check("slurm.preemption"), _preempt_mode(config, _preempted_by(site, config, partition))
    fact = f"{config.text('PreemptType') or 'preempt/none'}, partition {partition.name}: {mode}"
    if mode == "OFF":
        why = "Slurm takes no node from a job here; runs shrink by lost nodes, time limits and drain only"
        return check.ok(fact, why)
    if mode == "SUSPEND":
        why = "Slurm stops a preempted job without notice and keeps its memory; in an array the others go on without it"
        return check.limit(fact, why, "ask for PreemptMode=REQUEUE, or submit to a partition that is not preempted")
    if mode == "CANCEL":
        why = "a preempted allocation.sbatch is over; a preempted element of array.sbatch does not come back"
        fix = "ask for PreemptMode=REQUEUE; until then submit again after a preemption, with the same --run-id"
        return check.limit(fact, why, fix)
    expire = config.parameters("AuthInfo").get("cred_expire", "")
    delay = (int(expire) if expire.isdigit() else _CRED_EXPIRE) + 1
    why = (
        f"a preempted allocation.sbatch saves and starts again as a whole, {delay} s later at the earliest; of "
        "array.sbatch single elements do"
    )
    by_signal = "send_user_signal" in config.parameters("PreemptParameters")
    if by_signal or "preempt_send_user_signal" in config.parameters("SlurmctldParameters"):
        why += "; jobs get the signal of --signal in place of SIGTERM, so scontrol has to answer on the nodes"
    return check.ok(fact, why)


def _grace(site: SiteFacts, config: ClusterConfig, partition: PartitionView) -> Finding:
    check, preempted_by = Check("slurm.grace"), _preempted_by(site, config, partition)
    if _preempt_mode(config, preempted_by) in ("OFF", "SUSPEND"):
        return check.ok("no grace, as no job is told to end by preemption")
    if preempted_by is None:
        graces = ", ".join(f"{qos.name} {qos.grace} s" for qos in site.slurm.qos) or "none is known"
        why = "a preempted job has this time to save"
        return check.unknown(f"that of the job's QOS: {graces}", why, "name the QOS by --qos")
    seconds = preempted_by.grace
    notice = seconds or config.kill_wait
    # The agent needs the rest.
    usable = notice - min(RendezvousOptions().leave_margin, notice / 2)
    fact = f"{'partition' if preempted_by is partition else 'QOS'} {preempted_by.name}: {seconds} s"
    from_where = f"{seconds} s" if seconds else f"KillWait, {notice} s"
    # In an allocation and in an array alike; they differ in who has to save.
    why = f"a preempted job has {from_where} from the notice to SIGKILL, and its workers {usable:g} s of it to save"
    needed = site.checkpoint
    if needed is None:
        fix = "give the doctor --checkpoint SECONDS to see whether that is enough, or ask for a GraceTime"
        return check.limit_if(not seconds, fact, why, fix)
    fact += f"; a checkpoint takes {needed:g} s"
    if needed > usable:
        enough = needed + min(RendezvousOptions().leave_margin, needed)
        why += f": too little for a checkpoint of {needed:g} s, so each preemption loses the steps since the last one"
        fix = f"save faster or at shorter intervals, or ask for a GraceTime of {enough:g} s"
        return check.limit(fact, why, fix)
    return check.ok(fact, why)


def _time_limit(partition: PartitionView) -> Finding:
    check, saves = Check("slurm.time_limit"), "jobs save shortly before their time limit, and are requeued"
    most, default = partition.max_time, partition.default_time
    shown = ["no limit" if seconds is None else duration_text(seconds) for seconds in (default, most)]
    fact = f"{partition.name}: without --time {shown[0]}, MaxTime {shown[1]}"
    if most is not None and most < _SHORT_LIMIT:
        why = f"{saves}: start and end are most of their time"
        return check.limit(fact, why, "choose a partition with a longer MaxTime")
    return check.limit_if(default is not None and default < _SHORT_LIMIT, fact, saves, "give --time")


def _proctrack(config: ClusterConfig) -> Finding:
    check, kind = Check("slurm.proctrack"), config.text("ProctrackType")
    name = kind.rpartition("/")[2]
    if name == "pgid":
        why = "Slurm does not find processes that leave the process group of their task, and leaves them on the node"
        return check.limit(kind, why, "ask for ProctrackType=proctrack/cgroup")
    if name == "linuxproc":
        return check.ok(
            kind,
            "Slurm signals workers and the batch script, too: workers that use the trainer API are not disturbed, "
            "others end on the notice itself",
        )
    return check.ok(kind, "Slurm signals agents only, and they tell their workers")


def _memory_accounting(config: ClusterConfig) -> Finding:
    kind, parameters = config.text("JobAcctGatherType"), config.parameters("JobAcctGatherParams")
    settings = (kind or "none", config.text("JobAcctGatherParams"))
    check, fact = Check("slurm.memory_accounting"), ", ".join(filter(None, settings))
    if "overmemorykill" in parameters and kind.endswith("/linux") and not parameters.keys() & {"usepss", "noshared"}:
        return check.limit(
            fact,
            "Slurm ends jobs by the sum of what their processes use, and counts memory that processes share, such as "
            "snapshots and what workers share with the process that has forked them, once for each of them",
            "ask for UsePss in JobAcctGatherParams, or for more memory by --mem",
        )
    return check.ok(fact, "jobs are not ended for memory that their processes share")


def _slurmd_timeout(config: ClusterConfig) -> Finding:
    check, seconds = Check("slurm.slurmd_timeout"), config.number("SlurmdTimeout")
    if not seconds:
        return check.limit(
            "0: never",
            "the run goes on without a lost node after seconds, but Slurm does not take it from the job, and a job "
            "whose first node was lost does not end by Slurm's doing",
            "ask for SlurmdTimeout=300",
        )
    why = f"the run goes on without a lost node after seconds; Slurm takes it from the job after {seconds} s"
    return check.limit_if(seconds > _SLOW_SLURMD, f"{seconds} s", why, "ask for SlurmdTimeout=300")


def _unkillable(config: ClusterConfig) -> Finding:
    check, seconds = Check("slurm.unkillable_step"), config.number("UnkillableStepTimeout") or 0
    message = config.number("MessageTimeout") or 10
    why = f"Slurm drains a node whose processes are not gone {seconds} s after SIGKILL"
    # slurm.conf(5): "should be at least 5 times larger than MessageTimeout".
    if seconds < 5 * message:
        why = f"{why}, as when a GPU driver or a file system is slow; preempted nodes may not come back"
        fix = f"ask for UnkillableStepTimeout of at least {5 * message}, five times MessageTimeout"
        return check.limit(f"{seconds} s", why, fix)
    return check.ok(f"{seconds} s", why)


def _run_dir(site: SiteFacts) -> Iterator[Finding]:
    facts, check = site.run_dir, Check("run_dir.usable")
    if facts.error:
        yield check.refused(facts.error, "agents refuse it")
        return
    if facts.is_exclusive:
        why = "files can be made, linked, renamed and removed, and one creation of a file succeeds"
        yield check.ok(facts.path, why)
    else:
        why = "two groups of workers could train at once, as a round is claimed by the creation of a file"
        fix = "give a run directory on another file system by --run-dir"
        yield check.broken(f"{facts.path}: a file was created twice", why, fix)
    yield _shared(site, facts.filesystem)
    quota = "quotas apart" if facts.quota_left is None else f"{size_text(facts.quota_left)} left of your quota"
    check, fact = Check("run_dir.space"), f"{size_text(facts.free)} free, {quota}"
    if min(facts.free, facts.free if facts.quota_left is None else facts.quota_left) < _LITTLE_SPACE:
        why = "records, logs and checkpoints beside them need space; a run whose records cannot be written ends"
        yield check.limit(fact, why, "make space, or give another run directory by --run-dir")
    else:
        yield check.ok(fact)
    record, speed = f"{facts.record_seconds * 1000:.0f} ms", f"{facts.write_speed / 1e6:.0f} MB/s"
    is_slow = facts.record_seconds > _SLOW_RECORD or facts.write_speed < _SLOW_WRITE
    why = "each round waits for two records; a checkpoint in this file system takes its size by this speed"
    fix = "put the run directory and checkpoints on a faster file system"
    yield Check("run_dir.speed").limit_if(is_slow, f"{record} for a record, {speed} for a large file", why, fix)


def _shared(site: SiteFacts, filesystem: str) -> Finding:
    check, name = Check("run_dir.shared"), filesystem or "an unknown file system"
    # A node that was not reached was not asked for a file.
    delays = [link.file_delay for result in site.results for link in result.links if not link.free_port_error]
    seen = [delay for delay in delays if delay is not None]
    if len(seen) < len(delays):
        unseen = f"{len(delays) - len(seen)} of {len(delays)} new files of other nodes were not seen within seconds"
        share = "give a run directory that all nodes share by --run-dir"
        fix = f"{share}; look at the mount options lookupcache and acdirmax"
        return check.broken(f"{name}; {unseen}", "agents would not see the records of others", fix)
    if seen:
        fact = f"{name}, shared by {len(site.results)} nodes; a new file is seen after {max(seen):.2f} s"
        return check.ok(fact, "agents read the records of others there")
    if site.job:
        return check.unknown(f"{name}; no node has looked for a file of another one")
    why = "all agents of a run have to see one directory"
    if filesystem not in _LOCAL_FILESYSTEMS:
        return check.ok(name, why)
    fix = "let `slurm-elastic doctor --nodes 2` see whether nodes share it, or give another by --run-dir"
    return check.unknown(f"{name}, which is a local file system as a rule", why, fix)


def _etcd(site: SiteFacts) -> Iterator[Finding]:
    etcd = site.etcd
    if etcd is None:
        return
    if etcd.error:
        yield Check("etcd").refused(etcd.error, "records of a run cannot be kept there")
    else:
        fact = f"{etcd.endpoint}, {etcd.seconds * 1000:.0f} ms for a transaction"
        yield Check("etcd").ok(fact, "it lets this user in, to read and to write")
