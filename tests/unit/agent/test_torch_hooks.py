"""The agent's part of the contract with torch: what it relies on behind unchanged signatures, tried for real.

To be run with every release of torch. When one of these fails, torch has changed: read its new code first.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import re
import signal
import socket
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import run as torchrun
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.health_check_server import HealthCheckServer
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import handlers
from torch.distributed.elastic.events.api import EventSource
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    LogsDest,
    LogsSpecs,
    ProcessFailure,
    RunProcsResult,
    SignalException,
)
from torch.distributed.elastic.rendezvous import RendezvousHandler, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

import slurm_elastic
from slurm_elastic import torchelastic
from slurm_elastic.agent.agent import Agent
from slurm_elastic.agent.health.server import HealthServer
from slurm_elastic.agent.workers.logs import RoundLogsSpecs
from slurm_elastic.agent.workers.torch_agent import TorchAgent
from slurm_elastic.rendezvous.worker_store import FreshPorts, open_worker_store
from tests.local.torch_signals import signal_handlers_kept
from tests.unit.agent.helpers.rounds import placed

_RELEASE = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])


def _parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_every_field_of_a_launch_configuration_is_known() -> None:
    # A field that torch adds is an option of torchrun that would be taken and then ignored.
    assert set(_parameters(LaunchConfig)) <= {
        "min_nodes",
        "max_nodes",
        "nproc_per_node",
        "logs_specs",
        "run_id",
        "role",
        "rdzv_endpoint",
        "rdzv_backend",
        "rdzv_configs",
        "rdzv_timeout",
        "max_restarts",
        "monitor_interval",
        "start_method",
        "log_line_prefix_template",
        "metrics_cfg",
        "local_addr",
        "event_log_handler",
        "numa_options",
        "signals_to_handle",
        "duplicate_stdout_filters",
        "duplicate_stderr_filters",
        "virtual_local_rank",
        "shutdown_timeout",
    }


def _handler() -> Mock:
    handler = Mock(spec=RendezvousHandler)
    handler.get_backend.return_value = "none"
    handler.get_run_id.return_value = "run"
    return handler


class _Specs(LogsSpecs):
    @property
    def root_log_dir(self) -> str:
        return ""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        empty = dict.fromkeys(envs, "")
        return LogsDest(dict(empty), dict(empty), dict(empty), dict(empty), dict(empty), "", "")


def _agent() -> LocalElasticAgent:
    spec = WorkerSpec(role="trainer", local_world_size=2, rdzv_handler=_handler(), entrypoint="true", max_restarts=3)
    return LocalElasticAgent(spec, _Specs())


def test_what_an_agent_knows() -> None:
    agent = _agent()
    group = agent._worker_group
    assert agent._remaining_restarts == 3
    assert (agent._pcontext, agent._worker_watchdog, agent._health_check_server) == (None, None, None)
    for name in ("group_rank", "group_world_size", "workers", "spec"):
        assert hasattr(group, name), name
    event = agent._construct_event("START", EventSource.WORKER, group.workers[0])
    assert {"run_id", "global_rank", "worker_id", "agent_restarts", "metadata"} <= set(event.metadata)


def test_the_agent_of_ours_overrides_what_is_there() -> None:
    for name in ("_invoke_run", "_shutdown"):
        assert name in vars(TorchAgent)
        assert hasattr(LocalElasticAgent, name)
    # Names of ours that would hide one of torch's.
    hidden = {name for name in vars(TorchAgent) if not name.startswith("__")} & set(dir(LocalElasticAgent))
    assert hidden <= {"_invoke_run", "_shutdown", "_abc_impl"}
    assert _instance_names(TorchAgent) & set(vars(_agent())) <= {"_remaining_restarts", "_pcontext"}


def _instance_names(cls: type, context: type[ast.expr_context] = ast.Store) -> set[str]:
    """What methods of a class set on self, or read of it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, context)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def _private(names: Iterable[str]) -> set[str]:
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (Agent, _agent()),
        (torchelastic.LocalElasticAgent, _agent()),
        (HealthServer, HealthCheckServer(lambda: 0, 0, 1)),
        (RoundLogsSpecs, _Specs()),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_what_is_private_to_torch_is_touched_in_one_file_only(ours: type, torchs: object) -> None:
    touched = {*vars(ours), *_instance_names(ours), *_instance_names(ours, ast.Load)}
    private = _private(touched) & _private(dir(torchs))
    assert private <= {"_abc_impl"}


