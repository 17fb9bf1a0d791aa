from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.numa import binding
from torch.numa.binding import AffinityMode, NumaOptions

from slurm_elastic.agent.forkserver import worker_processes
from slurm_elastic.agent.forkserver.worker_processes import line_prefixes, numa_cpus
from slurm_elastic.agent.workers.processes import require_numa_binding
from slurm_elastic.errors import UsageError

NODE = NumaOptions(affinity_mode=AffinityMode.NODE)


def test_prefix_of_lines_has_the_node_as_slurm_names_it() -> None:
    """torch 2.14 has ${hostname}, from gethostname(2)."""
    spec = WorkerSpec("trainer", 2, None, entrypoint="true")  # type: ignore[arg-type]
    envs = {local: {"RANK": str(4 + local), "SLURM_ELASTIC_NODE": "node7"} for local in (0, 1)}
    template = "${hostname}:${rank}/${local_rank} ${role_name}${other}"
    assert line_prefixes(template, spec, envs) == {0: "node7:4/0 trainer${other}", 1: "node7:5/1 trainer${other}"}
    assert line_prefixes(None, spec, envs) == {0: "[trainer0]:", 1: "[trainer1]:"}


def _device(asked: Mapping[str, object]) -> int:
    # gpu_index until torch 2.13.
    return int(str(asked.get("device_index", asked.get("gpu_index"))))


@pytest.fixture
def _nothing_known() -> None:
    worker_processes.numa_cpus.cache_clear()


@pytest.mark.usefixtures("_nothing_known")
def test_torch_chooses_the_cpus_of_all_workers_once_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def cpus(**asked: object) -> set[int]:
        with (tmp_path / "asked").open("a") as log:
            print(os.getpid(), _device(asked), file=log)
        return {_device(asked)}

    monkeypatch.setattr(binding, "_get_validated_logical_cpus_to_bind_to", cpus)
    require_numa_binding(2, NODE)
    assert numa_cpus(2, NODE) == ((0,), (1,))
    asked = [line.split() for line in (tmp_path / "asked").read_text().splitlines()]
    assert [device for _pid, device in asked] == ["0", "1"]
    assert str(os.getpid()) not in {pid for pid, _device in asked}


@pytest.mark.usefixtures("_nothing_known")
def test_workers_that_cannot_be_bound_are_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def cpus(**_asked: object) -> set[int]:
        raise RuntimeError("numactl CLI is required for NUMA binding")

    monkeypatch.setattr(binding, "_get_validated_logical_cpus_to_bind_to", cpus)
    require_numa_binding(1, None)
    with pytest.raises(UsageError) as caught:
        require_numa_binding(1, NODE)
    assert str(caught.value) == (
        "--numa-binding=node cannot bind the workers of this node: numactl CLI is required for NUMA binding; "
        "leave the option out, or fix that"
    )
    # torch logs a traceback of it otherwise.
    assert "Traceback" not in "".join(capfd.readouterr())
