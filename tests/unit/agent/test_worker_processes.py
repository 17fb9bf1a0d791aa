from __future__ import annotations

from torch.distributed.elastic.agent.server.api import WorkerSpec

from slurm_elastic.agent.worker_processes import _prefixes


def test_prefix_of_lines_has_the_node_as_slurm_names_it() -> None:
    """torch 2.14 has ${hostname}, from gethostname(2)."""
    spec = WorkerSpec("trainer", 2, None, entrypoint="true")  # type: ignore[arg-type]
    envs = {local: {"RANK": str(4 + local), "SLURM_ELASTIC_NODE": "node7"} for local in (0, 1)}
    template = "${hostname}:${rank}/${local_rank} ${role_name}${other}"
    assert _prefixes(template, spec, envs) == {0: "node7:4/0 trainer${other}", 1: "node7:5/1 trainer${other}"}
    assert _prefixes(None, spec, envs) is None
