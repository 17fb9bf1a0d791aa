"""The batch script that starts an etcd for one run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TEMPLATE = Path(__file__).parents[3] / "sbatch_templates/etcd.sbatch"
HANG = 120.0

RUN = """\
#!{python}
import os, sys
from dataclasses import replace
from slurm_elastic.rendezvous.records.etcd.client import EtcdClient
from slurm_elastic.rendezvous.records.etcd.config import load_config
from slurm_elastic.rendezvous.records.etcd.errors import EtcdAuthenticationError

config = load_config()
with EtcdClient(config) as client:
    client.put(config.prefix + "key", b"value")
with EtcdClient(replace(config, user=None, password=None)) as stranger:
    try:
        stranger.get(config.prefix + "key")
    except EtcdAuthenticationError:
        print("a stranger is refused")
print(sys.argv[1:], "SLURM_JOB_ID" in os.environ, os.stat(os.environ["SLURM_ELASTIC_ETCD_CREDENTIALS"]).st_mode & 0o777)
sys.exit(3)
"""


@pytest.fixture
def bin_(tmp_path: Path) -> Path:
    directory = tmp_path / "bin"
    directory.mkdir()
    return directory


def start(directory: Path, bin_: Path, *words: str) -> subprocess.CompletedProcess[str]:
    site = TEMPLATE.read_text().replace("$(hostname -I | cut -d' ' -f1)", "127.0.0.1")
    script = directory / "etcd.sbatch"
    script.write_text(site)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
        "PATH": f"{bin_}:{os.environ['PATH']}",
        "PYTHONPATH": str(TEMPLATE.parents[1]),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURMD_NODENAME": "n1",
        "TMPDIR": str(directory),
    }
    return subprocess.run(
        ["bash", script, *words],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )


def test_the_run_finds_an_etcd_with_a_password_and_its_exit_code_is_the_jobs(tmp_path: Path, bin_: Path) -> None:
    sbatch = bin_ / "sbatch"
    sbatch.write_text(RUN.format(python=sys.executable))
    sbatch.chmod(0o755)
    # Of another user, who has guessed the id of the next job.
    taken = tmp_path / f"elastic-etcd-{os.getpid()}"
    taken.mkdir()
    done = start(tmp_path, bin_, "--nodes=2-8", "elastic.sbatch", "--text", "a  b", "$HOME")
    assert done.returncode == 3, done.stderr
    words = ["--wait", "--nodes=2-8", "elastic.sbatch", "--text", "a  b", "$HOME"]
    assert done.stdout.splitlines()[-2:] == ["a stranger is refused", f"{words} False {0o600}"]
    (files,) = (tmp_path / "elastic-etcd").iterdir()
    assert not (files / "credentials.json").exists()
    assert (files / "password").read_text().strip() not in done.stdout + done.stderr
    assert list(tmp_path.glob("elastic-etcd-*")) == [taken]


def test_an_etcd_that_does_not_start_is_one_line(tmp_path: Path, bin_: Path) -> None:
    (bin_ / "etcd").write_text("#!/bin/sh\necho no disk\nexit 1\n")
    (bin_ / "etcd").chmod(0o755)
    done = start(tmp_path, bin_, "elastic.sbatch")
    log = tmp_path / f"elastic-etcd/{os.getpid()}/etcd.log"
    assert (done.returncode, done.stderr) == (1, f"etcd.sbatch: etcd has exited; see {log}\n")
    assert log.read_text() == "no disk\n"
