"""Files that live in memory and pass from process to process by their descriptor (memfd_create(2))."""

from __future__ import annotations

import os

__all__ = ["memory_file", "read_memory_file"]


def memory_file(data: bytes = b"") -> int:
    """A descriptor of a new file that lives in memory and has no name, positioned at its start."""
    descriptor = os.memfd_create("slurm-elastic")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def read_memory_file(descriptor: int) -> bytes:
    """Everything in the file, wherever the descriptor is positioned; closes it."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "rb") as file:
        return file.read()
