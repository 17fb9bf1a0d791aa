"""Parsing: outputs/{config,partitions,qos}_<release>.txt were printed by the test clusters of three Slurm releases."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_elastic.slurm.output import QosView, parse_config, parse_partitions, parse_qos

OUTPUTS = Path(__file__).parent / "outputs"


@pytest.mark.parametrize("release", ["22.05", "24.11", "26.05"])
def test_config_and_partitions_of_every_release(release: str) -> None:
    config = parse_config((OUTPUTS / f"config_{release}.txt").read_text())
    assert config is not None
    assert config.text("SLURM_VERSION").startswith(release)
    assert config.number("KillWait") == 5
    assert config.number("JobRequeue") == 1
    assert config.parameters("AuthInfo") == {"cred_expire": "5"}
    assert config.parameters("SlurmctldParameters").keys() == (
        {"enable_expedited_requeue"} if release == "26.05" else set()
    )
    assert config.text("RebootProgram") == ""
    assert config.number("NoSuchKey") is None
    low, high = parse_partitions((OUTPUTS / f"partitions_{release}.txt").read_text())
    assert (low.name, low.is_default, low.state, low.nodes) == ("low", True, "UP", 2)
    assert (low.grace, low.preempt_mode) == (15, "REQUEUE")
    assert (low.max_time, low.default_time) == (None, 3600)
    assert (high.is_default, high.preempt_mode) == (False, "OFF")


def test_qos() -> None:
    assert parse_qos((OUTPUTS / "qos_26.05.txt").read_text()) == (
        QosView("normal", 0, ""),
        QosView("low", 20, "REQUEUE"),
        QosView("high", 0, ""),
    )


def test_what_is_no_answer() -> None:
    assert parse_config("slurm_load_ctl_conf error: Unable to contact slurm controller\n") is None
    assert parse_partitions("") == ()
    assert parse_qos("a|b\n") == ()
