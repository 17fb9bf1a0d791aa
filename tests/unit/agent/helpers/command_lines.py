"""Environments of Slurm, and what the agent makes of a command line there."""

from __future__ import annotations

from slurm_elastic.agent.settings import AgentSettings, resolve
from slurm_elastic.cli.commands.agent import agent_parser

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "n2",
    "SLURM_SUBMIT_DIR": "/shared",
}
FIRST = {**STEP, "SLURM_NODEID": "0", "SLURMD_NODENAME": "n1"}
ELEMENT = {
    "SLURM_JOB_ID": "12",
    "SLURM_ARRAY_JOB_ID": "10",
    "SLURM_ARRAY_TASK_ID": "2",
    "SLURM_ARRAY_TASK_COUNT": "8",
    "SLURM_JOB_NODELIST": "n5",
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "0",
    "SLURMD_NODENAME": "n5",
    "SLURM_RESTART_COUNT": "4",
    "SLURM_STEP_RESV_PORTS": "21000-21001",
    "SLURM_SUBMIT_DIR": "/shared",
    "SLURM_ELASTIC_VERDICT": "array",
}
"""An element of an array whose batch script says that all elements are one run."""
ONE = {**STEP, "SLURM_JOB_NODELIST": "n2", "SLURM_STEP_NODELIST": "n2", "SLURM_NODEID": "0"}
ONE.update(SLURM_JOB_NUM_NODES="1", SLURM_STEP_NUM_NODES="1")


def settle(arguments: str, environ: dict[str, str]) -> AgentSettings:
    return resolve(agent_parser().parse_args(arguments.split()), environ)