def test_no_other_file_imports_what_is_private_to_torch() -> None:
    package = Path(slurm_elastic.__file__).parent
    found = {
        (str(path.relative_to(package)), f"{node.module}.{alias.name}")
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.")
        for alias in node.names
        if alias.name.startswith("_") or "._" in (node.module or "")
    }
    # torch.distributed has these two, too, but not for type checkers.
    stores = {name for _, name in found} & {f"torch._C._distributed_c10d.{name}" for name in ("Store", "TCPStore")}
    assert {(path, name) for path, name in found if name not in stores} == {
        ("agent/forkserver/worker_processes.py", "torch.numa.binding._maybe_wrap_command_args_with_numa_binding"),
        ("snapshot/disk/writer.py", "torch.distributed.checkpoint.filesystem._StorageInfo"),
    }
    assert all(getattr(torch.distributed, name.rpartition(".")[2]) is not None for name in stores)


def test_a_place_in_a_checkpoint_is_a_file_an_offset_and_a_length() -> None:
    # Its module takes seconds to import, so no agent checks this at its start.
    fields = [field.name for field in dataclasses.fields(_StorageInfo)]
    assert fields[:3] == ["relative_path", "offset", "length"]
    assert _StorageInfo("part", 8, 16).length == 16


def _monitored(ended: RunProcsResult | None) -> tuple[RunResult, Mock]:
    """What torch makes of the end of two workers, or None while they run, and the context that it has asked."""
    agent = _agent()
    agent._worker_group.workers = [Worker(local_rank, 4 + local_rank) for local_rank in (0, 1)]
    for worker, pid in zip(agent._worker_group.workers, (10, 11), strict=True):
        worker.id = pid
    context = Mock(spec=["pids", "wait"])
    context.pids.return_value = {0: 10, 1: 11}
    context.wait.return_value = ended
    agent._pcontext = context
    return agent._monitor_workers(agent._worker_group), context


def test_what_monitors_workers_asks_of_the_context_and_nothing_else() -> None:
    result, context = _monitored(None)
    assert result.state is WorkerState.HEALTHY
    # With 0 it never blocks.
    context.wait.assert_called_once_with(0)


def test_what_monitors_workers_tells_of_those_that_ended() -> None:
    failure = ProcessFailure(1, 11, 7, "")
    failed, _ = _monitored(RunProcsResult(failures={1: failure}))
    assert (failed.state, failed.failures) == (WorkerState.FAILED, {5: failure})
    ended, _ = _monitored(RunProcsResult(return_values={0: "a", 1: "b"}))
    assert (ended.state, ended.return_values) == (WorkerState.SUCCEEDED, {4: "a", 5: "b"})


