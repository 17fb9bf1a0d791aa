"""All checks."""

from __future__ import annotations

from slurm_elastic.doctor.facts import SiteFacts
from slurm_elastic.doctor.network_checks import etcd_findings, network_findings
from slurm_elastic.doctor.node_checks import node_findings, run_dir_findings
from slurm_elastic.doctor.slurm_checks import slurm_findings
from slurm_elastic.finding import Finding


def findings(site: SiteFacts) -> list[Finding]:
    """Return what there is to say about a site, in the order of its table."""
    return [
        *slurm_findings(site),
        *run_dir_findings(site),
        *node_findings(site),
        *network_findings(site),
        *etcd_findings(site),
    ]
