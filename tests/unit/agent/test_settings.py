from __future__ import annotations

import dataclasses
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.launcher.api import LaunchConfig

from slurm_elastic.agent.health.server import HealthSettings
from slurm_elastic.agent.option_values import NO_MAXIMUM, OptionValues
from slurm_elastic.agent.settings import AgentSettings
from slurm_elastic.agent.workers.logs import RoundLogsSpecs
from slurm_elastic.errors import UsageError
from slurm_elastic.rendezvous.records.etcd.config import Endpoint, EtcdConfig
from slurm_elastic.rundir import RunDir
from slurm_elastic.slurm import AddressPreference, SlurmJob, ephemeral_low, port_sequence
from tests.unit.agent.helpers.command_lines import ELEMENT, FIRST, STEP, settle

PASSWORD = "SLURM_ELASTIC_ETCD_PASSWORD"


pytestmark = pytest.mark.usefixtures("clean_place")


def ports(run_id: str, restart_count: int = 0, reserved: tuple[int, ...] = ()) -> tuple[int, ...]:
    return port_sequence(run_id, restart_count, ephemeral_low(), reserved)


def settings_of_n2(**changes: Any) -> AgentSettings:
    run_dir = RunDir(Path("/shared/elastic-runs/7"), "7")
    settings = AgentSettings(
        job=SlurmJob.from_environment(STEP),
        run_id="7",
        run_dir=run_dir,
        agent=f"n2/7.0/{os.getpid()}",
        node="n2",
        position=1,
        expected_nodes=("n1", "n2", "n3"),
        restart_count=0,
        leader_node="n1",
        ports=ports("7"),
        endpoint_host=None,
        etcd=None,
        address=AddressPreference(),
        launch_config=launch_config(),
        entrypoint=sys.executable,
        args=("-u", "train.py"),
        values=OptionValues(),
        watchdog=True,
        hang_timeout=None,
        health=HealthSettings(),
    )
    return dataclasses.replace(settings, **changes)


def launch_config(**changes: Any) -> LaunchConfig:
    logs = RunDir(Path("/shared/elastic-runs/7"), "7")
    values = {
        "min_nodes": 1,
        "max_nodes": NO_MAXIMUM,
        "nproc_per_node": 1,
        "logs_specs": RoundLogsSpecs(logs, tee=Std.ALL),
        "run_id": "7",
        "role": "default",
        "rdzv_endpoint": f"n1:{ports('7')[0]}",
        "rdzv_backend": "slurm",
        "max_restarts": 0,
        "log_line_prefix_template": "[n2/${rank}] ",
        "duplicate_stdout_filters": [],
        "duplicate_stderr_filters": [],
        **changes,
    }
    return LaunchConfig(**values)


def test_slurm_fills_in_everything() -> None:
    assert settle("train.py", STEP) == settings_of_n2()


def test_every_part_can_be_given() -> None:
    given = settle(
        "--nnodes 2:8 --nproc-per-node=4 --max_restarts 3 --run-dir /data --rdzv-endpoint head:4000 --start cold "
        "--preload numpy,my.data --interface ib0 --node-pattern {node}-ib --local_addr 10.0.0.1 --role trainer "
        "--rdzv-conf join_timeout=60 --redirects 2 --local-ranks-filter 0,2 --log-dir /logs --monitor-interval 1 "
        "--no-watchdog --worker-signal usr1 train.py --lr 1e-3 --nnodes 9",
        STEP,
    )
    logs = RunDir(Path("/logs/7"), "7")
    assert given == settings_of_n2(
        run_dir=RunDir(Path("/data/elastic-runs/7"), "7"),
        ports=(4000,),
        endpoint_host="head",
        values=OptionValues(start="cold", worker_signal=signal.SIGUSR1),
        address=AddressPreference("10.0.0.1", "ib0", "{node}-ib"),
        launch_config=launch_config(
            min_nodes=2,
            max_nodes=8,
            nproc_per_node=4,
            max_restarts=3,
            role="trainer",
            rdzv_endpoint="head:4000",
            rdzv_configs={"join_timeout": "60"},
            local_addr="10.0.0.1",
            monitor_interval=1.0,
            logs_specs=RoundLogsSpecs(logs, redirects=Std.ERR, local_ranks_filter={0, 2}),
        ),
        args=("-u", "train.py", "--lr", "1e-3", "--nnodes", "9"),
        watchdog=False,
    )


