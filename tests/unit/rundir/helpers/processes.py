"""Real processes that race for a run directory, also as another user."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RACERS = 16
OTHER_USER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes root to mount and to become another user")


def race(action: Callable[[int], Any], racers: int = RACERS, user: int | None = None) -> list[Any]:
    """Let processes do something at the same moment; return what each returned, or the error it raised."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(racers)
    answers = context.SimpleQueue()

    def racer(number: int) -> None:
        if user is not None:
            os.setuid(user)
        barrier.wait(timeout=30)
        try:
            answers.put((number, action(number)))
        except Exception as error:
            answers.put((number, error))

    processes = [context.Process(target=racer, args=(number,), daemon=True) for number in range(racers)]
    try:
        for process in processes:
            process.start()
        results = {}
        for process in processes:
            process.join(timeout=60)
            assert process.exitcode == 0
            number, result = answers.get()
            results[number] = result
        return [results[number] for number in range(racers)]
    finally:
        for process in processes:
            process.kill()
            process.join(timeout=10)


def as_user(user: int, action: Callable[[], Any]) -> Any:
    return race(lambda _: action(), racers=1, user=user)[0]


def hidden(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.name.startswith(".")]
