"""The GPUs of this machine, and which processes have them open."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

DEVICES = "/dev/nvidia"
NO_GPU = "there is no NVIDIA GPU on this machine ({reason}); run make test-gpu where nvidia-smi --list-gpus shows one"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or an instance of one that is partitioned by MIG.

    Attributes:
        name: The name of the product.
        uuid: What CUDA_VISIBLE_DEVICES accepts.
        instances: UUIDs of its MIG instances.
    """

    name: str
    uuid: str
    instances: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        """What a process gets of it: all of it or, if it is partitioned, one instance."""
        return self.instances[0] if self.instances else self.uuid


def gpus_in(listing: str) -> tuple[Gpu, ...]:
    """Read what ``nvidia-smi --list-gpus`` prints."""
    found: list[Gpu] = []
    for line in listing.splitlines():
        if match := re.match(r"GPU \d+: (.*) \(UUID: (GPU-[^)]+)\)", line):
            found.append(Gpu(match[1], match[2]))
        elif (match := re.match(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)", line)) and found:
            last = found.pop()
            found.append(Gpu(last.name, last.uuid, (*last.instances, match[1])))
    return tuple(found)


def visible(found: tuple[Gpu, ...], variable: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves of all, as in a job that has some of them; all if it is None."""
    if variable is None:
        return found
    left = []
    for word in filter(None, (word.strip() for word in variable.split(","))):
        for index, gpu in enumerate(found):
            if word == str(index) or (word.startswith("GPU-") and gpu.uuid.startswith(word)):
                left.append(gpu)
            elif word in gpu.instances:
                left.append(Gpu(gpu.name, gpu.uuid, (word,)))
    return tuple(left)


def devices(found: tuple[Gpu, ...]) -> tuple[str, ...]:
    """Return the UUIDs of all that one process can use together: of GPUs with instances it sees one instance only.

    NVIDIA's MIG User Guide, "CUDA Device Enumeration".
    """
    instances = [gpu.device for gpu in found if gpu.instances]
    return tuple(instances[:1]) or tuple(gpu.uuid for gpu in found)


def gpus() -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs that this process may use, and why there are none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return (), "nvidia-smi is missing"
    done = subprocess.run([program, "--list-gpus"], capture_output=True, text=True, timeout=60, check=False)
    found = gpus_in(done.stdout)
    if found:
        variable = os.environ.get("CUDA_VISIBLE_DEVICES")
        return visible(found, variable), f"CUDA_VISIBLE_DEVICES={variable}"
    said = " ".join((done.stderr or done.stdout).split()) or "nvidia-smi lists none"
    return (), said


def parents(proc: Path = Path("/proc")) -> dict[int, int]:
    """Return the parent of every process."""
    found = {}
    for stat in proc.glob("[0-9]*/stat"):
        # A process may end while it is read.
        with contextlib.suppress(OSError):
            found[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return found


def descendants(pid: int, proc: Path = Path("/proc")) -> set[int]:
    """Return a process and everything that it has started and that has not been adopted by another one."""
    found, parent_of = {pid}, parents(proc)
    while True:
        more = {child for child, parent in parent_of.items() if parent in found} - found
        if not more:
            return found
        found |= more


def devices_of(pid: int, proc: Path = Path("/proc"), prefix: str = DEVICES) -> list[str]:
    """Return the devices that a process has open or mapped."""
    found = set()
    for descriptor in (proc / str(pid) / "fd").glob("*"):
        with contextlib.suppress(OSError):
            found.add(str(descriptor.readlink()))
    with contextlib.suppress(OSError):
        maps = (proc / str(pid) / "maps").read_text()
        found |= {fields[5] for line in maps.splitlines() if len(fields := line.split(maxsplit=5)) == 6}
    return sorted(path for path in found if path.startswith(prefix))
