from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import etcd_server

from slurm_elastic.errors import UsageError
from slurm_elastic.rendezvous.records.etcd.client import EtcdClient
from slurm_elastic.rendezvous.records.etcd.config import load_config
from slurm_elastic.rendezvous.records.etcd.errors import EtcdServerError
from slurm_elastic.rendezvous.records.etcd.server import EtcdServer, find_binary
from tests.local.etcd.helpers.processes import wait_gone


def test_stop_leaves_neither_process_nor_directory() -> None:
    with EtcdServer() as server:
        pid, directory = server.pid, server.data_dir
        assert pid is not None
        assert server.log.is_file()
    wait_gone(pid)
    assert not directory.exists()
    server.stop()


def test_a_prepared_data_directory_is_refused_and_a_link_in_it_is_not_followed(tmp_path: Path) -> None:
    prepared, kept = tmp_path / "prepared", tmp_path / "kept"
    prepared.mkdir()
    kept.write_text("mine")
    (prepared / "etcd.log").symlink_to(kept)
    with pytest.raises((OSError, EtcdServerError)), EtcdServer(prepared):
        pass
    assert kept.read_text() == "mine"
    if os.geteuid() == 0:
        os.chown(prepared, 65534, -1)
        with pytest.raises(
            UsageError, match=r"prepared belongs to another user \(uid 65534\); give a directory of your"
        ):
            EtcdServer(prepared).launch()


def test_it_has_what_torch_asks_of_its_own() -> None:
    with EtcdServer() as server:
        assert (server.get_host(), server.get_port()) == (server.host, server.client_port)
        assert server.get_endpoint() == f"{server.get_host()}:{server.get_port()}"
        with server.get_client() as client:
            client.put("/asked", b"1")
        with EtcdClient(load_config(server.get_endpoint(), {}, {})) as client:
            assert client.get("/asked") is not None
    torchs = {name for name in vars(etcd_server.EtcdServer) if not name.startswith("_")}
    assert torchs <= set(dir(EtcdServer))


def test_a_port_that_another_process_takes_first_costs_an_attempt(tmp_path: Path) -> None:
    server = EtcdServer()
    with socket.create_server((server.host, server.client_port)), (tmp_path / "printed").open("wb") as printed:
        with pytest.raises(EtcdServerError):
            server.start(timeout=30, num_retries=1, stderr=printed)
        try:
            server.start(timeout=30, num_retries=3, stderr=subprocess.DEVNULL)
            assert server.is_ready()
        finally:
            server.stop()
    assert b"address already in use" in (tmp_path / "printed").read_bytes()


def test_data_survives_a_crash(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path / "etcd")
    try:
        server.start()
        with EtcdClient(server.config) as client:
            client.put("/kept", b"1")
        server.kill()
        assert server.pid is None
        server.start()
        with EtcdClient(server.config) as client:
            assert client.get_present(["/kept"])[0] == {b"/kept": b"1"}
    finally:
        server.stop()
    assert server.data_dir.is_dir(), "a directory that was given is not ours to delete"


def test_failure_shows_what_the_log_says(binary: Path, tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    for failing, words in (
        (EtcdServer(binary=binary, arguments=["--no-such-flag"]), "no-such-flag"),
        (EtcdServer(tmp_path, binary=binary), "data: not a directory"),
    ):
        with pytest.raises(EtcdServerError) as caught, failing:
            pass
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


def test_environment_of_a_site_does_not_configure_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD_LISTEN_CLIENT_URLS", "http://127.0.0.1:1")
    monkeypatch.setenv("ETCD_NO_SUCH_SETTING", "1")
    with EtcdServer() as started, EtcdClient(started.config) as client:
        client.connect()


def test_it_ends_with_a_parent_that_exits_without_stopping_it() -> None:
    program = """
from slurm_elastic.rendezvous.records.etcd.server import EtcdServer
server = EtcdServer()
server.start()
print(server.pid, server.data_dir, flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    pid, directory = done.stdout.split()
    wait_gone(int(pid))
    assert not Path(directory).exists()


def test_missing_binary_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SLURM_ELASTIC_ETCD_BINARY", raising=False)
    monkeypatch.delenv("TORCHELASTIC_ETCD_BINARY_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="SLURM_ELASTIC_ETCD_BINARY"):
        find_binary()
    monkeypatch.setenv("SLURM_ELASTIC_ETCD_BINARY", "/no/such/etcd")
    with pytest.raises(UsageError, match="/no/such/etcd"):
        find_binary()


def test_binary_of_the_environment_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    binary = tmp_path / "my-etcd"
    binary.touch()
    binary.chmod(0o755)
    monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", str(binary))
    monkeypatch.delenv("SLURM_ELASTIC_ETCD_BINARY", raising=False)
    assert find_binary() == binary
    assert find_binary("/bin/sh") == Path("/bin/sh")
