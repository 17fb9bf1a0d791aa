"""The identity of an agent: node, job, restart count and process. Pure.

It is text in messages and records, ``<node>/<job id>.<restart count>/<process id>``; this module alone makes it and
takes it apart.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """An agent, unique over a run.

    Attributes:
        node: Slurm's name of its node.
        job: the job that it runs in; 0 outside Slurm.
        restarts: how many times Slurm had requeued that job when the agent started.
        process: its process id.
    """

    node: str
    job: str
    restarts: int
    process: int

    def __str__(self) -> str:
        """As messages and records have it."""
        return f"{self.node}/{self.job}.{self.restarts}/{self.process}"

    @property
    def in_slurm(self) -> bool:
        """Return whether Slurm knows of its job."""
        return self.job != "0"

    @classmethod
    def parse(cls, agent: str) -> AgentIdentity | None:
        """Return the identity that a text stands for, None if it is not of this form."""
        node, _, rest = agent.partition("/")
        started, _, process = rest.partition("/")
        job, _, restarts = started.partition(".")
        if not (node and job.isdigit() and restarts.isdigit() and process.isdigit()):
            return None
        return cls(node, job, int(restarts), int(process))


def node_of(agent: str) -> str:
    """Return the node in an agent's identity; the whole text if it is of another form."""
    return agent.partition("/")[0]


def job_of(agent: str) -> str:
    """Return the job in an agent's identity, ``<job id>.<restart count>``; empty if it has none."""
    _, _, rest = agent.partition("/")
    started, slash, _ = rest.partition("/")
    return started if slash else ""
