"""The fork server's part of the contract with torch: what it relies on behind unchanged signatures, tried for real.

To be run with every release of torch. When one of these fails, torch has changed: read its new code first.
"""

from __future__ import annotations

import functools
import signal
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic import multiprocessing as elastic
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.run import get_args_parser
from torch.numa import binding

from slurm_elastic.agent import option_table
from slurm_elastic.agent.forkserver import torch_context
from slurm_elastic.agent.forkserver.torch_context import ForkServerContext, bound_cpus
from slurm_elastic.agent.forkserver.torch_processes import signal_handlers_kept
from tests.local.forkserver.helpers.workplace import HANG


def test_context_has_the_methods_that_torch_asks_for() -> None:
    assert api.PContext.__abstractmethods__ == {"_start", "_poll", "pids", "_close"}
    assert not ForkServerContext.__abstractmethods__


class _Context(api.PContext):
    """Keeps the order in which torch calls it."""

    def __init__(self, logs: Path) -> None:
        specs = elastic.DefaultLogsSpecs(str(logs), redirects=elastic.Std.ALL, tee=elastic.Std.ALL)
        super().__init__("trainer", "true", {0: ()}, {0: {}}, specs)
        self.called: list[str] = []
        for tail in self._tail_logs:
            tail.start = lambda: self.called.append("tail")

    def _start(self) -> None:
        self.called.append("start")

    def _poll(self) -> api.RunProcsResult | None:
        return None

    def pids(self) -> dict[int, int]:
        return {}

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        self.called.append(death_sig.name)


def test_start_is_what_we_replace(tmp_path: Path) -> None:
    """PContext.start does what ForkServerContext.start does, and replaces signal handlers, which that one does not."""
    kept = [
        (number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    ]
    context = _Context(tmp_path)
    try:
        context.start()
        assert signal.getsignal(signal.SIGTERM) is not kept[0][1]
    finally:
        for number, handler in kept:
            signal.signal(number, handler)
    assert context.called[0] == "start"
    assert set(context.called[1:]) == {"tail"}
    context.close(signal.SIGKILL)
    assert context.called[-1] == "SIGKILL"


def test_a_tail_log_knows_what_it_follows(tmp_path: Path) -> None:
    followed = [each for tail in _Context(tmp_path)._tail_logs for each in torch_context._files_of(tail)]
    assert {Path(each.path).name for each in followed} == {"stdout.log", "stderr.log"}
    assert {each.prefix for each in followed} == {"[trainer0]:"}


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
    wrap = functools.partial(torch_context._wrap_with_numa_binding, **{torch_context._DEVICE: 3})
    assert wrap(("python", "x"), numa_options=None) == ("python", "x")
    asked: list[object] = []

    def cpus(**arguments: object) -> set[int]:
        asked.append(arguments[torch_context._DEVICE])
        return {0, 2}

    # As with devices, which are asked for their NUMA node.
    monkeypatch.setattr(binding, "_get_validated_logical_cpus_to_bind_to", cpus)
    options = binding.NumaOptions(affinity_mode=binding.AffinityMode.NODE)
    assert bound_cpus(wrap(("python", "x"), numa_options=options), ("python", "x")) == (0, 2)
    assert asked == [3]
    bound = binding._assemble_numactl_command_args(
        original_command_args=("python", "x"), logical_cpu_indices={0, 1, 2, 7, 9, 10}
    )
    assert bound_cpus(bound, ("python", "x")) == (0, 1, 2, 7, 9, 10)
    assert bound_cpus(("python", "x"), ("python", "x")) is None
    with pytest.raises(RuntimeError, match="not understood"):
        bound_cpus(("numactl", "--membind=0", "python", "x"), ("python", "x"))


def test_switches_of_torchrun_are_known() -> None:
    actions = get_args_parser()._actions
    names = {action: {name.replace("_", "-") for name in action.option_strings} for action in actions}
    switches = {name for action in actions if action.nargs == 0 for name in names[action] if name.startswith("--")}
    assert switches == set(option_table._TORCHRUN_SWITCHES)
    letters = {name: (names[action] - {name}).pop() for action in actions for name in names[action] if len(name) == 2}
    assert letters == option_table._LETTERS
