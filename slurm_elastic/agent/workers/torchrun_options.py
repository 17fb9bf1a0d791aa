"""The values of torchrun's options, computed by torch's own code (torch/distributed/run.py, 2.13)."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.events import handlers
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from slurm_elastic.agent.node.devices import asked_apart, no_devices
from slurm_elastic.errors import UsageError
from slurm_elastic.rendezvous.options import TORCHS_OWN
from slurm_elastic.rendezvous.records.api import is_etcd

_log = logging.getLogger(__name__)


def local_world_size(text: str | None, default: int) -> int:
    """Return the number of workers of this node.

    Raises:
        UsageError: ``--nproc-per-node`` is neither a positive number nor a kind of device of this node.
    """
    if text is None:
        return default
    try:
        workers: int = int(text) if text.isdecimal() else asked_apart(lambda: torchrun.determine_local_world_size(text))
    except ValueError as error:
        why = _line(error).rstrip(".")
        raise UsageError(f"--nproc-per-node {text!r}: {why}; give a number, auto, cpu or gpu") from None
    if workers < 1:
        raise UsageError(f"--nproc-per-node {text!r} makes {workers} workers on this node; give a number from 1 on")
    return workers


def endpoint(text: str | None) -> tuple[str | None, int | None]:
    """Return host and port of ``--rdzv-endpoint``, each None if not given; both None if it names an etcd.

    Raises:
        UsageError: The text is not ``HOST`` or ``HOST:PORT``.
    """
    if not text or is_etcd(text):
        return None, None
    try:
        host, port = parse_rendezvous_endpoint(text, default_port=-1)
    except ValueError:
        host, port = "", 0
    if not host or port == 0:
        raise UsageError(f"--rdzv-endpoint {text!r} is not HOST:PORT with a port from 1 to 65535; or leave it out")
    return host, port if port > 0 else None


def limit_threads(workers: int) -> bool:
    """Set OMP_NUM_THREADS where torchrun does, so that torch does not warn in eight lines; True if it was not set."""
    if workers == 1 or "OMP_NUM_THREADS" in os.environ:
        return False
    os.environ["OMP_NUM_THREADS"] = "1"
    return True


def ignored_options(options: argparse.Namespace) -> Iterable[str]:
    """Return one line for each given option, or key, that only torchrun's own rendezvous uses."""
    for name in ("node_rank", "master_addr"):
        if getattr(options, name) is not None:
            yield f"--{name.replace('_', '-')} is for torchrun's static rendezvous; it is ignored, Slurm says it"
    keys = {pair.partition("=")[0].strip() for pair in (options.rdzv_conf or "").split(",")}
    if keys & TORCHS_OWN:
        yield f"--rdzv-conf: ignored, as they are for torch's own rendezvous: {', '.join(sorted(keys & TORCHS_OWN))}"


def torchrun_config(
    options: argparse.Namespace, **resolved: object
) -> tuple[LaunchConfig, Callable[..., Any] | str, tuple[str, ...]]:
    """Let torch compute its configuration, the entry point and its arguments.

    torch reads TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE and PYTHON_EXEC from the environment. The logs specs are a
    placeholder unless ``--logs-specs`` names some.

    Raises:
        UsageError: torch rejects a value.
    """
    changes = {
        **vars(options),
        "rdzv_backend": "slurm",
        # Only the static rendezvous uses these, but torch parses them in any case.
        "node_rank": 0,
        "master_addr": "127.0.0.1",
        "master_port": 29500,
        # torch 2.11 has no such option, so the agent has it itself.
        "shutdown_timeout": 30,
        **resolved,
    }
    if options.logs_specs is None:
        # torch's own specs make a directory in /tmp when they are constructed.
        changes.update(log_dir=os.devnull, redirects="0", tee="0", local_ranks_filter="")
    else:
        changes.update(redirects=options.redirects or "0", tee=options.tee or "0")
    _require_numbers(options)
    try:
        # With as many workers as GPUs torch would take a default of NUMA bindings, which is none outside of Meta
        # (torch/_utils_internal.py, get_default_numa_options, 2.13).
        with no_devices():
            config, entrypoint, args = torchrun.config_from_args(argparse.Namespace(**changes))
    except (AssertionError, ValueError, RuntimeError, OSError) as error:
        raise UsageError(_line(error)) from None
    return config, entrypoint, tuple(args)


def _require_numbers(options: argparse.Namespace) -> None:
    """Check values that torch checks late, or by an assertion without a message."""
    if options.max_restarts < 0:
        raise UsageError(f"--max-restarts {options.max_restarts} is negative; give 0 or more")
    if options.monitor_interval <= 0:
        raise UsageError(f"--monitor-interval {options.monitor_interval:g} is not above 0; give seconds, as in 0.1")
    if options.event_log_handler not in handlers._log_handlers:
        names = ", ".join(sorted(handlers._log_handlers))
        raise UsageError(f"--event-log-handler {options.event_log_handler!r} is not registered; there are {names}")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
