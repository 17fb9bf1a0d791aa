"""SlurmJob: outputs/*.env are environments of real jobs, with user and host names replaced. The release is 22.05.8, or
26.05.5 where that is in the name."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_elastic.errors import UsageError
from slurm_elastic.slurm.job import ArrayElement, SlurmJob

OUTPUTS = Path(__file__).parent / "outputs"

STEP = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[2-4]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURMD_NODENAME": "n3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}


def recorded(name: str) -> dict[str, str]:
    lines = (OUTPUTS / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


def parsed(environ: dict[str, str]) -> SlurmJob:
    job = SlurmJob.from_environment(environ)
    assert job is not None
    return job


def test_a_real_step_of_an_allocation() -> None:
    assert parsed(recorded("allocation_step.env")) == SlurmJob(
        job_id="1",
        submit_dir=Path("/home/ada/work"),
        nodes=("f1", "f2"),
        job_nodes=("f1", "f2"),
        node="f2",
        node_rank=1,
        array=None,
        het=(),
        step_id="0",
        restart_count=0,
        gpus_on_node=0,
        reserved_ports=(),
        topology_address=None,
    )


def test_a_real_batch_script() -> None:
    job = parsed(recorded("allocation_batch.env"))
    assert (job.step_id, job.node, job.node_rank) == (None, "f1", 0)
    assert job.nodes == ("f1", "f2")
    assert (job.array, job.run_id) == (None, "1")
    assert job.cohort == ("", 1), "nobody else runs a batch script"


def test_a_real_batch_script_of_a_release_that_gives_it_a_step_id() -> None:
    environ = recorded("batch_26.05.env")
    assert environ["SLURM_STEP_ID"] == "-5"
    job = parsed(environ)
    assert (job.step_id, job.nodes, job.cohort) == (None, ("f1",), ("", 1))


def test_the_processes_of_one_srun_are_a_cohort() -> None:
    assert parsed(STEP).cohort == parsed({**STEP, "SLURMD_NODENAME": "n4", "SLURM_NODEID": "2"}).cohort
    assert parsed(STEP).cohort[1] == 3
    for other in ({"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "13"}):
        assert parsed({**STEP, **other}).cohort[0] != parsed(STEP).cohort[0]


def test_a_real_array_element() -> None:
    job = parsed(recorded("array_step.env"))
    assert job.array == ArrayElement(job_id="3", task_id=5, task_count=3)
    assert (job.run_id, job.job_id) == ("3_5", "7")
    assert (job.nodes, job.node_rank) == (("f2",), 0)


def test_a_real_step_across_a_het_job() -> None:
    job = parsed(recorded("het_step.env"))
    assert job.het == (("f1",), ("f2",))
    assert (job.job_id, job.nodes, job.node, job.node_rank) == ("4", ("f1", "f2"), "f2", 1)
    assert job.cohort == ("4.0.0", 2)


def test_a_het_step_may_reach_beyond_its_own_components_list() -> None:
    job = parsed({**STEP, "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NODEID": "5"})
    assert job.nodes == ("n2", "n3", "n4")
    assert job.node == "n3"


def test_outside_slurm_there_is_no_job() -> None:
    assert SlurmJob.from_environment({}) is None
    assert SlurmJob.from_environment({"SLURM_CONF": "/etc/slurm.conf", "SLURM_JOB_ID": ""}) is None


def test_the_step_list_comes_before_the_jobs() -> None:
    job = parsed(STEP)
    assert (job.nodes, job.node_rank) == (("n2", "n3", "n4"), 1)
    # Its place in the job stays.
    assert (job.job_nodes, job.position) == (("n1", "n2", "n3", "n4"), 2)


def test_order_is_slurms_and_duplicates_go() -> None:
    job = parsed({**STEP, "SLURM_STEP_NODELIST": "n4,n3,n4,n2", "SLURM_NODEID": "0"})
    assert (job.nodes, job.node_rank) == (("n4", "n3", "n2"), 1)


def test_the_node_is_found_by_name_else_by_index() -> None:
    assert parsed({**STEP, "SLURM_NODEID": "0"}).node == "n3"
    del (unnamed := dict(STEP))["SLURMD_NODENAME"]
    assert parsed({**unnamed, "SLURM_NODEID": "2"}).node == "n4"


def test_the_interactive_step_of_salloc_counts_as_batch() -> None:
    job = parsed({**STEP, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_TASKS_PER_NODE": "4"})
    assert (job.step_id, job.nodes) == (None, ("n1", "n2", "n3", "n4"))


def test_old_names_of_variables_are_read() -> None:
    job = parsed({"SLURM_JOBID": "3", "SLURM_NODELIST": "n1", "SLURM_NODEID": "0"})
    assert (job.job_id, job.nodes) == ("3", ("n1",))


def test_restart_count_is_unset_on_the_first_run() -> None:
    assert parsed(STEP).restart_count == 0
    assert parsed({**STEP, "SLURM_RESTART_COUNT": "3"}).restart_count == 3


def test_remaining_values() -> None:
    job = parsed(
        {
            **STEP,
            "SLURM_STEP_RESV_PORTS": "21000-21001,21005",
            "SLURM_TOPOLOGY_ADDR": "s0.s4.n3",
            "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
        }
    )
    assert job.reserved_ports == (21000, 21001, 21005)
    assert parsed({**STEP, "SLURM_STEP_RESV_PORTS": "(null)"}).reserved_ports == ()
    assert job.topology_address == "s0.s4.n3"


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 0),
        ({"SLURM_GPUS_ON_NODE": "4"}, 4),
        ({"SLURM_GPUS_ON_NODE": "0", "CUDA_VISIBLE_DEVICES": "0,1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "GPU-5ebe9f43,MIG-8a"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
    ],
)
def test_counts_gpus(environ: dict[str, str], count: int) -> None:
    assert parsed({**STEP, **environ}).gpus_on_node == count


@pytest.mark.parametrize(
    ("change", "named", "fix"),
    [
        ({"SLURM_JOB_NODELIST": None}, "SLURM_JOB_NODELIST is not", "pass all SLURM_ variables on"),
        ({"SLURM_JOB_ID": None}, "SLURM_JOB_NODELIST is set but SLURM_JOB_ID is not", "unset"),
        ({"SLURM_JOB_ID": "twelve"}, "SLURM_JOB_ID='twelve'", "unset"),
        ({"SLURM_JOB_ID": "¹²"}, "SLURM_JOB_ID=", "unset"),
        ({"SLURM_JOB_NODELIST": "n[1-"}, "SLURM_JOB_NODELIST: malformed host list 'n[1-'", "n[1-3,7]"),
        ({"SLURMD_NODENAME": None, "SLURM_NODEID": "3"}, "SLURM_NODEID=3 is out of range", "srun"),
        ({"SLURMD_NODENAME": None, "SLURM_NODEID": "-1"}, "SLURM_NODEID='-1' is not a number", "by hand"),
        ({"SLURMD_NODENAME": "n1"}, "SLURMD_NODENAME=n1 is not in", "srun"),
        ({"SLURMD_NODENAME": None, "SLURM_NODEID": None}, "neither SLURMD_NODENAME nor SLURM_NODEID", "srun"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1,2(x2)"}, "more than one task", "srun --ntasks-per-node=1"),
        ({"SLURM_STEP_TASKS_PER_NODE": None, "SLURM_LOCALID": "1"}, "more than one task", "srun"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x"}, "SLURM_STEP_TASKS_PER_NODE='1(x'", "by hand"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x0)"}, "SLURM_STEP_TASKS_PER_NODE='1(x0)'", "by hand"),
        ({"SLURM_ARRAY_JOB_ID": "9"}, "one of SLURM_ARRAY_JOB_ID and SLURM_ARRAY_TASK_ID is not set", "unset both"),
        ({"SLURM_ARRAY_TASK_ID": "9"}, "one of SLURM_ARRAY_JOB_ID and SLURM_ARRAY_TASK_ID is not set", "unset both"),
        ({"SLURM_RESTART_COUNT": "x"}, "SLURM_RESTART_COUNT='x' is not a number", "by hand"),
        ({"SLURM_STEP_RESV_PORTS": "21001-21000"}, "SLURM_STEP_RESV_PORTS", "by hand"),
        ({"SLURM_STEP_RESV_PORTS": "0"}, "SLURM_STEP_RESV_PORTS", "by hand"),
        ({"SLURM_STEP_RESV_PORTS": "70000"}, "SLURM_STEP_RESV_PORTS", "by hand"),
        ({"SLURM_GPUS_ON_NODE": "gpu:many"}, "SLURM_GPUS_ON_NODE='gpu:many'", "by hand"),
    ],
)
def test_half_present_or_contradictory_variables(change: dict[str, str | None], named: str, fix: str) -> None:
    environ = {key: value for key, value in {**STEP, **change}.items() if value is not None}
    with pytest.raises(UsageError) as caught:
        SlurmJob.from_environment(environ)
    message = str(caught.value)
    assert named in message
    assert fix in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("address", "pattern", "above"),
    [("n3", "node", ""), ("s0.s4.n3", "switch.switch.node", "/s0/s4"), ("b1.n3", "block.node", "/b1")],
)
def test_a_failure_domain_is_the_job_and_what_the_topology_has_above_the_node(
    address: str, pattern: str, above: str
) -> None:
    job = parsed({**STEP, "SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern})
    assert job.failure_domain == f"12{above}"
