"""protobuf's implementation is chosen once in a process, so each case is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
VARIABLE = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"


def run(program: str, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-c", program],
        env={**clean, "PYTHONPATH": str(REPOSITORY), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout.strip()


def test_client_leaves_the_environment_as_it_was() -> None:
    program = f"""
import os
before = dict(os.environ)
from slurm_elastic.rendezvous.records.etcd.failover_channel import load_rpc
load_rpc().etcd.PutRequest(key=b"k").SerializeToString()
assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
from google.protobuf.internal import api_implementation
print(api_implementation.Type(), os.environ.get({VARIABLE!r}))
"""
    assert run(program) == "python None"
    assert run(program, **{VARIABLE: "upb"}) == "python upb"


def test_torchrun_s_import_of_the_handler_loads_no_protobuf() -> None:
    program = """
import sys
import slurm_elastic.rendezvous.records.etcd.store
import torch.distributed.elastic.rendezvous
from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry
assert "etcd-v3" in rendezvous_handler_registry._registry
print([name for name in sys.modules if name.startswith(("google.protobuf", "grpc", "etcd3"))])
"""
    assert run(program) == "[]"


def test_protobuf_of_another_implementation_is_refused_in_one_line() -> None:
    program = """
from google.protobuf.internal import api_implementation
from slurm_elastic.errors import UsageError
from slurm_elastic.rendezvous.records.etcd.client import EtcdClient
from slurm_elastic.rendezvous.records.etcd.config import load_config
try:
    EtcdClient(load_config("etcd://localhost"))
except UsageError as error:
    print(error)
"""
    line = run(program)
    assert "\n" not in line
    assert f"set {VARIABLE}=python" in line
    assert run(program, **{VARIABLE: "python"}) == ""
