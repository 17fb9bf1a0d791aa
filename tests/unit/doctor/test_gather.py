"""The doctor's facts about this machine, and its job's batch script."""

from __future__ import annotations

import os
import socket
import subprocess
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slurm_elastic import typed_json
from slurm_elastic.doctor.facts import NodeFacts, ProbeResult, SlurmFacts
from slurm_elastic.doctor.gather import (
    _RELEASE,
    _in_file,
    _mount,
    node_facts,
    quota_left,
    require_partition,
    run_dir_facts,
    slurm_facts,
)
from slurm_elastic.doctor.peers import ask_peer, serve_peers
from slurm_elastic.doctor.probe_job import batch_script, gather_site, node_count, removed_afterwards
from slurm_elastic.errors import UsageError
from slurm_elastic.rundir import RunDir
from slurm_elastic.slurm import AddressPreference, Controller
from slurm_elastic.slurm.output import parse_partitions
from slurm_elastic.submission.batch_script import TEMPLATES, BatchScript
from tests.conftest import Cli

OUTPUTS = Path(__file__).parents[1] / "slurm" / "outputs"


def opened(base: Path) -> RunDir:
    # Its ports follow from the id: those of another process with these tests are others.
    return RunDir.for_run(base, f"doctor-{os.getpid()}").open()


def test_facts_of_this_machine_are_whole_and_travel() -> None:
    facts = node_facts("n1", AddressPreference(), Controller())
    assert facts.torch.error == ""
    assert facts.torch.release
    assert facts.descriptors_hard >= facts.descriptors_soft > 0
    assert facts.address or facts.address_error
    # Tests reach no Slurm.
    assert (facts.has_squeue, facts.controller_offset) == (False, None)
    assert typed_json.decode(msgspec.json.encode(ProbeResult(facts)), ProbeResult).facts == facts


def test_a_run_directory_is_measured_and_removed(tmp_path: Path) -> None:
    run_dir = RunDir.for_run(tmp_path, "doctor-1")
    with removed_afterwards(run_dir):
        facts = run_dir_facts(run_dir)
    assert facts.error == ""
    assert facts.is_exclusive
    assert facts.write_speed is not None
    assert facts.write_speed > 0
    assert facts.filesystem
    assert list(tmp_path.iterdir()) == []


def test_a_missing_run_directory_is_a_finding_and_no_error(tmp_path: Path) -> None:
    facts = run_dir_facts(RunDir.for_run(tmp_path / "none", "doctor-1"))
    assert facts.error.startswith(f"{tmp_path}/none is no directory on this node; ")


def test_the_innermost_mount_tells_the_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _mount(Path("/proc/self")) == ("/proc", "proc")
    monkeypatch.setenv("PATH", "/nowhere")
    assert _mount(Path("/proc/self")) == ("", "")


QUOTA = """\
Disk quotas for user elastic (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
server:/home   {blocks}   {soft}   30000       0       1       0       0       0
"""
LUSTRE = "     /lustre   15000   0   {hard}       -    1234       0       0       -\n"
# Of the cluster of Mila, whose home directories are on Lustre (milatools/utils/disk_quota.py in mila-iqia/milatools).
MILA = """\
Disk quotas for usr normandf (uid 1471600598):
     Filesystem  kbytes   quota   limit   grace   files   quota   limit   grace
/home/mila/n/normandf
                95747836       0 104857600       -  908722       0 1048576       -
uid 1471600598 is using default block quota setting
uid 1471600598 is using default file quota setting
"""
# As a site's check of Lustre documents it, where a device of the file system did not answer.
INACCURATE = """\
        /univ_1 [10200224]       0       {hard}       -   17724       0       0       -
Some errors happened when getting quota info. Some devices may be not working or deactivated. The data in "[]" is \
inaccurate.
"""


@pytest.mark.parametrize(
    ("output", "left"),
    [
        (QUOTA.format(blocks="5000", soft=20000), 15000 << 10),
        (QUOTA.format(blocks="25000*", soft=20000), 0),
        (QUOTA.format(blocks="5000", soft=0), 25000 << 10),
        (LUSTRE.format(hard=20000), 5000 << 10),
        (LUSTRE.format(hard=0), None),
        (MILA, (104857600 - 95747836) << 10),
        (INACCURATE.format(hard=0), None),
        (INACCURATE.format(hard=10200225), 1 << 10),
        ("Disk quotas for user elastic (uid 1000): none\n", None),
        ("", None),
    ],
)
def test_the_rest_of_a_quota_as_its_commands_show_it(output: str, left: int | None) -> None:
    assert quota_left(output) == left


@pytest.mark.parametrize(
    ("line", "release"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build", "570.124.06"),
    ],
)
def test_the_release_of_the_driver(tmp_path: Path, line: str, release: str) -> None:
    (tmp_path / "version").write_text(f"{line}\nGCC version:\n")
    assert _in_file(tmp_path / "version", _RELEASE) == release
    assert _in_file(tmp_path / "none", _RELEASE) == ""


