"""What the warm workers need of torch beyond its promises. When torch changes it, these fail and say what."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.distributed.elastic import multiprocessing as elastic
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.run import get_args_parser
from torch.numa import binding

from slurm_elastic.agent.forkserver import worker_command
from slurm_elastic.agent.forkserver._numa import bound_cpus
from slurm_elastic.agent.forkserver.torch_context import WarmContext, start_warm_processes


def test_version() -> None:
    assert torch.__version__.startswith("2.13"), "read slurm_elastic/agent/forkserver against the new torch"


def test_context_has_the_methods_that_torch_asks_for() -> None:
    assert api.PContext.__abstractmethods__ == {"_start", "_poll", "pids", "_close"}
    assert not WarmContext.__abstractmethods__


def test_context_is_made_as_we_make_it() -> None:
    assert list(inspect.signature(api.PContext.__init__).parameters) == [
        "self",
        "name",
        "entrypoint",
        "args",
        "envs",
        "logs_specs",
        "log_line_prefixes",
        "duplicate_stdout_filters",
        "duplicate_stderr_filters",
    ]


def test_start_is_what_we_replace() -> None:
    lines = inspect.getsource(api.PContext.start)
    assert lines.rstrip().endswith(
        "self._start()\n        for tail_log in self._tail_logs:\n            tail_log.start()"
    )


def test_start_takes_what_torch_passes() -> None:
    torchs = list(inspect.signature(elastic.start_processes).parameters.values())
    ours = list(inspect.signature(start_warm_processes).parameters.values())
    assert [parameter.name for parameter in ours[:10]] == [
        "name",
        "entrypoint",
        "args",
        "envs",
        "logs_specs",
        "log_line_prefixes",
        "start_method",
        "numa_options",
        "duplicate_stdout_filters",
        "duplicate_stderr_filters",
    ]
    assert [(parameter.name, parameter.default) for parameter in torchs] == [
        (parameter.name, parameter.default) for parameter in ours[:10]
    ]


def test_cold_workers_of_torch_are_as_ours() -> None:
    source = inspect.getsource(SubprocessHandler)
    for line in ("env_vars = os.environ.copy()", 'kwargs["start_new_session"] = True', 'open(stdout, "w")'):
        assert line in source


def test_numa_binding_is_a_prefix_of_the_command() -> None:
    arguments = inspect.signature(binding._maybe_wrap_command_args_with_numa_binding).parameters
    assert list(arguments) == ["command_args", "gpu_index", "numa_options"]
    bound = binding._assemble_numactl_command_args(
        original_command_args=("python", "x"), logical_cpu_indices={0, 1, 2, 7, 9, 10}
    )
    assert bound_cpus(bound, ("python", "x")) == (0, 1, 2, 7, 9, 10)
    assert bound_cpus(("python", "x"), ("python", "x")) is None
    with pytest.raises(RuntimeError, match="not understood"):
        bound_cpus(("numactl", "--membind=0", "python", "x"), ("python", "x"))


def test_switches_of_torchrun_are_known() -> None:
    actions = get_args_parser()._actions
    assert {name: action.dest for action in actions if action.nargs == 0 for name in action.option_strings} == (
        worker_command._SWITCHES
    )
    letters = {name for action in actions if action.nargs is None for name in action.option_strings if len(name) == 2}
    assert letters == set(worker_command._LETTERS_WITH_VALUE)
