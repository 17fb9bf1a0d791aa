from __future__ import annotations

from pathlib import Path

import pytest

from slurm_elastic.slurm.address import CANDIDATES, ephemeral_low, port_sequence


def test_every_agent_derives_the_same_ports_below_the_ephemeral_range() -> None:
    ports = port_sequence("4711", 0, 32768)
    assert ports == port_sequence("4711", 0, 32768)
    # The sequence is a protocol between agents: a change of it parts old agents from new ones.
    assert ports[:3] == (14124, 14470, 19685)
    assert len(set(ports)) == CANDIDATES
    assert all(10000 <= port < 32768 for port in ports)


def test_runs_and_incarnations_get_ports_of_their_own() -> None:
    for job in range(1000, 1400):
        ports = set(port_sequence(str(job), 0, 32768))
        for other in (port_sequence(str(job + 1), 0, 32768), port_sequence(str(job), 1, 32768)):
            assert len(ports & set(other)) <= CANDIDATES // 4
    firsts = [port_sequence(str(job), 0, 32768)[0] for job in range(1000, 1400)]
    assert len(set(firsts)) > 380


def test_run_id_and_restart_count_are_not_run_together() -> None:
    assert port_sequence("1", 11, 32768) != port_sequence("11", 1, 32768)


def test_reserved_ports_come_first_in_their_order() -> None:
    plain = port_sequence("4711", 0, 32768)
    assert port_sequence("4711", 0, 32768, (21001, 21000)) == (21001, 21000, *plain)
    assert port_sequence("4711", 0, 32768, plain[3:4]) == (plain[3], *plain[:3], *plain[4:])


@pytest.mark.parametrize(
    ("low", "least", "most"),
    [(32768, 10000, 32767), (60000, 10000, 59999), (15000, 10000, 14999), (10000, 5904, 9999), (1024, 10000, 32767)],
)
def test_follows_the_sites_ephemeral_range(low: int, least: int, most: int) -> None:
    ports = {port for run in range(200) for port in port_sequence(str(run), 0, low)}
    assert least <= min(ports) <= least + 200
    assert most - 200 <= max(ports) <= most


def test_reads_the_kernels_range(tmp_path: Path) -> None:
    source = tmp_path / "range"
    source.write_text("15000\t61000\n")
    assert ephemeral_low(source) == 15000
    source.write_text("")
    assert ephemeral_low(source) == 32768
    assert ephemeral_low(tmp_path / "missing") == 32768
    assert 1024 <= ephemeral_low() <= 65535
