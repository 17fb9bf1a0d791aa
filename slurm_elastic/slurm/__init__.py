"""Slurm: its environment variables, host lists, ports, addresses, and questions to its controller."""

from slurm_elastic.slurm.address import (
    AddressPreference,
    choose_address,
    data_interface,
    ephemeral_low,
    gather_facts,
    gloo_interface,
    port_sequence,
    resolve,
)
from slurm_elastic.slurm.cause import Cause, Diagnosis, SignalDefaults, classify, least_grace, presume, save_time
from slurm_elastic.slurm.controller import NEWEST_RELEASE, OLDEST_RELEASE, SILENCE, Controller
from slurm_elastic.slurm.hostlist import compress, expand, natural_key
from slurm_elastic.slurm.job import SlurmJob
from slurm_elastic.slurm.output import (
    ClusterConfig,
    JobView,
    NodeState,
    PartitionView,
    QosView,
    QueuedJob,
)
from slurm_elastic.slurm.variables import Reader, agent_settings, drop_foreign
