"""Host lists: the table was printed by ``scontrol show hostnames`` of 22.05.8."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from slurm_elastic.errors import UsageError
from slurm_elastic.slurm.hostlist import MAX_RANGE, compress, expand, natural_key

VALID = {
    "n[1-3]": "n1 n2 n3",
    "n[001-003,010]": "n001 n002 n003 n010",
    "a1,b[2-3]": "a1 b2 b3",
    "rack[1-2]n[01-02]": "rack1n01 rack1n02 rack2n01 rack2n02",
    "x[09-11]": "x09 x10 x11",
    "p[8-10,012]": "p8 p9 p10 p012",
    "n[098-102]": "n098 n099 n100 n101 n102",
    "tux[0-1][0-1]": "tux00 tux01 tux10 tux11",
    "n[3,1,2]": "n3 n1 n2",
    "n[1,1,2]": "n1 n1 n2",
    "n2,n1,n2": "n2 n1 n2",
    "ip-10-0-[1-2]-[3-4]": "ip-10-0-1-3 ip-10-0-1-4 ip-10-0-2-3 ip-10-0-2-4",
    "[1-3]": "1 2 3",
    "gpu-a,gpu-b": "gpu-a gpu-b",
    "n1 n2": "n1 n2",
    "n1, n2": "n1 n2",
    "n1,,n2": "n1 n2",
    "n[1-3],": "n1 n2 n3",
    "n[01-3]": "n01 n02 n03",
}
INVALID = ["node-[a-c]", "n[1-4/2]", "n[3-1]", "n[]", "n[[1]]", "n[1-70000]", "n[1-65537]"]
SUFFIXES = {
    "n[1-3]-gpu": "n1-gpu n2-gpu n3-gpu",
    "a[1-2].dom.ain": "a1.dom.ain a2.dom.ain",
    "n[1-3]x2": "n1x2 n2x2 n3x2",
}
"""Slurm 22.05 refuses these; they have one meaning only, and we take it, as Slurm 24.11 does."""


@pytest.mark.parametrize(("text", "names"), [*VALID.items(), *SUFFIXES.items()])
def test_expands_as_slurm_does(text: str, names: str) -> None:
    assert expand(text) == tuple(names.split())


@pytest.mark.parametrize("names", [VALID[text] for text in ("n[1-3]", "n[001-003,010]", "rack[1-2]n[01-02]", "[1-3]")])
def test_compresses_to_what_expands_again(names: str) -> None:
    assert expand(compress(names.split())) == tuple(names.split())


def test_many_names_are_few_letters() -> None:
    assert compress(f"n{number}" for number in range(10_000)) == "n[0-9999]"
    assert compress(["n2", "not [a] name", "n1"]) == "n2,not [a] name,n1"


@pytest.mark.parametrize("text", [*INVALID, "n[1", "n1]", "n[1-]", "n[-3]", "n[1- 3]", f"n[0-{'9' * 5000}]"])
def test_malformed_lists_are_quoted_in_the_error(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        expand(text)
    assert repr(text)[1:100].rstrip("'") in str(caught.value)
    assert len(str(caught.value)) < 350
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", " ", ",", "\n"])
def test_an_empty_list_is_an_error(text: str) -> None:
    with pytest.raises(UsageError, match="empty"):
        expand(text)


def test_the_limit_is_slurms_and_holds_for_products_and_sums() -> None:
    assert len(expand(f"n[1-{MAX_RANGE}]")) == MAX_RANGE
    for text in (f"n[0-{MAX_RANGE}]", "r[1-300]n[1-300]", f"n[1-{MAX_RANGE}],m1", "r[0-99999][0-99999][0-99999]"):
        with pytest.raises(UsageError, match=r"more than 65536|too large"):
            expand(text)


def test_natural_order() -> None:
    names = ["node10", "node2", "gpu1", "node2-ib", "10", "9", "node02", "n1r10", "n1r9", ""]
    assert sorted(names, key=natural_key) == [
        "", "9", "10", "gpu1", "n1r9", "n1r10", "node02", "node2", "node2-ib", "node10",
    ]  # fmt: skip


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="Slurm's client commands are not installed")
def test_the_table_is_what_this_machines_slurm_says(tmp_path: Path) -> None:
    config = tmp_path / "slurm.conf"
    config.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=n1\nPartitionName=p Nodes=n1\n")

    def says(text: str) -> str:
        answer = subprocess.run(
            ["scontrol", "show", "hostnames", text],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=20,
            check=False,
            env={"SLURM_CONF": str(config), "PATH": "/usr/bin:/bin"},
        ).stdout
        return "invalid" if "nvalid hostlist" in answer else " ".join(answer.split())

    assert {text: says(text) for text in VALID} == VALID
    # 24.11 takes the inner brackets for a part of the name, which no node can have.
    assert {text: says(text) for text in INVALID if says(text) != "invalid"} in ({}, {"n[[1]]": "n[1]"})
    assert {text: says(text) for text in SUFFIXES if says(text) != "invalid"} in ({}, SUFFIXES)
