"""The facts about a site on which its checks decide: frozen values that JSON can carry from a node to the user."""

from __future__ import annotations

from dataclasses import dataclass, field

from slurm_elastic.slurm import ClusterConfig, PartitionView, QosView


@dataclass(frozen=True, slots=True)
class SlurmFacts:
    """The answers of Slurm's controller to the machine on which the doctor runs.

    Attributes:
        config: None if slurmctld does not answer.
        qos: Empty without slurmdbd.
    """

    config: ClusterConfig | None = None
    partitions: tuple[PartitionView, ...] = ()
    qos: tuple[QosView, ...] = ()

    def chosen(self, partition: str) -> list[PartitionView]:
        """Return the partitions that ``--partition`` names, several of them separated by commas; else the default."""
        names = [name for name in partition.split(",") if name]
        return [view for view in self.partitions if (view.name in names if names else view.is_default)]


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """The torch of one machine.

    Attributes:
        release: Empty if it cannot be imported.
        error: Why an agent would refuse it; empty if it would not.
        cuda: Release of CUDA that it was built with; empty for a CPU build.
    """

    release: str = ""
    error: str = ""
    cuda: str = ""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU, after a product of two matrices.

    Attributes:
        error: Why the product is wrong or could not be made; empty if it is right.
    """

    name: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One machine: a node of the doctor's job, or the machine on which the user has started the doctor.

    Attributes:
        package: Version of slurm_elastic.
        protocol: Number of the protocol that its agents speak.
        gpus: The GPUs that torch can use.
        job_gpus: Number of GPUs that Slurm has given the job here.
        shared_memory: Bytes that are free in /dev/shm.
        locked_memory: Soft limit in bytes; -1 for none.
        controller_offset: Seconds by which the clock here is ahead of the controller's; None if scontrol gets no answer
            here.
        failure_domain: Label of what Slurm says fails together with this node; empty if it says nothing.
        address: Address by which other nodes would reach this one; empty if none can be chosen.
        collective_interface: Interface that collectives are told to use; empty if they choose by the host name.
        interfaces: The names of the network interfaces with their addresses.
    """

    node: str
    python: str = ""
    executable: str = ""
    package: str = ""
    protocol: int = 0
    torch: TorchFacts = field(default_factory=TorchFacts)
    gpus: tuple[GpuFacts, ...] = ()
    job_gpus: int = 0
    nvidia_driver: str = ""
    shared_memory: int = 0
    shared_memory_error: str = ""
    descriptors_soft: int = 0
    descriptors_hard: int = 0
    locked_memory: int = -1
    controller_offset: float | None = None
    has_squeue: bool = True
    failure_domain: str = ""
    address: str = ""
    address_error: str = ""
    collective_interface: str = ""
    interfaces: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """The way from one node to another.

    Attributes:
        leader_port_error: Why a port such as a leader's cannot be reached there; empty if it can.
        free_port_error: The same for a port of the kernel's own choice, such as the worker store's.
        round_trip: Median time in seconds of a message and its answer; None if there was none.
        file_delay: Seconds until a new file of the other node was seen here; None if it was not.
    """

    peer: str
    leader_port_error: str = ""
    free_port_error: str = ""
    round_trip: float | None = None
    file_delay: float | None = None


@dataclass(frozen=True, slots=True)
class CollectiveFacts:
    """All-reduces of all nodes together.

    Attributes:
        bandwidth: Bus bandwidth in bytes per second: 2 (n - 1) / n times the size, by the time of one all-reduce.
    """

    backend: str
    bandwidth: float | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Everything that one node of the doctor's job has found out; it is written when only `facts` are known, too.

    Attributes:
        leader_port: Its port such as a leader's, below the ephemeral range; 0 where all were taken.
        free_port: Its port of the kernel's choice.
        links: The ways from it to others.
        is_complete: True if the node has come to the end of its work.
    """

    facts: NodeFacts
    leader_port: int = 0
    free_port: int = 0
    store_port: int = 0
    links: tuple[LinkFacts, ...] = ()
    collectives: tuple[CollectiveFacts, ...] = ()
    is_complete: bool = False


@dataclass(frozen=True, slots=True)
class RunDirFacts:
    """The directory below which runs keep their files; what is measured is 0 where there is an error.

    Attributes:
        error: Why an agent would refuse it; empty if it would not.
        is_exclusive: False if two creations of one file have both succeeded.
        filesystem: Its type, such as ``nfs4``; empty if unknown.
        free: Bytes that are free for this user, quotas apart.
        quota_left: Bytes that are left of the user's quota; None without one, or if nothing tells it.
        write_speed: Bytes per second of one large file, written and synced.
    """

    path: str
    error: str = ""
    is_exclusive: bool = True
    filesystem: str = ""
    free: int = 0
    quota_left: int | None = None
    write_speed: float = 0.0
    record_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class EtcdFacts:
    """The etcd that the user has named.

    Attributes:
        error: Why it cannot keep the records of a run; empty if it can.
        seconds: Time of one transaction; 0 where there is an error.
    """

    endpoint: str
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SiteFacts:
    """Everything that was gathered.

    Attributes:
        here: The machine on which the user has started the doctor.
        partition: The partition of the doctor's job, else that of ``--partition`` or of the template; empty for the
            default one.
        qos: The QOS, in the same way; empty if it is not known.
        checkpoint: The seconds that workers need to save, as ``--checkpoint`` says; None if it is not given.
        expected: The nodes of the doctor's job; empty without one.
        results: What those nodes have found out; without nodes that have written nothing.
        job: Id of that job; empty without one.
        job_output: The last lines that it printed.
    """

    here: NodeFacts
    slurm: SlurmFacts
    run_dir: RunDirFacts
    partition: str = ""
    qos: str = ""
    checkpoint: float | None = None
    expected: tuple[str, ...] = ()
    results: tuple[ProbeResult, ...] = ()
    job: str = ""
    job_output: tuple[str, ...] = ()
    etcd: EtcdFacts | None = None

    @property
    def nodes(self) -> tuple[NodeFacts, ...]:
        """The machines on which runs would train as far as they were looked at: without a job, this one stands in."""
        return tuple(result.facts for result in self.results) or (self.here,)
