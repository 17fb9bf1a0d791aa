"""Accounting: MariaDB on one machine, slurmdbd on another; they meet at a unix socket in the state directory."""

from __future__ import annotations

from pathlib import Path

from .settings import Settings

MACHINES: tuple[str, ...] = ()


def missing_programs(settings: Settings) -> list[Path]:
    return []


def start(settings: Settings) -> None:
    raise NotImplementedError


def start_machine(settings: Settings, machine: str) -> None:
    raise NotImplementedError