def test_environment_variables_of_torchrun_count_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_TEE", "1")
    monkeypatch.setenv("PET_RUN_DIR", "/data")
    run_dir = RunDir(Path("/data/elastic-runs/7"), "7")
    assert settle("train.py", STEP) == settings_of_n2(
        run_dir=run_dir,
        launch_config=launch_config(min_nodes=2, max_nodes=2, logs_specs=RoundLogsSpecs(run_dir, tee=Std.OUT)),
    )


def test_workers_have_thirty_seconds_or_those_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settle("train.py", STEP).values.shutdown_timeout == 30
    assert settle("--shutdown-timeout 4 train.py", STEP).values.shutdown_timeout == 4
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
    assert settle("train.py", STEP).values.shutdown_timeout == 7
    assert settle("--shutdown_timeout=0 train.py", STEP).values.shutdown_timeout == 0


def test_the_snapshots_of_a_node_are_two_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settle("--snapshot-slots 2 train.py", STEP) == settings_of_n2(values=OptionValues(snapshot_slots=2))
    monkeypatch.setenv("PET_SNAPSHOT_SLOTS", "2")
    assert settle("train.py", STEP) == settings_of_n2(values=OptionValues(snapshot_slots=2))
    monkeypatch.setenv("PET_SNAPSHOT_SLOTS", "")
    assert settle("--snapshot_replicas 1 train.py", STEP) == settings_of_n2(values=OptionValues(snapshot_replicas=1))


def test_the_prefix_of_lines_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "${role_name}: ")
    assert settle("train.py", STEP) == settings_of_n2(
        launch_config=launch_config(log_line_prefix_template="${role_name}: ")
    )


def test_an_array_element_expects_nobody_and_has_the_ports_of_all() -> None:
    settings = settle("train.py", ELEMENT)
    assert (settings.run_id, str(settings.run_dir.path)) == ("10", "/shared/elastic-runs/10")
    assert (settings.node, settings.agent, settings.restart_count) == ("n5", f"n5/12.4/{os.getpid()}", 4)
    assert (settings.position, settings.expected_nodes, settings.shared) == (0, (), True)
    assert (settings.leader_node, settings.ports) == ("n5", ports("10"))
    assert settings.launch_config.rdzv_endpoint == f"n5:{ports('10')[0]}"


def test_steps_and_elements_of_an_array_are_runs_of_their_own() -> None:
    assert settle("train.py", {**STEP, "SLURM_STEP_ID": "2"}).run_id == "7.2"
    assert settle("train.py", {**STEP, "SLURM_STEP_ID": "2"}).ports != settle("train.py", STEP).ports
    for mark in ("", "1"):
        own = settle("train.py", {**ELEMENT, "SLURM_ELASTIC_VERDICT": mark})
        assert (own.run_id, own.shared, own.expected_nodes) == ("10_2", False, ("n5",))
        assert own.launch_config.max_nodes == NO_MAXIMUM
    named = {name: value for name, value in ELEMENT.items() if name != "SLURM_ELASTIC_VERDICT"}
    for environ in (named, ELEMENT):
        several = settle("--run-id mine train.py", environ)
        assert (several.run_id, several.shared, several.expected_nodes) == ("mine", True, ())
        assert several.launch_config.max_nodes == 8
    with pytest.raises(
        UsageError, match=r"--run-id mine makes one run of all elements of this array, .* array\.sbatch, or"
    ):
        settle("--run-id mine train.py", {**ELEMENT, "SLURM_ELASTIC_VERDICT": "1"})


def test_the_leader_may_be_on_another_node_than_the_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settle("--leader-node n3 train.py", STEP)
    assert (settings.leader_node, settings.launch_config.rdzv_endpoint) == ("n3", f"n3:{ports('7')[0]}")
    monkeypatch.setenv("PET_LEADER_NODE", "n2")
    assert settle("train.py", STEP).leader_node == "n2"
    # Elements of an array, and jobs that share a run id, bring nodes that this one does not know.
    assert settle("--leader-node n9 train.py", ELEMENT).leader_node == "n9"
    assert settle("--leader-node n9 --run-id mine train.py", STEP).leader_node == "n9"
    # Started again, the job may have other nodes; that is nobody's fault.
    assert settle("--leader-node n9 train.py", {**STEP, "SLURM_RESTART_COUNT": "1"}).leader_node == "n1"
    assert not caplog.records
    assert settle("--leader-node n9 train.py", {**FIRST, "SLURM_RESTART_COUNT": "1"}).leader_node == "n1"
    assert "n9 is not among the nodes of this start: n1 leads" in caplog.text