@pytest.mark.parametrize(
    ("result", "cleared"),
    [
        (RunResult(WorkerState.SUCCEEDED, {0: None}), signal.SIGTERM),
        (RunResult(WorkerState.FAILED), signal.SIGTERM),
        (RendezvousGracefulExitError("left"), signal.SIGTERM),
        (SignalException("told to end", signal.SIGINT), signal.SIGINT),
    ],
    ids=["succeeded", "failed", "left", "signalled"],
)
def test_run_clears_away_in_the_end_whatever_happened(result: Any, cleared: signal.Signals) -> None:
    def take_part() -> RunResult:
        if isinstance(result, Exception):
            raise result
        return result

    seen: list[tuple[signal.Signals, int]] = []
    spec = _agent()._worker_group.spec
    agent = TorchAgent(spec, _Specs(), take_part, lambda number, timeout: seen.append((number, timeout)), 7)
    agent._worker_group.workers = [Worker(0, 0)]
    with contextlib.suppress(SignalException):
        agent.run("trainer")
    assert seen == [(cleared, 7)]


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_a_virtual_local_rank_sees_one_device(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    if variable == "HIP_VISIBLE_DEVICES" and _RELEASE < (2, 15):
        pytest.skip("torch reads HIP_VISIBLE_DEVICES since 2.15")
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "6,7")
    spec = WorkerSpec("trainer", 2, _handler(), entrypoint="true", virtual_local_rank=True)
    env: dict[str, str] = {}
    TorchAgent(spec, _Specs(), lambda: RunResult(state=WorkerState.HEALTHY), print).set_local_rank(env, 1)
    assert (env["LOCAL_RANK"], env[variable]) == ("0", "7")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["train.py", "--lr", "1"], "train.py"),
        (["-m", "package.train", "x"], "package.train"),
        (["--no-python", "/opt/train", "--lr", "1"], "train"),
    ],
)
def test_the_script_is_found_in_the_command_of_workers(command: list[str], name: str, tmp_path: Path) -> None:
    options = torchrun.get_args_parser().parse_args([f"--log-dir={tmp_path}", *command])
    _, entrypoint, args = torchrun.config_from_args(options)
    spec = WorkerSpec("trainer", 1, _handler(), entrypoint=entrypoint, args=tuple(args))
    assert TorchAgent(spec, _Specs(), lambda: RunResult(state=WorkerState.HEALTHY), print).script == name


def test_event_handlers_are_registered_in_a_dictionary() -> None:
    assert {"null", "console"} <= set(handlers._log_handlers)


def test_a_store_takes_a_socket_that_listens_already() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    assert store.port == port
    store.set("key", "value")
    assert TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False).get("key") == b"value"


def test_whoever_waits_in_a_store_comes_back_when_it_is_not_served_any_more() -> None:
    agent = TorchAgent(_agent()._worker_group.spec, _Specs(), lambda: RunResult(state=WorkerState.HEALTHY), print)
    reserved = FreshPorts().reserve()
    one = dataclasses.replace(placed("n1", nodes=1), store_address="127.0.0.1", store_port=reserved.port)
    served = open_worker_store(one, reserved)
    agent.serve_store(served)
    # Workers of one node find it on the loopback, and nobody finds it elsewhere.
    assert reserved.address == "127.0.0.1"
    client = TCPStore("127.0.0.1", reserved.port, is_master=False, wait_for_workers=False)
    ended = threading.Event()

    def wait() -> None:
        with contextlib.suppress(torch.distributed.DistError):
            client.wait(["key"], timedelta(seconds=600))
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    assert not ended.wait(0.1)
    agent.serve_store(None)
    assert ended.wait(60)


def test_the_launcher_shuts_the_rendezvous_down_while_a_failure_is_on_its_way(tmp_path: Path) -> None:
    """SlurmRendezvousHandler.shutdown looks at sys.exc_info()."""
    on_their_way: list[BaseException | None] = []
    handler = _handler()
    handler.next_rendezvous.side_effect = RuntimeError("no round")
    handler.shutdown.side_effect = lambda: on_their_way.append(sys.exc_info()[1])
    rendezvous_handler_registry.register("none", lambda _parameters: handler)
    try:
        specs = DefaultLogsSpecs(str(tmp_path))
        config = LaunchConfig(1, 1, 1, rdzv_backend="none", rdzv_endpoint="here", run_id="run", logs_specs=specs)
        with signal_handlers_kept(), pytest.raises(RuntimeError, match="no round"):
            launch_agent(config, "true", [])
    finally:
        del rendezvous_handler_registry._registry["none"]
    assert [str(error) for error in on_their_way] == ["no round"]
