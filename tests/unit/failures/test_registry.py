"""Each row of the registry of failures is found by what it stands for, and by no other row's text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slurm_elastic.failures.causes import (
    BY_KERNEL,
    BY_WATCHDOG,
    Attribution,
    Cause,
    Outlook,
    attribute,
    explanation,
    named,
    registry,
)
from tests import planted_faults
from tests.local.agent.scripts.faults import FAULTS

PAGE = Path(__file__).parents[3] / "docs" / "failures.md"
PEER = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711"
NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, "
    "{}, NCCL version 2.27.3"
)
GPU_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB of "
    "which 1.2 GiB is free. Process 4711 has 12.50 GiB memory in use. Including non-PyTorch memory, this process has "
    "65.2 GiB memory in use."
)

EXAMPLES: list[tuple[str, str, int]] = [
    ("hang", f"{BY_WATCHDOG}no step for 60 s", -9),
    ("host_memory", f"{BY_KERNEL}out of memory on n1; rank 1 has 3 GiB", -9),
    ("host_memory", "MemoryError", 1),
    (
        "host_memory",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:119] . DefaultCPUAllocator: can't allocate memory",
        1,
    ),
    ("host_memory", "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc", -6),
    ("slurm_memory_limit", "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.", 1),
    ("gpu_hardware", "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", 1),
    ("gpu_hardware", "NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off the bus.", 1),
    ("gpu_missing", "RuntimeError: CUDA error: no CUDA-capable device is detected", 1),
    ("gpu_missing", "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory", 1),
    ("gpu_memory", GPU_MEMORY, 1),
    ("gpu_memory", "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", 1),
    ("gpu_assertion", "torch.AcceleratorError: CUDA error: device-side assert triggered", 1),
    ("gpu_device_number", "torch.AcceleratorError: CUDA error: invalid device ordinal", 1),
    ("gpu_kernel", "torch.AcceleratorError: CUDA error: an illegal memory access was encountered", 1),
    ("name_service", "socket.gaierror: [Errno -3] Temporary failure in name resolution", 1),
    ("no_route", "RuntimeError: [pair.cc:144] connect: No route to host", 1),
    (
        "peer_at_loopback",
        "RuntimeError: Gloo connectFullMesh failed with [/third_party/gloo/gloo/transport/tcp/pair.cc:152] timed out "
        "connecting: SO_ERROR: Connection refused, remote=[127.0.1.1]:55220$1",
        1,
    ),
    (
        "peer_gone",
        "RuntimeError: Gloo connectFullMesh failed with [/third_party/gloo/gloo/transport/tcp/pair.cc:152] timed out "
        "connecting: SO_ERROR: Connection refused, remote=[10.0.0.7]:55220$1",
        1,
    ),
    ("peer_gone", PEER, 1),
    ("peer_gone", NCCL.format("remote process exited or there was a network error, ncclRemoteError"), 1),
    ("peer_gone", "torch.distributed.DistNetworkError: failed to recv, got 0 bytes", 1),
    ("collective_timeout", "RuntimeError: [unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation", 1),
    ("collective_timeout", "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)", -6),
    ("nccl_system", NCCL.format("unhandled system error (run with NCCL_DEBUG=INFO for details), ncclSystemError"), 1),
    ("nccl_usage", NCCL.format("invalid usage, ncclInvalidUsage"), 1),
    ("node_disk_full", "OSError: [Errno 28] No space left on device: '/tmp/cache/x.bin'", 1),
    ("node_disk_full", "RuntimeError: unable to write to file </torch_4711_1_0>: No space left on device (28)", 1),
    ("disk_full", "OSError: [Errno 28] No space left on device: '/home/u/runs/model.pt'", 1),
    ("quota", "OSError: [Errno 122] Disk quota exceeded: '/home/u/model.pt'", 1),
    ("read_only", "OSError: [Errno 30] Read-only file system: '/scratch/x'", 1),
    ("file_system", "OSError: [Errno 116] Stale file handle: '/home/u/data'", 1),
    ("file_system", "OSError: [Errno 5] Input/output error", 1),
    ("descriptors", "OSError: [Errno 24] Too many open files: 'x'", 1),
    ("port_taken", "torch.distributed.DistNetworkError: The server socket has failed to listen. EADDRINUSE", 1),
    ("port_taken", "OSError: [Errno 98] Address already in use", 1),
    ("checkpoint_damaged", "RuntimeError: PytorchStreamReader failed reading zip archive: not a ZIP archive", 1),
    ("checkpoint_damaged", "_pickle.UnpicklingError: pickle data was truncated", 1),
    ("data_damaged", "PIL.UnidentifiedImageError: cannot identify image file 'x.jpg'", 1),
    ("data_damaged", "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)", 1),
    ("data_loader_killed", "RuntimeError: DataLoader worker (pid(s) 12, 13) exited unexpectedly", 1),
    ("not_finite", "RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.", 1),
    ("not_finite", "ValueError: loss is nan at step 7", 1),
    ("syntax", '  File "train.py", line 1\n    x ==\n        ^\nSyntaxError: invalid syntax', 1),
    ("import", "ModuleNotFoundError: No module named 'nothing'", 1),
    ("import", "/usr/bin/python: No module named train", 1),
    ("file_missing", "FileNotFoundError: [Errno 2] No such file or directory: 'x.csv'", 1),
    ("file_missing", "python: can't open file '/home/u/train.py': [Errno 2] No such file or directory", 2),
    ("permission", "PermissionError: [Errno 13] Permission denied: '/data/x'", 1),
    ("arguments", "usage: train.py [-h] [--lr LR]\ntrain.py: error: unrecognized arguments: --rl", 2),
    ("cannot_run", "[Errno 2] No such file or directory: '/no/such/program'", 127),
    ("shapes", "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 4x8)", 1),
    ("mistake", "NameError: name 'modle' is not defined", 1),
    ("assertion", "AssertionError: sizes differ", 1),
    ("left_thread", "terminate called without an active exception", -6),
    ("native_crash", "", -11),
    ("native_crash", "Traceback (most recent call last):\nterminate called without an active exception", -6),
    ("illegal_instruction", "", -4),
    ("stopped", "KeyboardInterrupt", 1),
    ("terminated", "", -15),
    ("killed", "", -9),
    ("exception", "Traceback (most recent call last):\nValueError: told to fail", 1),
]


INNOCENT = (
    "",
    "epoch 3 loss 0.25",
    "UserWarning: this is slow",
    'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\nValueError: told to fail',
)
"""Texts that tell no cause but that a script has failed."""


@pytest.mark.parametrize("row", registry(), ids=lambda row: row.name)
def test_a_row_takes_no_failures_from_others(row: Cause) -> None:
    assert row.text is not None or row.signals
    if row.title and row.text is not None:
        assert not any(map(row.text.search, INNOCENT))


def test_every_row_has_an_example() -> None:
    assert {row.name for row in registry()} == {name for name, _, _ in EXAMPLES}


@pytest.mark.parametrize(("name", "text", "exit_code"), EXAMPLES)
def test_a_row_is_found(name: str, text: str, exit_code: int) -> None:
    assert attribute(text, exit_code).cause.name == name
    if not text.startswith(("by the ", "Traceback")) and exit_code > 0:
        frames = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    step()\n'
        assert attribute(f"epoch 3\n{frames}{text}\n", exit_code).cause.name == name
        prefixed = "".join(f"[rank3]: {line}\n" for line in f"{frames}{text}".split("\n"))
        assert attribute(prefixed, exit_code).cause.name == name


def test_the_page_has_every_row() -> None:
    table, _, faults = PAGE.read_text().partition("## Faults that are tested")
    told = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \|", table, flags=re.MULTILINE)
    words = {Outlook.NOT_AGAIN: "does not help", Outlook.AGAIN: "helps", Outlook.ELSEWHERE: "elsewhere"}
    assert told == [
        (row.name, row.title or "as its message says", row.domain.words, words.get(row.outlook, "?"))
        for row in registry()
    ]
    # `python -m tests.planted_faults` prints it.
    assert [line for line in faults.splitlines() if line.startswith("|")] == planted_faults.table()


def test_each_planted_fault_has_a_test_and_those_of_rounds_are_planted() -> None:
    tests = PAGE.parents[1] / "tests"
    for each in planted_faults.FAULTS:
        file, _, function = each.test.partition("::")
        text = (tests / file).read_text()
        assert re.search(rf"^def {function}\(", text, flags=re.MULTILINE), each.test
        # It compares the row's action with what the run has done.
        assert each.test == planted_faults.EACH_ROUND or f'"{each.fault}"' in text, each.fault
        assert each.cause in ("", "unknown") or named(each.cause) is not None
    of_rounds = [each.cause for each in planted_faults.FAULTS if each.test == planted_faults.EACH_ROUND]
    assert of_rounds == [cause for cause, _ in FAULTS]
    assert len(planted_faults.FAULTS) >= 25


def test_nothing_is_known_of_an_exit_code_alone() -> None:
    assert attribute("", 3) == attribute("just a warning", 3)
    assert attribute("", 3).cause.name == "unknown"
    assert explanation("unknown") == explanation("exception") == explanation("of a later release") == ""


def test_what_was_survived_is_no_cause() -> None:
    survived = "WARNING: Connection reset by peer, trying again\n" + "epoch\n" * 50
    assert attribute(survived, 3).cause.name == "unknown"
    handled = f"Traceback (most recent call last):\n{PEER}\nTraceback (most recent call last):\nNameError: x"
    assert attribute(handled, 1).cause.name == "mistake"
    # It was killed from outside, whatever it had said before.
    assert attribute(GPU_MEMORY, -9).cause.name == "killed"


def test_who_uses_the_memory() -> None:
    found = attribute(GPU_MEMORY, 1)
    assert found.detail == "process 4711 has 12.50 GiB memory in use, this process has 65.2 GiB memory in use"
    assert explanation(found.cause.name, found.detail) == (
        f"out of GPU memory (user code), a restart will not help; {found.detail}"
    )
    killed = attribute(f"{BY_KERNEL}out of memory on n1; rank 1 has 3 GiB\nepoch 3", -9)
    assert killed == Attribution(registry()[1], "out of memory on n1; rank 1 has 3 GiB")
