"""The one place that imports etcd3, and with it grpc and protobuf.

The generated code in etcd3 0.12.0 predates protobuf 4 and is refused by its C implementation ("Descriptors cannot be
created directly"); protobuf's pure Python implementation takes it. Which of the two a process gets is decided by
PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION at protobuf's first import and never again. So the variable is set for that
one import and taken out again, and no worker that uses protobuf itself inherits the slow one.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
from dataclasses import dataclass
from typing import Any

from slurm_elastic.environment import changed_environment
from slurm_elastic.errors import UsageError

_IMPLEMENTATION = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"
_SETTINGS = {
    # gRPC's core writes to stderr by itself, for example at each failed TLS handshake. We report each failure, once.
    "GRPC_VERBOSITY": "NONE",
    # Otherwise gRPC (1.85) starts its threads anew in every forked child. The process that serves the workers' store
    # closes the descriptors that those threads wait on, and gRPC aborts it. No child of an agent calls etcd.
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}


@dataclass(frozen=True, slots=True)
class Rpc:
    """The modules behind etcd's API.

    Attributes:
        grpc: The module grpc.
        etcd: The messages of etcd's API, etcd3.etcdrpc.
    """

    grpc: Any
    etcd: Any


@functools.cache
def load_rpc() -> Rpc:
    """Import etcd3 and return what it brings.

    Raises:
        UsageError: protobuf is in this process already, in an implementation that etcd3 cannot use, or etcd3 is
            not installed.
    """
    module = sys.modules.get("google.protobuf.internal.api_implementation")
    if module is not None and (loaded := str(module.Type())) != "python":
        raise UsageError(
            f"protobuf is already imported in its {loaded!r} implementation, with which etcd3 does not work; "
            f"set {_IMPLEMENTATION}=python in the environment of this program, or connect to etcd before anything "
            "else imports protobuf"
        )
    defaults = {name: os.environ.get(name, value) for name, value in _SETTINGS.items()}
    try:
        with changed_environment({_IMPLEMENTATION: "python", **defaults}), warnings.catch_warnings():
            # The age of the generated code again; one warning for each field of each message.
            warnings.simplefilter("ignore", DeprecationWarning)
            return Rpc(grpc=importlib.import_module("grpc"), etcd=importlib.import_module("etcd3.etcdrpc"))
    except ImportError as error:
        raise UsageError(f"cannot import etcd3, the client of etcd ({error}); pip install etcd3") from error