def test_outside_slurm_there_is_one_node_and_a_run_of_its_own() -> None:
    settings = settle("train.py", {})
    assert settings.run_id != settle("train.py", {}).run_id
    assert settings.run_dir.path == Path.cwd() / "elastic-runs" / settings.run_id
    assert (settings.job, settings.node, settings.agent) == (None, "localhost", f"localhost/0.0/{os.getpid()}")
    assert (settings.position, settings.expected_nodes, settings.leader_node) == (0, ("localhost",), "localhost")
    assert (settings.ports, settings.launch_config.max_nodes) == (ports(settings.run_id), 1)
    assert settings.launch_config.rdzv_endpoint == f"localhost:{settings.ports[0]}"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SLURM_GPUS_ON_NODE": "4"}, 4),
        ({"SLURM_GPUS_ON_NODE": "0"}, 1),
        ({}, 1),
    ],
)
def test_workers_of_a_node_are_its_gpus(environ: dict[str, str], expected: int) -> None:
    assert settle("train.py", {**STEP, **environ}).launch_config.nproc_per_node == expected


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        ("", {"SLURM_RESTART_COUNT": "2", "SLURM_STEP_RESV_PORTS": "21000"}, ports("7", 2, (21000,))),
        # Jobs of one run have different restart counts and ports.
        ("--run-id a", {"SLURM_RESTART_COUNT": "2", "SLURM_STEP_RESV_PORTS": "21000"}, ports("a")),
        ("--rdzv-endpoint head", {}, ports("7")),
        ("--rdzv-endpoint [fe80::1]:4000", {}, (4000,)),
    ],
)
def test_ports(arguments: str, environ: dict[str, str], expected: tuple[int, ...]) -> None:
    assert settle(f"{arguments} train.py", {**STEP, **environ}).ports == expected


@pytest.mark.parametrize(
    ("arguments", "entrypoint", "args"),
    [
        ("-m package.train --x", sys.executable, ("-u", "-m", "package.train", "--x")),
        ("--no-python sh -c true", "sh", ("-c", "true")),
    ],
)
def test_entry_points(arguments: str, entrypoint: str, args: tuple[str, ...]) -> None:
    settings = settle(arguments, STEP)
    assert (settings.entrypoint, settings.args) == (entrypoint, args)


def test_a_function_of_torch_runs_the_script_in_this_interpreter() -> None:
    settings = settle(f"--run-path {Path.cwd()}/train.py 1", STEP)
    assert callable(settings.entrypoint)
    assert settings.args == (f"{Path.cwd()}/train.py", "1")


@pytest.mark.parametrize(
    ("given", "workers", "expected"), [(None, 1, None), (None, 2, "1"), ("8", 2, "8"), ("8", 1, "8")]
)
def test_threads_are_limited_as_by_torchrun_and_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    given: str | None,
    workers: int,
    expected: str | None,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given or "")
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    with caplog.at_level("INFO"):
        settle(f"--nproc-per-node {workers} train.py", {})
    assert os.environ.get("OMP_NUM_THREADS") == expected
    lines = ["OMP_NUM_THREADS is not set: 1 for each worker, as with torchrun"] if given is None and workers > 1 else []
    assert [record.getMessage() for record in caplog.records if "OMP" in record.getMessage()] == lines


def test_options_of_the_static_rendezvous_are_ignored_aloud(caplog: pytest.LogCaptureFixture) -> None:
    settle("--node-rank 3 --master-addr head train.py", {})
    assert [record.getMessage().split()[0] for record in caplog.records] == ["--node-rank", "--master-addr"]


HET = {
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID_HET_GROUP_0": "7",
    "SLURM_JOB_ID_HET_GROUP_1": "8",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-3]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n[4-5]",
}


def test_components_of_a_heterogeneous_job_without_an_agent_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    settle("train.py", FIRST | HET)
    settle("train.py", STEP | HET)
    settle("train.py", FIRST | HET | {"SLURM_STEP_NODELIST": "n[1-5]", "SLURM_STEP_NUM_NODES": "5"})
    assert [record.getMessage() for record in caplog.records] == [
        "heterogeneous job: no agent on n[4-5]; for one run on all components start the agents by srun --het-group=0-1"
    ]


def test_no_directory_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's own log specs make a temporary one.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    settle("train.py", {})
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_an_etcd_endpoint_is_not_the_place_of_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settle("--rdzv-endpoint=etcds://one:1,two:2 --rdzv-conf=user=me train.py", STEP | {PASSWORD: "secret"})
    assert settings.etcd == EtcdConfig((Endpoint("one", 1), Endpoint("two", 2)), tls=True, user="me", password="secret")
    assert (settings.endpoint_host, settings.ports) == (None, ports("7"))
    assert "secret" not in repr(settings)
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "etcd://three")
    assert settle("train.py", STEP).etcd == EtcdConfig((Endpoint("three", 2379),))
