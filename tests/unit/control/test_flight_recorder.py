"""Dumps of collectives: what is read of them, how long they get, and what this release of torch really returns."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic.control.agent_side import Agreement, RoundControl
from slurm_elastic.control.answers import collectives, dumps, shortened
from slurm_elastic.control.shared_page import (
    ANSWERER,
    ASKED,
    COLLECTIVES,
    COLLECTIVES_FIELDS,
    DUMPED,
    write_text,
)


def entry(number: int, name: str = "gloo:all_reduce", group: str = "0", **more: Any) -> dict[str, Any]:
    # As torch 2.13 writes it, whose keys are sorted.
    fields = {"is_p2p": False, "process_group": [group, "default_pg"], "profiling_name": name, "retired": True, **more}
    return {"collective_seq_id": number, **fields}


def dump(*entries: object) -> bytes:
    return json.dumps({"comm_lib_version": "", "entries": entries, "version": "2.10"}, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([], ()),
        ([entry(1), entry(2, "nccl:broadcast")], (("0", 2, "broadcast"),)),
        ([entry(1), entry(4, group="7"), entry(2)], (("0", 2, "all_reduce"), ("7", 4, "all_reduce"))),
        ([entry(1), entry(9, is_p2p=True)], (("0", 1, "all_reduce"),)),
        ([entry(1, group=str(number)) for number in range(9)], tuple((str(n), 1, "all_reduce") for n in (8, 7, 6, 5))),
        ([entry(1), 3, None, {}, {"collective_seq_id": "x"}, []], (("0", 1, "all_reduce"),)),
    ],
)
def test_the_last_collective_of_each_group(entries: list[Any], expected: tuple[object, ...]) -> None:
    assert collectives(dump(*entries)) == expected


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"[" * 100_000, b"null", b'{"entries": 3}', b"{" * 9, b'{"entries":[{"coll']
)
def test_what_is_no_dump_tells_nothing(content: bytes) -> None:
    assert collectives(content) == ()


def test_a_dump_keeps_its_newest_entries() -> None:
    whole = dump(*(entry(number) for number in range(1000)))
    kept = json.loads(shortened(whole, 20_000))
    assert kept["version"] == "2.10"
    assert kept["entries"][-1]["collective_seq_id"] == 999
    assert 50 < len(kept["entries"]) < 200
    assert shortened(whole, len(whole)) == whole
    assert shortened(b"x" * 100, 50) == shortened(dump(entry(1)), 10) == b""


def test_an_agent_reads_the_collectives(tmp_path: Path) -> None:
    control = RoundControl(tmp_path, 0, 1)
    page = control._pages[0]
    control.ask_workers()
    assert control.progress()[0].collectives == ()
    for text, expected in (
        ('[["0",7,"all_reduce"]]', (("0", 7, "all_reduce"),)),
        ('[["0",7,', ()),
        ('[["0"]]', ()),
        ("7", ()),
        ("[" * 600, ()),
    ):
        write_text(page, text, COLLECTIVES, COLLECTIVES_FIELDS)
        assert control.progress()[0].collectives == expected


def test_answers_are_asked_for_and_awaited() -> None:
    pages = [[0] * 128, [0] * 128]
    agreement = Agreement(pages)

    def waits() -> bool:
        begin = time.monotonic()
        agreement.await_answers(0.05)
        return time.monotonic() - begin >= 0.05

    assert not waits()
    agreement.ask_workers()
    agreement.ask_workers()
    # A worker that does not answer is not waited for.
    assert [page[ASKED] for page in pages] == [1, 1]
    assert not waits()
    pages[1][ANSWERER] = 9
    assert waits()
    pages[1][DUMPED] = 1
    assert not waits()


def test_torch_records_collectives_by_default_and_returns_them_to_any_thread() -> None:
    assert dumps() == {}
    script = """
import os, sys, threading, torch
from slurm_elastic.control.answers import collectives, dumps
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
for _ in range(3):
    torch.distributed.all_reduce(torch.ones(2))
torch.distributed.barrier()
thread = threading.Thread(target=lambda: print({name: collectives(content) for name, content in dumps().items()}))
thread.start()
thread.join()
"""
    environment = {"PYTHONPATH": ":".join(sys.path)}
    for size, expected in (("", "{'flight_recorder.json': (('0', 4, 'barrier'),)}"), ("0", "{}")):
        variables = {"TORCH_FR_BUFFER_SIZE": size} if size else {}
        run = subprocess.run(
            [sys.executable, "-c", script], env=environment | variables, capture_output=True, text=True, timeout=60
        )
        assert run.stdout.strip() == expected, run.stderr
