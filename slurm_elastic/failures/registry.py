"""The registry of causes of worker failures: one row for each text or signal that tells one. Data only.

A row is found by the text of a failure (its traceback, or the end of its stderr) and by its exit code. Rows stand in
the order in which they are tried, so special ones come before general ones. docs/failures.md has the same table.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BY_KERNEL", "BY_WATCHDOG", "REGISTRY", "Cause", "Domain", "Outlook", "mistakes"]

BY_WATCHDOG = "by the watchdog: "
"""The beginning of the message of a worker that the watchdog killed."""
BY_KERNEL = "by the kernel: "
"""The beginning of the message of a worker that the kernel killed for lack of memory."""


class Domain(enum.Enum):
    """The part of a run that has failed."""

    USER_CODE = "user_code"
    DATA = "data"
    NODE = "node"
    NETWORK = "network"
    STORAGE = "storage"
    SLURM = "slurm"
    UNKNOWN = "unknown"

    @property
    def words(self) -> str:
        """The domain as a person reads it."""
        return {Domain.SLURM: "Slurm"}.get(self, self.value.replace("_", " "))


class Outlook(enum.Enum):
    """The effect that another start can have."""

    AGAIN = "again"
    """The same can succeed when it starts again."""
    NOT_AGAIN = "not_again"
    """It fails again until a person changes something."""
    ELSEWHERE = "elsewhere"
    """It can succeed on another node."""
    UNKNOWN = "unknown"

    @property
    def words(self) -> str:
        """The outlook as a person reads it; empty if it is unknown."""
        return {
            Outlook.AGAIN: "a restart can help",
            Outlook.NOT_AGAIN: "a restart will not help",
            Outlook.ELSEWHERE: "another node can help",
            Outlook.UNKNOWN: "",
        }[self]


@dataclass(frozen=True, slots=True)
class Cause:
    """A row: a cause, and how to know it.

    Attributes:
        name: The name of the cause in records; never changed, as programs read it.
        title: The cause in a few words; empty for a row that says no more than the message of the failure.
        domain: The part of the run that has failed.
        outlook: What another start can bring.
        text: Found in the text of the failure; `^` stands for the beginning of a line. None if `signals` alone tell.
        signals: Numbers of signals by one of which the worker ended; empty for every end.
        consequence: True if another worker, or the agent, made this one fail.
        advice: What a person can do; empty for nothing in general.
        source: Where the text or the meaning comes from.
    """

    name: str
    title: str
    domain: Domain
    outlook: Outlook
    text: re.Pattern[str] | None = None
    signals: tuple[int, ...] = ()
    consequence: bool = False
    advice: str = ""
    source: str = ""


def _text(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.MULTILINE)


_ERRNO = r"^[\w.]*(?:Error|Exception)[\w.]*: (?:.*: )?\[Errno {}\]"
"""An OSError of Python, or an exception that quotes one; {} is its number (errno(3), x86-64 and arm64 Linux)."""
_RAISED = r"^(?:[\w.]*\.)?(?:{})(?::|$)"
"""The last line of a traceback; {} are names of exceptions, with or without their modules."""

# Numbers of signal(7), the same on x86-64 and arm64.
_HUP, _INT, _ILL, _ABRT, _BUS, _FPE, _KILL, _SEGV, _TERM = 1, 2, 4, 6, 7, 8, 9, 11, 15

REGISTRY: tuple[Cause, ...] = (
    # What the agent itself knows.
    Cause(
        "hang",
        "",
        Domain.UNKNOWN,
        Outlook.UNKNOWN,
        _text(rf"\A{BY_WATCHDOG}"),
        advice="read stacks.txt beside the logs of the rank that is behind",
        source="slurm_elastic.agent.watchdog",
    ),
    Cause(
        "host_memory",
        "out of host memory",
        Domain.USER_CODE,
        Outlook.NOT_AGAIN,
        _text(
            rf"\A{BY_KERNEL}|{_RAISED.format('MemoryError|OutOfMemoryError')}(?!.*(?:CUDA|HIP|XPU|GPU))"
            r"|DefaultCPUAllocator: (?:can't allocate memory|not enough memory)|^.*what\(\):\s+std::bad_alloc"
        ),
        advice="ask for more memory (sbatch --mem), or use fewer data loader processes",
        source="memory.events in kernel.org cgroup-v2.html; c10/core/impl/alloc_cpu.cpp, torch 2.13",
    ),
    Cause(
        "slurm_memory_limit",
        "the memory limit of the job",
        Domain.SLURM,
        Outlook.NOT_AGAIN,
        _text(r"^slurmstepd: error: .*(?:[Ee]xceeded (?:job|step) memory limit|oom[-_ ]kill)"),
        advice="ask for more memory (sbatch --mem)",
        source="slurmstepd, 22.05 (Exceeded job memory limit) and 24.11 (Detected oom_kill event)",
    ),
    # GPUs. A lost or broken GPU comes before what the script does with it.
    Cause(
        "gpu_hardware",
        "a GPU is broken",
        Domain.NODE,
        Outlook.ELSEWHERE,
        _text(
            r"uncorrectable (?:ECC|NVLink) error|CUDA error: hardware stack error|fallen off the bus|GPU is lost"
            r"|NVRM: Xid .*: (?:48|63|64|74|79|92|94|95|119|120)\b"
        ),
        advice="have the node drained and look for Xid in its kernel log",
        source="cudaErrorECCUncorrectable, cudaErrorNvlinkUncorrectable, cudaErrorHardwareStackError (CUDA runtime API)"
        "; docs.nvidia.com Xid catalogue",
    ),
    Cause(
        "gpu_missing",
        "no usable GPU",
        Domain.NODE,
        Outlook.ELSEWHERE,
        _text(
            r"no CUDA-capable device is detected|CUDA driver initialization failed"
            r"|CUDA error: system (?:not yet initialized|has unsupported)"
            r"|all CUDA-capable devices are busy or unavailable|^ImportError: libcuda\.so|Found no NVIDIA driver"
        ),
        advice="compare nvidia-smi on this node with another one",
        source="cudaErrorNoDevice, cudaErrorDevicesUnavailable, cudaErrorSystemNotReady (CUDA runtime API); "
        "torch/cuda/__init__.py and torch/csrc/cuda, 2.13",
    ),
    Cause(
        "gpu_memory",
        "out of GPU memory",
        Domain.USER_CODE,
        Outlook.NOT_AGAIN,
        _text(
            r"(?:CUDA|HIP|XPU) out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
            r"|CUDNN_STATUS_ALLOC_FAILED"
        ),
        advice="take smaller batches, or shard the model over more GPUs",
        source="c10/cuda/CUDACachingAllocator.cpp, torch 2.13; cudaErrorMemoryAllocation",
    ),
    Cause(
        "gpu_assertion",
        "an assertion in a GPU kernel",
        Domain.DATA,
        Outlook.UNKNOWN,
        _text(r"CUDA error: device-side assert triggered"),
        advice="look for an index out of range, such as a label or token; CUDA_LAUNCH_BLOCKING=1 names the line",
        source="cudaErrorAssert (CUDA runtime API)",
    ),
    Cause(
        "gpu_device_number",
        "a GPU that the job does not have",
        Domain.USER_CODE,
        Outlook.NOT_AGAIN,
        _text(r"CUDA error: invalid device ordinal|^(?:AcceleratorError|RuntimeError): .*Duplicate GPU detected"),
        advice="use LOCAL_RANK as the number of the GPU, and no more workers per node than GPUs",
        source="cudaErrorInvalidDevice (CUDA runtime API); nccl/src/init.cc, 2.27",
    ),
    Cause(
        "gpu_kernel",
        "a GPU kernel failed",
        Domain.USER_CODE,
        Outlook.UNKNOWN,
        _text(
            r"CUDA error: (?:an illegal memory access|an illegal instruction|misaligned address|invalid program counter"
            r"|unspecified launch failure|unknown error)|CUBLAS_STATUS_EXECUTION_FAILED|NVRM: Xid .*: (?:13|31|43|45)\b"
        ),
        advice="CUDA_LAUNCH_BLOCKING=1 names the line; if it is always the same node, have that looked at",
        source="cudaErrorIllegalAddress and others (CUDA runtime API); docs.nvidia.com Xid catalogue",
    ),
    # Collectives: what the death of a peer looks like from here.
    Cause(
        "port_taken",
        "a port is taken",
        Domain.NODE,
        Outlook.AGAIN,
        _text(r"\[Errno 98\]|[Aa]ddress already in use|EADDRINUSE"),
        advice="let the script choose no port of its own: init_method=env://",
        source="EADDRINUSE of errno(3)",
    ),
    Cause(
        "name_service",
        "a host name is not known",
        Domain.NETWORK,
        Outlook.AGAIN,
        _text(r"Temporary failure in name resolution|Name or service not known|\[Errno -[23]\] "),
        advice="look at /etc/resolv.conf and /etc/hosts of the node",
        source="gai_strerror(3)",
    ),
    Cause(
        "no_route",
        "another node is not reachable",
        Domain.NETWORK,
        Outlook.ELSEWHERE,
        _text(r"No route to host|Network is unreachable"),
        advice="try slurm-elastic doctor --nodes 2, and --interface",
        source="EHOSTUNREACH, ENETUNREACH of errno(3)",
    ),
    Cause(
        "peer_at_loopback",
        "no peer at a loopback address",
        Domain.NETWORK,
        Outlook.UNKNOWN,
        _text(r"Gloo connectFullMesh failed .*remote=\[(?:127\.|::1\]|::ffff:127\.)"),
        # On one node it is as good as any, and the peer has gone.
        consequence=True,
        advice="on several nodes give --interface with the name of the network between them: host names do not resolve",
        source="gloo/transport/tcp/pair.cc; ProcessGroupGloo.cpp, createDefaultDevice, torch 2.13",
    ),
    Cause(
        "peer_gone",
        "a peer has gone",
        Domain.UNKNOWN,
        Outlook.UNKNOWN,
        _text(
            r"Connection (?:closed|reset) by (?:remote )?peer|Connection was likely closed|Socket closed|[Bb]roken pipe"
            r"|failed to (?:recv|send), got 0 bytes|DistNetworkError|DistStoreError|ncclRemoteError|Connection refused"
            r"|ncclCommAbort|communicator (?:was|is) aborted|NCCL communicator was aborted"
            r"|remote process (?:exiting|exited)|Gloo (?:all\w+|connectFullMesh|barrier) failed"
        ),
        consequence=True,
        source="gloo/transport/tcp/pair.cc; torch/csrc/distributed/c10d: TCPStore.cpp, socket.cpp, NCCLUtils.cpp, 2.13",
    ),
    Cause(
        "collective_timeout",
        "a collective timed out",
        Domain.UNKNOWN,
        Outlook.UNKNOWN,
        _text(
            r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for (?:recv|send) operation"
            r"|monitoredBarrier|wait timeout after \d+ms|Timed out after \d+ seconds waiting for clients"
        ),
        consequence=True,
        advice="the rank that did not come to the collective is the one to look at",
        source="torch/csrc/distributed/c10d: ProcessGroupNCCL.cpp, TCPStore.cpp, 2.13; gloo: unbound_buffer.cc",
    ),
    Cause(
        "nccl_system",
        "NCCL failed in a system call",
        Domain.NETWORK,
        Outlook.AGAIN,
        _text(r"ncclSystemError|ncclInternalError|NCCL WARN .*(?:ibv_|Call to connect|NET/IB)"),
        advice="NCCL_DEBUG=WARN names the call; try slurm-elastic doctor --nodes 2",
        source="ncclResult_t in nccl.h, 2.27; torch/csrc/distributed/c10d/NCCLUtils.cpp, 2.13",
    ),
    Cause(
        "nccl_usage",
        "NCCL was called in a wrong way",
        Domain.USER_CODE,
        Outlook.NOT_AGAIN,
        _text(r"ncclInvalidUsage|ncclInvalidArgument"),
        source="ncclResult_t in nccl.h, 2.27",
    ),
    # Files.
    Cause(
        "node_disk_full",
        "a disk of the node is full",
        Domain.NODE,
        Outlook.ELSEWHERE,
        _text(
            r"\[Errno 28\].*'(?:/tmp|/var|/dev/shm|/run|/local\w*|/scratch/local)\b|insufficient shared memory \(shm\)"
            r"|unable to (?:write to file|open shared memory object) </torch_"
        ),
        advice="look at /tmp and /dev/shm of the node",
        source="ENOSPC of errno(3); torch/utils/data/_utils/worker.py and aten/src/ATen/MapAllocator.cpp, 2.13",
    ),
    Cause(
        "disk_full",
        "a file system is full",
        Domain.STORAGE,
        Outlook.NOT_AGAIN,
        _text(r"\[Errno 28\]|No space left on device"),
        advice="make room, and start the job again",
        source="ENOSPC of errno(3)",
    ),
    Cause(
        "quota",
        "the quota is used up",
        Domain.STORAGE,
        Outlook.NOT_AGAIN,
        _text(r"\[Errno 122\]|Disk quota exceeded"),
        advice="make room, and start the job again",
        source="EDQUOT of errno(3)",
    ),
    Cause(
        "read_only",
        "a file system is read-only",
        Domain.NODE,
        Outlook.ELSEWHERE,
        _text(_ERRNO.format(30)),
        advice="the kernel makes a damaged disk read-only: have the node looked at",
        source="EROFS of errno(3); errors=remount-ro of ext4(5)",
    ),
    Cause(
        "file_system",
        "the file system failed",
        Domain.STORAGE,
        Outlook.AGAIN,
        _text(_ERRNO.format("(?:5|107|108|110|116|121)")),
        advice="if it comes again, have the file system looked at",
        source="EIO, ENOTCONN, ESHUTDOWN (Lustre: evicted), ETIMEDOUT, ESTALE, EREMOTEIO of errno(3)",
    ),
    Cause(
        "descriptors",
        "too many open files",
        Domain.USER_CODE,
        Outlook.NOT_AGAIN,
        _text(r"\[Errno 24\]|Too many open files|received 0 items of ancdata"),
        advice="torch.multiprocessing.set_sharing_strategy('file_system'), or ulimit -n in the batch script",
        source="EMFILE of errno(3); torch/multiprocessing/reductions.py, 2.13",
    ),
    # Data and checkpoints.
    Cause(
        "checkpoint_damaged",
        "a checkpoint is damaged",
        Domain.DATA,
        Outlook.NOT_AGAIN,
        _text(r"PytorchStreamReader failed|SafetensorError|UnpicklingError|CheckpointException"),
        advice="remove the newest checkpoint and start from the one before",
        source="caffe2/serialize/inline_container.cc and distributed/checkpoint/api.py, torch 2.13; safetensors 0.5",
    ),
    Cause(
        "data_damaged",
        "the data cannot be read",
        Domain.DATA,
        Outlook.NOT_AGAIN,
        _text(
            _RAISED.format(
                r"UnicodeDecodeError|JSONDecodeError|UnidentifiedImageError|BadZipFile|BadGzipFile|ArrowInvalid|EOFError"
                r"|LZMAError|ReadError"
            )
        ),
        source="docs.python.org exceptions, json, zipfile, gzip, tarfile; Pillow 11, pyarrow 20",
    ),
    Cause(
        "data_loader_killed",
        "a process of the data loader died",
        Domain.USER_CODE,
        Outlook.UNKNOWN,
        _text(r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:exited unexpectedly|is killed by signal)"),
        advice=(
            "most often for lack of memory: fewer num_workers, or more memory; spawned ones also where the script has "
            'no if __name__ == "__main__"'
        ),
        source="torch/utils/data/dataloader.py and _utils/signal_handling.py, 2.13",
    ),
    Cause(
        "not_finite",
        "NaN or infinity",
        Domain.USER_CODE,
        Outlook.UNKNOWN,
        _text(
            r"^FloatingPointError|returned nan values in its"
            r"|(?i:^[\w.]*(?:Error|Exception): .*\b(?:loss|grad\w*|norm|param\w*)\b.*"
            r"\b(?:nan|inf|infinite|non-?finite|not finite)\b)"
        ),
        advice="look at the data and the learning rate of this step",
        source="torch/autograd/anomaly_mode.py and nn/utils/clip_grad.py (error_if_nonfinite), 2.13",
    ),
    # The script.
    Cause(
        "syntax",
        "the script is no valid Python",
        Domain.USER_CODE,
        Outlook.NOT_AGAIN,
        _text(_RAISED.format("SyntaxError|IndentationError|TabError")),
        source="docs.python.org exceptions",
    ),
    Cause(
        "import",
        "a module is missing",
        Domain.USER_CODE,
        Outlook.NOT_AGAIN,
        _text(_RAISED.format("ModuleNotFoundError|ImportError") + r"|^\S*python\S*: No module named "),
        advice="activate the environment in the batch script, before srun",
        source="docs.python.org exceptions; Lib/runpy.py, CPython 3.13",
    ),
    Cause(
        "file_missing",
        "a file is missing",
        Domain.USER_CODE,
        Outlook.NOT_AGAIN,
        _text(
            _RAISED.format("FileNotFoundError|NotADirectoryError|IsADirectoryError")
            + r"|: can't open file '.*\[Errno 2\]"
        ),
        source="docs.python.org exceptions; Modules/main.c, CPython 3.13",
    ),
    Cause(
        "permission",
        "access is denied",
        Domain.USER_CODE,
        Outlook.NOT_AGAIN,
        _text(_RAISED.format("PermissionError") + r"|\[Errno 13\]"),
        source="EACCES, EPERM of errno(3)",
    ),
    Cause(
        "arguments",
        "the arguments of the script",
        Domain.USER_CODE,
        Outlook.NOT_AGAIN,
        _text(r"^usage: [\s\S]*^\S+: error: "),
        source="Lib/argparse.py, CPython 3.13: ArgumentParser.error",
    ),
    Cause(
        "cannot_run",
        "the program cannot be run",
        Domain.USER_CODE,
        Outlook.NOT_AGAIN,
        _text(r"^\[Errno (?:2|8|13)\] .*(?:No such file|Exec format|Permission denied)|: command not found$"),
        source="execve(2); the agent's own words for a program that it cannot start",
    ),
    Cause(
        "shapes",
        "tensors that do not fit",
        Domain.USER_CODE,
        Outlook.NOT_AGAIN,
        _text(
            r"Error\(s\) in loading state_dict for|size mismatch for |shapes cannot be multiplied"
            r"|must match the size of tensor|Expected all tensors to be on the same device"
        ),
        source="torch/nn/modules/module.py and ATen, 2.13",
    ),
    Cause(
        "mistake",
        "a mistake in the script",
        Domain.USER_CODE,
        Outlook.NOT_AGAIN,
        _text(
            _RAISED.format("NameError|UnboundLocalError|AttributeError|TypeError|NotImplementedError|RecursionError")
        ),
        source="docs.python.org exceptions",
    ),
    Cause(
        "assertion",
        "an assertion",
        Domain.USER_CODE,
        Outlook.UNKNOWN,
        _text(r"^AssertionError\b"),
        source="docs.python.org exceptions",
    ),
    Cause(
        "left_thread",
        "a library's thread still ran at the end",
        Domain.USER_CODE,
        Outlook.AGAIN,
        # After an exception it is the exception that tells.
        _text(
            r"\A(?![\s\S]*^Traceback \(most recent call last\):)[\s\S]*^terminate called without an active exception"
        ),
        advice="call torch.distributed.destroy_process_group() at the end of the script",
        source="std::thread::~thread, libstdc++ 12; gloo in a script that does not call it, now and then, torch 2.14",
    ),
    # Ends by a signal that say no more.
    Cause(
        "native_crash",
        "a crash in native code",
        Domain.USER_CODE,
        Outlook.UNKNOWN,
        signals=(_SEGV, _ABRT, _BUS, _FPE),
        advice="PYTHONFAULTHANDLER=1 prints the Python stack of the next one",
        source="signal(7)",
    ),
    Cause(
        "illegal_instruction",
        "an instruction that this CPU does not have",
        Domain.USER_CODE,
        Outlook.ELSEWHERE,
        signals=(_ILL,),
        advice="ask for nodes with the CPU that the libraries were built for (sbatch --constraint)",
        source="signal(7)",
    ),
    Cause(
        "stopped",
        "stopped by a signal",
        Domain.UNKNOWN,
        Outlook.UNKNOWN,
        _text(r"^(?:KeyboardInterrupt\b|[\w.]*SignalException: )"),
        consequence=True,
        source="signal(7); torch/distributed/elastic/multiprocessing/api.py, 2.13",
    ),
    Cause(
        "terminated",
        "stopped by a signal",
        Domain.UNKNOWN,
        Outlook.UNKNOWN,
        signals=(_TERM, _INT, _HUP),
        consequence=True,
        source="signal(7)",
    ),
    Cause(
        "killed",
        "",
        Domain.UNKNOWN,
        Outlook.UNKNOWN,
        signals=(_KILL,),
        source="signal(7)",
    ),
    Cause(
        "exception",
        "",
        Domain.USER_CODE,
        Outlook.UNKNOWN,
        _text(r"^Traceback \(most recent call last\):"),
        source="Lib/traceback.py, CPython 3.13",
    ),
)
"""All causes, in the order in which they are tried."""

_INNOCENT = (
    "",
    "epoch 3 loss 0.25",
    "UserWarning: this is slow",
    'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\nValueError: told to fail',
)
"""Texts that tell no cause but that a script has failed."""


def mistakes(registry: Sequence[Cause]) -> list[str]:
    """Return one line for each row that would take failures from other rows; empty for a sound registry.

    Args:
        registry: Rows in the order in which they are tried.
    """
    found = [
        f"{row.name}: the name stands twice" for row in registry if [each.name for each in registry].count(row.name) > 1
    ]
    for row in registry:
        if row.text is None and not row.signals:
            found.append(f"{row.name}: it has neither a text nor a signal, so it is never found")
        if row.title and row.text is not None and any(row.text.search(text) for text in _INNOCENT):
            found.append(f"{row.name}: its text is in every failure; write it so that it is in this one alone")
        if not row.source:
            found.append(f"{row.name}: its source is missing")
    return found
