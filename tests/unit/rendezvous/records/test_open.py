"""When etcd keeps the records of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_elastic.environment import PRIVATE, take_private
from slurm_elastic.errors import UsageError
from slurm_elastic.rendezvous.records.api import RunDirRecords, etcd_wanted, open_records
from slurm_elastic.rendezvous.records.etcd.config import ENVIRONMENT_PREFIX, Endpoint, EtcdConfig
from slurm_elastic.rundir import RunDir

ENDPOINT = f"{ENVIRONMENT_PREFIX}ENDPOINT"
CREDENTIALS = f"{ENVIRONMENT_PREFIX}CREDENTIALS"
ETCD = EtcdConfig((Endpoint("here", 2379),))


@pytest.mark.parametrize(
    ("endpoint", "environment", "wanted"),
    [
        (None, {}, None),
        ("", {}, None),
        ("node1", {}, None),
        ("node1:29400", {}, None),
        ("etcd://here", {}, ETCD),
        (" etcd://here:2379 ", {ENDPOINT: "etcd://there"}, ETCD),
        (None, {ENDPOINT: "etcd://here"}, ETCD),
        ("", {ENDPOINT: "here"}, ETCD),
        ("node1:29400", {ENDPOINT: "etcd://there"}, None),
        ("node1", {CREDENTIALS: "/nonexistent"}, None),
    ],
)
def test_what_asks_for_etcd(endpoint: str | None, environment: dict[str, str], wanted: EtcdConfig | None) -> None:
    assert etcd_wanted(endpoint, {"join_timeout": "3"}, environment) == wanted


def test_a_credentials_file_may_name_the_endpoint(tmp_path: Path) -> None:
    file = tmp_path / "etcd.json"
    file.write_text(json.dumps({"endpoint": "etcd://here"}))
    file.chmod(0o600)
    assert etcd_wanted(None, {}, {CREDENTIALS: str(file)}) == ETCD
    assert etcd_wanted(None, {"credentials": str(file)}, {}) == ETCD


@pytest.mark.parametrize("endpoint", [None, "node1:29400"])
def test_options_of_etcd_without_an_etcd_are_a_mistake(endpoint: str | None) -> None:
    with pytest.raises(UsageError) as error:
        etcd_wanted(endpoint, {"user": "me"}, {})
    assert str(error.value) == (
        "--rdzv-conf: user is for etcd, and none is named; give --rdzv-endpoint=etcd://HOST:PORT"
    )


def test_a_run_without_etcd_keeps_its_records_in_the_run_directory(tmp_path: Path) -> None:
    assert isinstance(open_records(RunDir.for_run(tmp_path, "7").open(), "7.0", None, limit=1.0), RunDirRecords)


def test_the_password_is_taken_out_of_the_environment() -> None:
    private = {f"{ENVIRONMENT_PREFIX}PASSWORD": "secret", "SLURM_ELASTIC_HEALTH_TOKEN": "0123456789abcdef"}
    environ = {**private, "HOME": "/"}
    assert take_private(environ) == private
    assert environ == {"HOME": "/"}
    assert take_private(environ) == {}
    assert tuple(private) == PRIVATE
