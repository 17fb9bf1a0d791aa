"""What slurm_elastic touches of torch beyond its documented interface, as read in 2.13.

When one of these fails, torch has changed under us: read its new code before this file is brought up to date.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import socket
import textwrap
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.health_check_server import HealthCheckServer
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import handlers
from torch.distributed.elastic.events.api import EventSource
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, PContext, RunProcsResult
from torch.distributed.elastic.multiprocessing.tail_log import TailLog
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.timer.file_based_local_timer import FileTimerRequest
from torch.distributed.launcher.api import LaunchConfig, launch_agent
from torch.numa.binding import _maybe_wrap_command_args_with_numa_binding

import slurm_elastic
from slurm_elastic.agent.agent import Agent
from slurm_elastic.agent.forkserver.torch_context import WarmContext
from slurm_elastic.agent.health import HealthServer
from slurm_elastic.agent.torch_agent import TorchAgent
from slurm_elastic.agent.worker_logs import RoundLogsSpecs


def test_the_version_that_was_read() -> None:
    assert torch.__version__.startswith("2.13.")


def _parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (LocalElasticAgent.run, ["role"]),
        (LocalElasticAgent._invoke_run, ["role"]),
        (LocalElasticAgent._monitor_workers, ["worker_group"]),
        (LocalElasticAgent._shutdown, ["death_sig", "timeout"]),
        (LocalElasticAgent._log_watchdog_event, ["name", "request"]),
        (HealthCheckServer.__init__, ["alive_callback", "port", "timeout"]),
        (HealthCheckServer.start, []),
        (HealthCheckServer.stop, []),
        (FileTimerRequest.__init__, ["worker_pid", "scope_id", "expiration_time", "signal"]),
        (LocalElasticAgent._set_local_rank_env, ["worker_env", "local_rank", "spec"]),
        (PContext.start, []),
        (PContext._start, []),
        (PContext._poll, []),
        (PContext._close, ["death_sig", "timeout"]),
        (PContext.close, ["death_sig", "timeout"]),
        (PContext.pids, []),
        (PContext.wait, ["timeout", "period"]),
        (LogsSpecs.reify, ["envs"]),
        (LogsSpecs.__init__, ["log_dir", "redirects", "tee", "local_ranks_filter"]),
        (_maybe_wrap_command_args_with_numa_binding, ["command_args", "gpu_index", "numa_options"]),
        (torchrun.config_from_args, ["args"]),
        (torchrun.determine_local_world_size, ["nproc_per_node"]),
        (torchrun.get_args_parser, []),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_parameters(function: Callable[..., Any], parameters: list[str]) -> None:
    assert _parameters(function) == parameters


def test_parameters_of_which_some_are_used() -> None:
    assert _parameters(LocalElasticAgent._construct_event)[:3] == ["state", "source", "worker"]
    assert {"spec", "logs_specs", "log_line_prefix_template", "shutdown_timeout"} <= set(_parameters(LocalElasticAgent))
    assert _parameters(Worker) == ["local_rank", "global_rank", "role_rank", "world_size", "role_world_size"]
    assert _parameters(RunResult) == ["state", "return_values", "failures"]
    assert _parameters(PContext) == [
        "name",
        "entrypoint",
        "args",
        "envs",
        "logs_specs",
        "log_line_prefixes",
        "duplicate_stdout_filters",
        "duplicate_stderr_filters",
    ]
    assert set(_parameters(LogsDest)) == {
        "stdouts",
        "stderrs",
        "tee_stdouts",
        "tee_stderrs",
        "error_files",
        "filtered_stdout",
        "filtered_stderr",
    }


def test_every_field_of_a_launch_configuration_is_known() -> None:
    # A field that torch adds is an option of torchrun that would be taken and then ignored.
    assert set(_parameters(LaunchConfig)) == {
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


class _Handler(RendezvousHandler):
    def get_backend(self) -> str:
        return "none"

    def next_rendezvous(self) -> Any:
        raise NotImplementedError

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "run"

    def shutdown(self) -> bool:
        return True


class _Specs(LogsSpecs):
    @property
    def root_log_dir(self) -> str:
        return ""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        empty = dict.fromkeys(envs, "")
        return LogsDest(dict(empty), dict(empty), dict(empty), dict(empty), dict(empty), "", "")


def _agent() -> LocalElasticAgent:
    spec = WorkerSpec(role="trainer", local_world_size=2, rdzv_handler=_Handler(), entrypoint="true", max_restarts=3)
    return LocalElasticAgent(spec, _Specs(), shutdown_timeout=7, log_line_prefix_template="x")


def test_what_an_agent_knows() -> None:
    agent = _agent()
    group = agent._worker_group
    assert agent._remaining_restarts == 3
    assert (agent._pcontext, agent._worker_watchdog, agent._health_check_server) == (None, None, None)
    for name in ("store", "group_rank", "group_world_size", "master_addr", "master_port", "workers", "state", "spec"):
        assert hasattr(group, name), name
    assert group.state is WorkerState.INIT
    event = agent._construct_event("START", EventSource.WORKER, group.workers[0])
    assert {"run_id", "global_rank", "worker_id", "agent_restarts", "metadata"} <= set(event.metadata)


def test_the_agent_of_ours_overrides_what_is_there() -> None:
    for name in ("_invoke_run", "_shutdown"):
        assert name in vars(TorchAgent)
        assert hasattr(LocalElasticAgent, name)
        assert _parameters(getattr(TorchAgent, name)) == _parameters(getattr(LocalElasticAgent, name))
    for name in ("start", "_start", "_poll", "_close", "pids", "wait"):
        assert name in vars(WarmContext)
        assert _parameters(getattr(WarmContext, name)) == _parameters(getattr(PContext, name))
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
        ("agent/forkserver/torch_context.py", "torch.numa.binding._maybe_wrap_command_args_with_numa_binding")
    }
    assert all(getattr(torch.distributed, name.rpartition(".")[2]) is not None for name in stores)


class _Context(PContext):
    def _start(self) -> None:
        raise NotImplementedError

    def _poll(self) -> RunProcsResult | None:
        return None

    def pids(self) -> dict[int, int]:
        return {}

    def _close(self, death_sig: Any, timeout: int = 30) -> None:
        pass


def test_what_a_context_of_processes_knows() -> None:
    context = _Context("trainer", "true", {0: ()}, {0: {}}, _Specs())
    assert (context.name, context.entrypoint, context.args, context.nprocs) == ("trainer", "true", {0: ()}, 1)
    assert context.stdouts == context.stderrs == context.error_files == {0: ""}
    assert context._tail_logs
    for tail in context._tail_logs:
        assert isinstance(tail, TailLog)
        for name in ("_name", "_dst", "_log_files", "_log_line_prefixes", "_log_line_filter"):
            assert hasattr(tail, name), name
    context.close()


def test_what_monitors_workers_asks_of_the_context_and_nothing_else() -> None:
    agent = _agent()
    for worker, pid in zip(agent._worker_group.workers, (10, 11), strict=True):
        worker.id = pid
    asked: list[tuple[object, ...]] = []

    class Asked:
        def pids(self) -> dict[int, int]:
            return {0: 10, 1: 11}

        def wait(self, *arguments: object) -> None:
            asked.append(arguments)

    agent._pcontext = Asked()  # type: ignore[assignment]
    assert agent._monitor_workers(agent._worker_group).state is WorkerState.HEALTHY
    # With 0 it never blocks.
    assert asked == [(0,)]


def test_event_handlers_are_registered_in_a_dictionary() -> None:
    assert {"null", "console"} <= set(handlers._log_handlers)


def test_a_store_takes_a_socket_that_listens_already() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    assert store.port == port
    store.set("key", "value")
    assert TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False).get("key") == b"value"


def test_whoever_waits_in_a_store_comes_back_when_its_last_reference_goes() -> None:
    agent = TorchAgent(_agent()._worker_group.spec, _Specs(), lambda: RunResult(state=WorkerState.HEALTHY), print)
    agent.serve_store(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    client = TCPStore("127.0.0.1", agent._worker_group.store.port, is_master=False, wait_for_workers=False)
    ended = threading.Event()

    def wait() -> None:
        with contextlib.suppress(torch.distributed.DistError):
            client.wait(["key"], timedelta(seconds=600))
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    assert not ended.wait(0.1)
    agent.serve_store(None)
    assert ended.wait(60)


def test_the_launcher_shuts_the_rendezvous_down_while_a_failure_is_on_its_way() -> None:
    # SlurmRendezvousHandler.shutdown looks at sys.exc_info(); only a finally clause shows it.
    lines = [line.strip() for line in inspect.getsource(launch_agent).splitlines()]
    end = lines.index("spec.rdzv_handler.shutdown()")
    assert lines[end - 2 : end] == ["finally:", "if shutdown_rdzv:"]
