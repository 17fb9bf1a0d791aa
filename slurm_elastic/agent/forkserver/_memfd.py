"""Files in memory, which processes pass on by their descriptors (memfd_create(2))."""

from __future__ import annotations

import os


def memory_file(data: bytes = b"") -> int:
    """Return the descriptor of a new file in memory with this content, positioned at its start."""
    descriptor = os.memfd_create("slurm-elastic")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def read_memory_file(descriptor: int) -> bytes:
    """Return the whole content of the file, and close it."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "rb") as file:
        return file.read()
