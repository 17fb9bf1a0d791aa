from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import LogsDest, Std

from slurm_elastic.agent.workers.logs import RoundLogsSpecs, streams
from slurm_elastic.errors import UsageError
from slurm_elastic.rundir import RunDir, RunDirError


def environments(round_: int = 3, first_rank: int = 4, count: int = 2) -> dict[int, dict[str, str]]:
    return {
        local_rank: {
            "RANK": str(first_rank + local_rank),
            "WORLD_SIZE": "8",
            "SLURM_ELASTIC_ROUND": str(round_),
            "SLURM_ELASTIC_NODE": "n2",
        }
        for local_rank in range(count)
    }


def files(root: Path, name: str, *local_ranks: int) -> dict[int, str]:
    return {rank: f"{root}/logs/round_0003/n2/rank_{4 + rank:02d}/{name}" for rank in local_ranks}


def destinations(root: Path, **changes: object) -> LogsDest:
    values = {
        "stdouts": {0: "", 1: ""},
        "stderrs": {0: "", 1: ""},
        "error_files": files(root, "error.json", 0, 1),
        "filtered_stdout": files(root, "filtered_stdout.log", 0)[0],
        "filtered_stderr": files(root, "filtered_stderr.log", 0)[0],
        **changes,
    }
    return LogsDest(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["nothing", "tee", "redirects", "both", "by rank", "filtered", "filtered console"])
def test_streams_go_where_torchrun_would_send_them(tmp_path: Path, kind: str) -> None:
    logs = RunDir(tmp_path, "7")
    out, err = (files(tmp_path, name, 0, 1) for name in ("stdout.log", "stderr.log"))
    specs, expected = {
        "nothing": (RoundLogsSpecs(logs), destinations(tmp_path)),
        "tee": (
            RoundLogsSpecs(logs, tee=Std.ALL),
            destinations(tmp_path, stdouts=out, stderrs=err, tee_stdouts=out, tee_stderrs=err),
        ),
        "redirects": (
            RoundLogsSpecs(logs, redirects=Std.ALL),
            destinations(tmp_path, stdouts=out, stderrs=err),
        ),
        "both": (
            RoundLogsSpecs(logs, redirects=Std.OUT, tee=Std.ERR),
            destinations(tmp_path, stdouts=out, stderrs=err, tee_stderrs=err),
        ),
        "by rank": (
            RoundLogsSpecs(logs, tee={1: Std.OUT}),
            destinations(tmp_path, stdouts={0: "", 1: out[1]}, tee_stdouts={1: out[1]}),
        ),
        "filtered": (
            RoundLogsSpecs(logs, tee=Std.ALL, local_ranks_filter={1}),
            destinations(tmp_path, stdouts=out, stderrs=err, tee_stdouts={1: out[1]}, tee_stderrs={1: err[1]}),
        ),
        "filtered console": (
            RoundLogsSpecs(logs, local_ranks_filter={1}),
            destinations(tmp_path, stdouts={0: os.devnull, 1: ""}, stderrs={0: os.devnull, 1: ""}),
        ),
    }[kind]
    envs = environments()
    assert specs.reify(envs) == expected
    assert [env["TORCHELASTIC_ERROR_FILE"] for env in envs.values()] == [*expected.error_files.values()]
    assert all(Path(file).parent.is_dir() for file in expected.error_files.values())


@pytest.mark.parametrize(("shown", "first"), [(None, ""), ({1}, os.devnull)])
def test_no_logs_at_all(shown: set[int] | None, first: str) -> None:
    envs = environments()
    specs = RoundLogsSpecs(None, tee=Std.ALL, local_ranks_filter=shown)
    assert specs.root_log_dir == os.devnull
    assert specs.reify(envs) == LogsDest(
        stdouts={0: first, 1: ""},
        stderrs={0: first, 1: ""},
        error_files={0: os.devnull, 1: os.devnull},
        filtered_stdout=os.devnull,
        filtered_stderr=os.devnull,
    )
    assert [env["TORCHELASTIC_ERROR_FILE"] for env in envs.values()] == ["", ""]


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("in the way")
    with pytest.raises(RunDirError, match=rf"^no directory for logs, {tmp_path}/logs/round_0003/n2/rank_04: Not a dir"):
        RoundLogsSpecs(RunDir(tmp_path, "7")).reify(environments())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", Std.NONE),
        ("3", Std.ALL),
        ("0:3", {0: Std.ALL}),
        ("0:1,12:2", {0: Std.OUT, 12: Std.ERR}),
    ],
)
def test_streams(text: str, expected: object) -> None:
    assert streams("--tee", text) == expected


@pytest.mark.parametrize("text", ["", "4", "0:4", "0:1,", "a:1", "0:1 1:2", "-1:1"])
def test_malformed_streams(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--tee '.*' is neither"):
        streams("--tee", text)