def peer(ports: tuple[int, int], **changed: Any) -> ProbeResult:
    return replace(ProbeResult(NodeFacts("n2", address="127.0.0.1"), *ports), **changed)


def test_a_peer_is_reached_on_both_ports_and_its_file_is_seen(tmp_path: Path) -> None:
    run_dir = opened(tmp_path)
    link = ask_peer(run_dir, "n1", peer(serve_peers(run_dir, "n2")))
    assert (link.leader_port_error, link.free_port_error) == ("", "")
    assert link.round_trip is not None
    assert link.file_delay is not None


def test_a_closed_port_is_told_by_the_words_of_the_kernel(tmp_path: Path) -> None:
    run_dir = opened(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        closed = unused.getsockname()[1]
    ports = serve_peers(run_dir, "n2")
    assert ask_peer(run_dir, "n1", peer(ports, leader_port=closed)).leader_port_error == "Connection refused"
    assert ask_peer(run_dir, "n1", peer(ports, free_port=closed)).free_port_error == "Connection refused"


def test_a_stranger_at_the_port_is_no_peer(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    strange = serve_peers(opened(tmp_path / "other"), "n2")
    link = ask_peer(opened(tmp_path), "n1", peer(strange))
    assert "its answer is not that of the doctor" in link.free_port_error
    assert link.round_trip is None


TEMPLATE = BatchScript.from_template(TEMPLATES.read("allocation"))


def test_the_job_has_the_site_block_and_options_of_the_template_but_not_those_of_trainings() -> None:
    options = {"partition": "gpu", "gpus-per-node": "4"}
    script = batch_script(TEMPLATE, 3, options, ["--probe=x", "--run-dir=/a b"], Path("/a b/out"))
    text = script.text()
    for option in ("nodes=3", "partition=gpu", "exclusive", "no-requeue", "time=5"):
        assert f"#SBATCH --{option}\n" in text
    for words in ("set -- --probe=x '--run-dir=/a b'\n", "container=()\n", 'slurm-elastic doctor "$@"'):
        assert words in text
    assert "--signal" not in text
    assert "job-end" not in text
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_partition_of_the_template_counts(tmp_path: Path) -> None:
    own = tmp_path / "own.sbatch"
    own.write_text(TEMPLATES.read("allocation").replace("#SBATCH --nodes=1-4", "#SBATCH --nodes=1-4 -p gpu"))
    given = Namespace(checkpoint="1", nodes=None, rdzv_endpoint=None, template=own, run_dir=tmp_path)
    assert [gather_site(given, sbatch).partition for sbatch in ({}, {"partition": "low"})] == ["gpu", "low"]


def test_options_of_sbatch_replace_those_of_the_doctor() -> None:
    text = batch_script(TEMPLATE, 2, {"time": "9", "cpus-per-task": "2"}, [], Path("out")).text()
    assert "#SBATCH --time=9\n" in text
    assert "--exclusive" not in text.partition("set --")[0].partition("# ----")[0]
    with pytest.raises(UsageError, match=r"--ntasks is not possible"):
        batch_script(TEMPLATE, 2, {"ntasks": "9"}, [], Path("out"))


def test_a_partition_that_cannot_be_is_refused() -> None:
    slurm = SlurmFacts(partitions=parse_partitions((OUTPUTS / "partitions_24.11.txt").read_text()))
    require_partition(slurm, "low,high", 2)
    require_partition(slurm, "", None)
    with pytest.raises(UsageError, match=r"^--partition hgh: Slurm knows no such partition; did you mean high\?$"):
        require_partition(slurm, "hgh", None)
    with pytest.raises(UsageError, match=r"^--nodes 3: partition low has 2; give fewer, or another --partition$"):
        require_partition(slurm, "", 3)


def test_no_cluster_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"^no scontrol in PATH; run the doctor on a machine of the cluster"):
        slurm_facts(Controller())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--nodes=2:4",), "--nodes 2:4: the doctor looks at a fixed number of nodes; give one, such as 4"),
        (("--nodes=none",), "--nodes 'none' is neither a number nor MIN:MAX; write it as in 4 or 2:4"),
        (("--checkpoint=soon",), "--checkpoint 'soon' is no number of seconds; give 0 or more"),
        (("--time=5",), "--time is an option for the doctor's job; give --nodes N, too"),
        (("--checkpont=5",), "no option --checkpont; did you mean --checkpoint?"),
        (("train.py",), "unrecognized arguments: train.py; see slurm-elastic doctor --help"),
        (("--rdzv-endpoint=etcd://",), "etcd"),
        (("--probe=x", "--run-dir=."), "this is for the job that `slurm-elastic doctor --nodes N` submits"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    arguments: tuple[str, ...], line: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (said,) = cli(2, "doctor", *arguments).err.splitlines()
    assert said.startswith("slurm-elastic: error: ")
    assert line in said
    if arguments[0].startswith("--nodes"):
        with pytest.raises(UsageError):
            node_count(arguments[0].partition("=")[2])
