"""The configuration files of a cluster, as text. Pure: nothing here touches the machine.

Keys are those of slurm.conf(5), gres.conf(5), cgroup.conf(5) and slurmdbd.conf(5).
"""

from __future__ import annotations

from .settings import ACCOUNTING, CONTROLLER, USER, Settings

CLUSTER = "elastic"
GPUS_PER_NODE = 2


def hosts(settings: Settings) -> str:
    """/etc/hosts of every machine. The own name is the network address, never a loopback one.

    torch's sockets are dual-stack and ask for the names of IPv4 peers as mapped addresses; a site's name server answers
    that, and here this file has to.
    """
    lines = ["127.0.0.1 localhost", "::ffff:127.0.0.1 localhost"]
    lines += [f"{settings.address(machine)} {machine}" for machine in settings.machines]
    lines += [f"::ffff:{settings.address(machine)} {machine}" for machine in settings.machines]
    return "\n".join(lines) + "\n"


def cgroup_conf() -> str:
    """Ask for cgroup v1: 22.05's cgroup/v2 plugin wants systemd, and v1's freezer mounts on any host."""
    return "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n"


def gres_conf(settings: Settings) -> str:
    """Fake GPUs. Slurm drops a gpu without File=, and takes nothing but device files."""
    files = f"{settings.state}/gpu[0-{GPUS_PER_NODE - 1}]"
    return f"NodeName={_node_range(settings)} Name=gpu File={files}\n"


def slurmdbd_conf(settings: Settings) -> str:
    """The accounting daemon; it reaches MariaDB through a unix socket that its environment names."""
    return f"""\
AuthType=auth/munge
DbdHost={ACCOUNTING}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
LogFile={settings.state}/log/slurmdbd.log
PidFile=/run/slurmdbd.pid
"""


def accounts() -> tuple[str, ...]:
    """What sacctmgr is told: jobs of QOS high preempt those of QOS low, the ordinary user's default.

    The grace is another one than that of the partitions.
    """
    return (
        f"add cluster {CLUSTER}",
        "add qos low GraceTime=20 PreemptMode=requeue",
        "add qos high Preempt=low Priority=1000",
        "add account people",
        f"add user {USER} Account=people QOS=low,high DefaultQOS=low",
    )


def topology_conf(settings: Settings) -> str:
    """Two switches or blocks, whose nodes alternate in Slurm's order of nodes."""
    odd, even = ",".join(settings.node_names[::2]), ",".join(settings.node_names[1::2])
    if settings.topology == "block":
        return f"BlockName=b1 Nodes={odd}\nBlockName=b2 Nodes={even}\nBlockSizes={len(settings.node_names[1::2])}\n"
    return f"SwitchName=s1 Nodes={odd}\nSwitchName=s2 Nodes={even}\nSwitchName=s0 Switches=s[1-2]\n"


def slurm_conf(settings: Settings) -> str:
    """The whole slurm.conf."""
    state = settings.state
    nodes = _node_range(settings)
    if settings.accounting:
        accounting = f"AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost={ACCOUNTING}\n"
        preempt_type = "preempt/qos"
    else:
        accounting = "AccountingStorageType=accounting_storage/none\n"
        preempt_type = "preempt/partition_prio"
    # Since 25.11.
    expedite = "SlurmctldParameters=enable_expedited_requeue\n" if settings.release == "26.05" else ""
    topology = f"TopologyPlugin=topology/{settings.topology}\n" if settings.topology else ""
    addresses = "\n".join(
        f"NodeName={node} NodeAddr={settings.address(node)} CPUs=4 RealMemory=4000 Gres=gpu:{GPUS_PER_NODE}"
        for node in settings.node_names
    )
    return f"""\
ClusterName={CLUSTER}
SlurmctldHost={CONTROLLER}({settings.address(CONTROLLER)})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job is eligible after cred_expire + 1 seconds: 6 instead of 121.
AuthInfo=cred_expire=5
StateSaveLocation={state}/controller
SlurmdSpoolDir={state}/spool/%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={state}/log/slurmctld.log
SlurmdLogFile={state}/log/slurmd.%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
MailProg=/bin/true

ProctrackType=proctrack/{settings.proctrack}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
{accounting}{topology}MpiDefault=none
MpiParams=ports=21000-21999
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# Lets a small machine declare more processors than it has; the node would be INVAL otherwise.
SlurmdParameters=config_overrides
GresTypes=gpu
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=5,sched_interval=2,sched_min_interval=0,batch_sched_delay=0

PreemptType={preempt_type}
PreemptMode=REQUEUE
JobRequeue=1
KillWait={settings.kill_wait}
KillOnBadExit=0
SlurmdTimeout=10
MessageTimeout=5
BatchStartTimeout=30
# Told to terminate, a slurmstepd whose tasks have ended takes them for unkillable, and drains the node ("Kill task
# failed"), unless it has gone within this time. While the node was cut off it may have begun to sleep for 60 seconds
# before it reports the end again (step_terminate_monitor.c and mgr.c of slurmstepd, 22.05 and 24.11).
UnkillableStepTimeout=120
MinJobAge=300
{expedite}ReturnToService=2
PropagateResourceLimits=NONE

{addresses}
PartitionName=low Nodes={nodes} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=15 \
MaxTime=INFINITE DefaultTime=60
PartitionName=high Nodes={nodes} PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE DefaultTime=60
"""


def _node_range(settings: Settings) -> str:
    return f"n[1-{settings.nodes}]"
