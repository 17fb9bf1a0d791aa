"""The fork server's part of the contract with torch: what it relies on behind unchanged signatures, tried for real.

To be run with every release of torch. When one of these fails, torch has changed: read its new code first.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic import multiprocessing as elastic
from torch.distributed.run import get_args_parser
from torch.numa import binding

from slurm_elastic.agent import option_table
from slurm_elastic.agent.forkserver.worker_processes import bound_cpus, numa_cpus
from tests.local.forkserver.helpers.workplace import HANG
from tests.local.torch_signals import signal_handlers_kept


def test_cold_workers_of_torch_are_as_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the agent's environment below their own, lead a session, and their output goes to fresh files."""
    monkeypatch.setenv("OF_THE_AGENT", "1")
    source = "import os; print(os.environ['OF_THE_AGENT'], os.environ['OWN'], os.getsid(0) == os.getpid())"
    specs = elastic.DefaultLogsSpecs(str(tmp_path), redirects=elastic.Std.ALL)
    with signal_handlers_kept():
        context = elastic.start_processes(
            "trainer", sys.executable, {0: ("-c", source)}, {0: {"OWN": "2"}}, specs, None
        )
    try:
        assert context.wait(HANG, 0.01) is not None
        assert Path(context.stdouts[0]).read_text() == "1 2 True\n"
    finally:
        context.close(signal.SIGKILL)


def test_numa_binding_is_a_prefix_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def cpus(**arguments: object) -> set[int]:
        # gpu_index until torch 2.13.
        device = int(str(arguments.get("device_index", arguments.get("gpu_index"))))
        return {device, device + 2}

    # As with devices, which are asked for their NUMA node.
    monkeypatch.setattr(binding, "_get_validated_logical_cpus_to_bind_to", cpus)
    options = binding.NumaOptions(affinity_mode=binding.AffinityMode.NODE)
    assert numa_cpus(2, None) == (None, None)
    assert numa_cpus(4, options)[3] == (3, 5)
    bound = binding._assemble_numactl_command_args(
        original_command_args=("x",), logical_cpu_indices={0, 1, 2, 7, 9, 10}
    )
    assert bound_cpus(bound[:-1]) == (0, 1, 2, 7, 9, 10)
    with pytest.raises(RuntimeError, match="not understood"):
        bound_cpus(("numactl", "--membind=0"))


def test_switches_of_torchrun_are_known() -> None:
    actions = get_args_parser()._actions
    names = {action: {name.replace("_", "-") for name in action.option_strings} for action in actions}
    switches = {name for action in actions if action.nargs == 0 for name in names[action] if name.startswith("--")}
    assert switches == set(option_table._TORCHRUN_SWITCHES)
    letters = {name: (names[action] - {name}).pop() for action in actions for name in names[action] if len(name) == 2}
    assert letters == option_table._LETTERS
