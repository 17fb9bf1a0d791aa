"""Each parser of bytes that others may have written: whatever they are, it returns or raises its documented error.

The inputs are the same in each run, and each parser gets the corpus first. With SLURM_ELASTIC_FUZZ_SECONDS, as at
night, each gets others for so long, and one that makes it fail is added to the corpus.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import socket
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic import typed_json
from slurm_elastic.agent.forkserver._import_list import parse_list
from slurm_elastic.agent.health import http as _http
from slurm_elastic.agent.job.requeue import read_history
from slurm_elastic.agent.root_cause import recorded_traceback
from slurm_elastic.agent.step_timing import paces_of
from slurm_elastic.agent.watchdog.timers import LineReader
from slurm_elastic.cli.commands.status import _show
from slurm_elastic.control.agent_side import Agreement
from slurm_elastic.control.answers import collectives, shortened
from slurm_elastic.control.shared_page import COLLECTIVES, COLLECTIVES_FIELDS, PLACE
from slurm_elastic.errors import UsageError
from slurm_elastic.observe.failures import round_failures
from slurm_elastic.observe.log_lines import log_times
from slurm_elastic.observe.page import html_page
from slurm_elastic.observe.records import run_records
from slurm_elastic.observe.report import chrome_trace, report, report_json
from slurm_elastic.observe.status import run_status, status_json
from slurm_elastic.observe.views import live_run
from slurm_elastic.rendezvous.records.etcd.records import _CONTEXT, verified
from slurm_elastic.rendezvous.transport.messages import (
    Heartbeat,
    MessageError,
    StatusAnswer,
    StatusReport,
    decode_agent_message,
    decode_leader_message,
    encode,
)
from slurm_elastic.rendezvous.transport.session import PROTOCOL, Role, Session, SessionError
from slurm_elastic.rundir import RecordError, RunContents, RunDir, RunFile, signature
from slurm_elastic.slurm import SlurmJob, compress, expand, natural_key, output
from slurm_elastic.snapshot.disk.checkpoints import Checkpoints
from slurm_elastic.snapshot.disk.lineage import CheckpointId, read_start
from slurm_elastic.snapshot.disk.stored import CheckpointError
from slurm_elastic.snapshot.hand_over import HandOverError, read_request
from slurm_elastic.snapshot.lineage import Copy, SnapshotId, read_inventories, read_origin
from slurm_elastic.snapshot.memory import Contents
from slurm_elastic.snapshot.sharding import Ranges
from slurm_elastic.snapshot.state import read_layout
from slurm_elastic.snapshot.transfer import TransferError, bodies_of

SECONDS = os.environ.get("SLURM_ELASTIC_FUZZ_SECONDS")
INPUTS = 800
"""For each parser, where that is not set."""
CORPUS = Path(__file__).parent / "corpus" / "foreign_bytes.txt"
"""An input in each line, as Python writes it."""
EVENTS = Path(__file__).parents[2] / "docs" / "events.md"
SLURM_OUTPUTS = Path(__file__).parent / "slurm" / "outputs"
SECRET = bytes(32)

Parser = Callable[[bytes], object]
HOSTILE: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**63, 10**30, 10**400, -(10**400), float("inf"), float("nan"), 0.5, "", "0", "nan", "\ud800"),
    *("x" * 5000, "9" * 5000, "\x1b]0;owned\x07", "a\nb", "2026-11-22T14:00:00+00:00", "0001-01-01T00:00:00+23:59"),
    *("9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00", -1e300, 1e300, 253402300800),
    *([], {}, [[]], [{}], {"": None}, ["a", 1, None], {"kind": []}),
)


def hostile(seeds: list[bytes], draw: random.Random) -> Iterator[bytes]:
    """First the corpus and what is known to break parsers, then changed seeds, without an end."""
    yield from (eval(line) for line in CORPUS.read_text().splitlines())
    yield from (b"", b"\xff", b"\x00" * 9, b"[" * 10000, b'{"a":' * 10000, b"9" * 10000, b'{"a":' + b"9" * 10000 + b"}")
    yield from (b"[" * 400 + b"]" * 400, b'"\\ud800"', b'{"\\ud800": 1}', b'{"hello":"\xff"}', b"NaN", b"n[1-\n3]")
    yield from (b"\xef\xbb\xbf{}", "{}".encode("utf-16"), b"{" + b'"a":1,' * 5000)
    for seed in seeds:
        yield from (seed, seed[: len(seed) // 2], seed[:-1], seed * 2)
    while True:
        seed = draw.choice(seeds)
        with contextlib.suppress(ValueError):
            value = json.loads(seed)
            for _ in range(draw.choice((1, 1, 1, 2, 5))):
                value = changed(value, draw)
            seed = json.dumps(value, ensure_ascii=draw.random() < 0.9).encode(errors="surrogatepass")
            if draw.random() < 0.7:
                yield seed
                continue
        content = bytearray(seed)
        for _ in range(draw.choice((1, 2, 8))):
            at = draw.randrange(len(content) + 1)
            what = draw.choice((b"", bytes([draw.randrange(256)]), b"\n", b"\xff", b"9" * 30, b"[", b'"', content[:at]))
            content[at : at + draw.choice((0, 1, 1, 20))] = what
        yield bytes(content)


def changed(value: Any, draw: random.Random) -> Any:
    """Put something else into one place of a value, or take that away."""
    if not isinstance(value, dict | list) or not value or draw.random() < 0.1:
        return draw.choice(HOSTILE)
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key, copy = draw.choice(keys), value.copy()
    if draw.random() < 0.1:
        del copy[key]
    else:
        copy[key] = changed(copy[key], draw)
    return copy


def js(value: Any) -> bytes:
    return json.dumps(value).encode()


def text(content: bytes) -> str:
    """As Python reads environment, arguments and output of programs."""
    return content.decode(errors="surrogateescape")


# Sessions and messages.

NAME = "n1/7.0/1"


def framed(content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + content


def listening(content: bytes) -> None:
    for end in (
        Session(Role.LEADER, SECRET, "7.0"),
        Session(Role.LEADER, SECRET, "7.0", refuses=lambda agent, nonce: 0.0),
    ):
        with contextlib.suppress(SessionError):
            end.receive(framed(content))
            end.receive(framed(content))
        with contextlib.suppress(SessionError):
            Session(Role.LEADER, SECRET, "7.0").receive(content)


def connecting(content: bytes) -> None:
    end = Session(Role.AGENT, SECRET, "7.0", agent=NAME)
    end.start()
    end.receive(framed(content))


def second_frame(content: bytes) -> None:
    end = Session(Role.LEADER, SECRET, "7.0")
    end.receive(Session(Role.AGENT, SECRET, "7.0", agent=NAME).start())
    end.receive(framed(content))


def established() -> tuple[Session, Session]:
    ends = Session(Role.AGENT, SECRET, "7.0", agent=NAME), Session(Role.LEADER, SECRET, "7.0")
    _, answer = ends[1].receive(ends[0].start())
    _, answer = ends[0].receive(answer)
    ends[1].receive(answer)
    return ends


def message(content: bytes) -> None:
    agent, leader = established()
    for found in leader.receive(agent.seal(content))[0]:
        for decode in (lambda found: decode_agent_message(found, NAME), decode_leader_message):
            with contextlib.suppress(MessageError):
                decode(found)


GREETING = {"hello": "slurm_elastic", "protocol": PROTOCOL, "version": "1.0", "nonce": "0" * 32, "agent": NAME}
GREETING |= {"tag": "0" * 64, "epoch": 1, "run": "", "proof": "0" * 64, "refused": 1.0}
CANDIDATE = {"agent": NAME, "node": "n1", "position": 0, "local_world_size": 1, "role": "default", "address": "n1"}
CANDIDATE |= {"store_port": 1, "standby_port": 2, "inventory": "", "addresses": ["10.0.0.1"], "releases": []}
PLACE_FIELDS = {"agent": NAME, "node": "n1", "rank": 0, "base_rank": 0, "local_world_size": 1, "address": "n1"}
MESSAGES = [
    js({"kind": "Joined", "candidate": CANDIDATE, "attempt": 1}),
    encode(Heartbeat(3.0)),
    encode(StatusReport(NAME, 1, "{}")),
    js({"kind": "Ended", "outcome": "succeeded", "detail": "", "failure": None}),
    js({"kind": "Failed", "failure": {"agent": NAME, "node": "n1", "rank": 0, "exit_code": 1, "error_file": ""}}),
    js({"kind": "Assignment", "attempt": 1, "place": PLACE_FIELDS, "round": 0, "reason": "start", "nodes": 1}),
    js(
        {"kind": "LeaveRequest", "agent": NAME, "nodes": [], "job": "", "reason": "drain", "seconds": 1.0, "detail": ""}
    ),
]

# Files of a run.


def run_files(content: bytes) -> None:
    """What status, report and the like make of files, each of which has this content."""

    def file(name: str) -> list[RunFile]:
        return [RunFile(name, content)]

    kinds = {kind: file(f"{kind}/7.0.json") for kind in ("failures", "notices", "endpoints", "starts", "replacements")}
    kinds |= {"rounds": file("rounds/000001.json"), "done": file("done.json") if content.startswith(b"{") else []}
    kinds |= {"events": file("events/n1.jsonl"), "progress": file("progress/n1.7.jsonl")}
    records = run_records("7", kinds, "/runs/7")
    status = run_status(records, 1e9)
    json.dumps(status_json(status))
    with contextlib.redirect_stdout(io.StringIO()):
        _show(status, 1e9, True)
    round_failures(records, {})
    found = report(records, status, 1e9)
    html_page(found)
    json.dumps([report_json(found), chrome_trace(found)])


TIME = "2026-11-22T14:00:00+00:00"
EVENT = {"time": TIME, "event": "round_formed", "node": "n1", "agent": NAME, "schema": 1, "text": "", "nodes": ["n1"]}
EVENT |= {"round": 1, "reason": "start", "world_size": 2, "seconds": 1.0, "restarts": 0}
WORKER = {"rank": 0, "reports": True, "steps": 5, "first_step": 1, "step": 9, "checkpoint": 5, "step_seconds": 2.0}
PROGRESS = {**EVENT, "event": "workers_ended", "workers": [WORKER], "rank": 0, "local_world_size": 1}
ROUND = {"round": 1, "reason": "start", "world_size": 1, "restarts": 0, "leader": NAME, "scope": "7.0"}
ROUND |= {"places": [PLACE_FIELDS], "endpoint": {"address": "n1", "port": 1, "epoch": 1, "agent": NAME}}
LINES = [js(each) + b"\n" for each in (EVENT, PROGRESS, {**PROGRESS, "event": "workers_started"}, ROUND)]
LINES += [
    js({**PROGRESS, "event": kind}) + b"\n" for kind in re.findall(r"^\| `(\w+)` \|", EVENTS.read_text(), re.MULTILINE)
]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run_dir = RunDir.for_run(tmp_path_factory.mktemp("runs"), "7").open()
    run_dir.secret()
    return run_dir


def record_files(run_dir: RunDir) -> Parser:
    def parse(content: bytes) -> None:
        for path in (run_dir.path / "done.json", run_dir.path / "endpoints" / "7.0.json"):
            path.write_bytes(content)
        (run_dir.path / "events" / "n1.jsonl").write_bytes(content)
        contents = RunContents(run_dir)
        for read in (contents.done, lambda: contents.records("endpoints"), contents.events):
            read()
        read_history(run_dir)
        # It is damaged, or not of this run: it does not end the run as one that is finished.
        with contextlib.suppress(RecordError):
            assert run_dir.read_record("endpoints", "7.0") is None
        assert not run_dir.is_done()

    return parse


def error_file(run_dir: RunDir) -> Parser:
    def parse(content: bytes) -> None:
        path = run_dir.path / "error.json"
        path.write_bytes(content)
        recorded_traceback(str(path))

    return parse


# What agents, workers and Slurm say.

LIVE_WORKER = {"rank": 0, "pid": 1, "state": "stepping", "step": 3, "loss": 0.5, "pace_seconds": 1.0, "busy_seconds": 1}
LIVE_WORKER |= {"loading_seconds": 0.0, "waiting_seconds": 0.0, "best_busy_seconds": 1.0, "paces": 3}
LIVE = {"state": "training", "schema": 1, "round": 1, "leave": {"reason": "drain"}, "workers": [LIVE_WORKER]}


def reports(content: bytes) -> None:
    told = {NAME: text(content)}
    answer = live_run(StatusAnswer(NAME, 1, "running", 1.0, 1, 1), told, 0.1)
    status = run_status(run_records("7", {"rounds": [RunFile("rounds/000001.json", js(ROUND))]}), 1e9, live=answer)
    json.dumps(status_json(status))
    paces_of(told, 1)


def slurm_text(content: bytes) -> None:
    for name in vars(output):
        if name.startswith("parse_"):
            getattr(output, name)(text(content))


def host_list(content: bytes) -> None:
    names = text(content)
    natural_key(names)
    compress(names.split(","))
    expand(names)


ENVIRONMENT = [path.read_bytes() for path in SLURM_OUTPUTS.glob("*.env")]


def environment(content: bytes) -> None:
    lines = (line.partition("=") for line in text(content).split("\n"))
    job = SlurmJob.from_environment({name: value for name, _, value in lines})
    if job is not None:
        _ = job.position, job.run_id, job.cohort, job.name


def page(content: bytes) -> None:
    whole = content.ljust(4096, b"\0")[:4096]
    fields = list(memoryview(whole).cast("q"))
    agreement = Agreement([fields], lambda exact: None)
    agreement.ask_workers()
    agreement.progress()
    for first in (PLACE, COLLECTIVES):
        room = 8 * (COLLECTIVES_FIELDS if first == COLLECTIVES else 8)
        fields[first : first + room // 8] = list(memoryview(content.ljust(room, b"\0")[:room]).cast("q"))
        agreement.progress()


# Etcd, snapshots and checkpoints.


def etcd_value(content: bytes) -> None:
    assert verified(SECRET, "key", content) is None
    verified(SECRET, "key", signature(SECRET, _CONTEXT, "key", js({"record": 1})) + js({"record": 1}))


def ranges(content: bytes) -> None:
    part = Contents(Copy.of_part(SnapshotId(0, 1), 0, 2), 1 << 21, 100, 1 << 20)
    bodies_of(part, typed_json.decode(content, Ranges))


def hand_over(content: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.send(content[:60000])
        read_request(ours)


def origins(content: bytes) -> None:
    read_origin(text(content))
    read_inventories([text(content)])


START = {"number": 3, "line": [{"start": 1, "step": 5}], "run": "7", "round": 2}
LAYOUT = {"parts": 1, "tensors": [{"dtype": "float32", "shape": [4], "dimensions": [0]}], "mesh": {"shape": [1]}}
STORED = {"version": 2, "state": {"a": {"x": 0}}, "tensors": [["__0_0.distcp", 0, 10]], "layout": None}


def checkpoint(run_dir: RunDir) -> Parser:
    def parse(content: bytes) -> None:
        checkpoints, name = Checkpoints(run_dir.path / "checkpoints"), CheckpointId(3, 7)
        for path in (checkpoints.path_of(name) / "snapshot.json", checkpoints.path / "start-000003.json"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        with contextlib.suppress(CheckpointError):
            checkpoints.newest_start()
        checkpoints.read(name)

    return parse


def timers(content: bytes) -> None:
    LineReader().feed(content)


def dumps(content: bytes) -> None:
    collectives(content)
    shortened(content, 10)


DUMP = {"entries": [{"is_p2p": False, "process_group": ["0", "d"], "collective_seq_id": 3, "profiling_name": "nccl:x"}]}
TIMER = {"version": 1, "pid": 5, "scope_id": "s", "expiration_time": 1.0, "signal": 9}
IMPORTS = {"modules": ["torch"], "left_out": {"a": "b"}, "seeded": ["torch"], "files": {}}
REQUEST = {"round": 1, "step": 1, "slots": 1, "kind": "slots"}
Nothing: tuple[type[Exception], ...] = ()

PARSERS: dict[str, tuple[Parser | Callable[[RunDir], Parser], tuple[type[Exception], ...], list[bytes]]] = {
    "json": (typed_json.loads, (typed_json.JSONError,), [js(GREETING)]),
    "listening": (listening, (SessionError,), [js(GREETING)]),
    "connecting": (connecting, (SessionError,), [js(GREETING)]),
    "second frame": (second_frame, (SessionError,), [js({"agent": NAME, "proof": "0" * 64})]),
    "message": (message, (SessionError,), MESSAGES),
    "ranges of a snapshot": (ranges, (TransferError, typed_json.JSONError), [b"[[0,10],[20,30]]"]),
    "http": (_http.read_request, (_http.HTTPError,), [b"GET / HTTP/1.1\r\nHost: n1\r\n\r\n"]),
    "files of a run": (run_files, Nothing, LINES),
    "records": (record_files, (RecordError,), [*LINES, js({"outcome": "succeeded"})]),
    "error file": (error_file, Nothing, [js({"message": {"message": "m", "extraInfo": {"py_callstack": "t"}}})]),
    "reports": (reports, Nothing, [js(LIVE)]),
    "output of Slurm": (slurm_text, Nothing, [path.read_bytes() for path in SLURM_OUTPUTS.glob("*.txt")]),
    "host list": (host_list, (UsageError,), [b"n[1-3,7],gpu01", b"rack[1-2]n[01-04]", b"n1,n2"]),
    "environment": (environment, (UsageError,), ENVIRONMENT),
    "control page": (page, Nothing, [js([["0", 3, "x"]])]),
    "import list": (parse_list, (ValueError,), [js(IMPORTS)]),
    "times of logs": (lambda content: log_times(RunFile("t", content)), Nothing, [js({"time": 1, "sizes": {"a": 1}})]),
    "timers": (timers, Nothing, [js(TIMER) + b"\n"]),
    "dumps": (dumps, Nothing, [js(DUMP)]),
    "etcd": (etcd_value, Nothing, [js({"record": {}})]),
    "request of a worker": (hand_over, (HandOverError, typed_json.JSONError), [js(REQUEST)]),
    "origins": (origins, Nothing, [js({"round": 1, "step": 5}), js({"copies": [], "holder": None})]),
    "layout": (read_layout, (ValueError,), [js({"layout": LAYOUT})]),
    "start": (lambda content: read_start(content, 3), (ValueError,), [js(START)]),
    "checkpoint": (checkpoint, (CheckpointError,), [js(STORED), js(START)]),
}


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_raises_its_documented_error_and_nothing_else(name: str, run_dir: RunDir) -> None:
    parse, errors, seeds = PARSERS[name]
    if parse in (record_files, error_file, checkpoint):
        parse = parse(run_dir)  # type: ignore[arg-type, assignment]
    seed = random.randrange(1 << 32) if SECONDS else 0
    until = time.monotonic() + float(SECONDS or "inf")
    for content in islice(hostile(seeds, random.Random(seed)), None if SECONDS else INPUTS):
        try:
            parse(content)  # type: ignore[arg-type]
        except errors:
            pass
        except Exception as error:
            if SECONDS:
                with CORPUS.open("a") as corpus:
                    corpus.write(f"{content!r}\n")
            pytest.fail(f"{type(error).__name__}: {error}; seed {seed}, {content[:2000]!r}")
        if time.monotonic() > until:
            return
