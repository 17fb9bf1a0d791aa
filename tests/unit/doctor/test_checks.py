"""Every row of the doctor's table, on facts that `slurm-elastic doctor --nodes 2 --json` of a test cluster recorded.

recorded/site_<release>.json are of clusters with proctrack/linuxproc (22.05) and proctrack/cgroup; that of 26.05 has
slurmdbd and preempts by QOS. Each fault is the recorded facts with one thing changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic import typed_json
from slurm_elastic.doctor.checks import findings
from slurm_elastic.doctor.facts import (
    CollectiveFacts,
    EtcdFacts,
    GpuFacts,
    NodeFacts,
    ProbeResult,
    RunDirFacts,
    SiteFacts,
)
from slurm_elastic.finding import Check, Finding, Level, exit_code, findings_json
from slurm_elastic.slurm import ClusterConfig

RECORDED = Path(__file__).parent / "recorded"
RELEASES = ("22.05", "24.11", "26.05")


def site(release: str = "22.05") -> SiteFacts:
    told = json.loads((RECORDED / f"site_{release}.json").read_text())
    return typed_json.convert(told["facts"], SiteFacts)


def config(**changed: str) -> Callable[[SiteFacts], SiteFacts]:
    """Slurm is configured otherwise."""

    def change(site: SiteFacts) -> SiteFacts:
        assert site.slurm.config is not None
        fields = {**site.slurm.config.fields, **changed}
        return replace(site, slurm=replace(site.slurm, config=ClusterConfig(fields)))

    return change


def memory(gather: str, *params: str) -> Callable[[SiteFacts], SiteFacts]:
    """Memory is accounted for otherwise."""
    return config(JobAcctGatherType=f"jobacct_gather/{gather}", JobAcctGatherParams=",".join(params))


def partition(**changed: Any) -> Callable[[SiteFacts], SiteFacts]:
    """The default partition is another one."""

    def change(site: SiteFacts) -> SiteFacts:
        found = tuple(replace(each, **changed) if each.is_default else each for each in site.slurm.partitions)
        return replace(site, slurm=replace(site.slurm, partitions=found))

    return change


def no_default(site: SiteFacts) -> SiteFacts:
    """No partition is the default one, and none is named."""
    return partition(is_default=False)(replace(site, partition=""))


def second(change: Callable[[ProbeResult], ProbeResult]) -> Callable[[SiteFacts], SiteFacts]:
    """Node n2 tells something else."""
    return lambda site: replace(site, results=(site.results[0], change(site.results[1])))


def n2(**changed: Any) -> Callable[[SiteFacts], SiteFacts]:
    """Node n2 is otherwise than n1."""
    return second(lambda result: replace(result, facts=replace(result.facts, **changed)))


def torch(**changed: Any) -> Callable[[SiteFacts], SiteFacts]:
    """The torch of n2 is otherwise."""
    return lambda site: n2(torch=replace(site.results[1].facts.torch, **changed))(site)


def link(**changed: Any) -> Callable[[SiteFacts], SiteFacts]:
    """The way from n2 to n1 is otherwise."""
    return second(lambda result: replace(result, links=tuple(replace(each, **changed) for each in result.links)))


def collective(found: CollectiveFacts) -> Callable[[SiteFacts], SiteFacts]:
    """The collectives of n2 end otherwise."""
    return second(lambda result: replace(result, collectives=(found,)))


def on_gpus(site: SiteFacts) -> SiteFacts:
    """Node n2 has GPUs, and all of them belong to the job."""
    torch_facts = replace(site.results[1].facts.torch, cuda="12.4")
    gpus = (GpuFacts("NVIDIA H100"),) * 4
    driver = "550.54.15"
    return n2(torch=torch_facts, gpus=gpus, job_gpus=4, nvidia_driver=driver, locked_memory=-1)(site)


def run_dir(**changed: Any) -> Callable[[SiteFacts], SiteFacts]:
    def change(site: SiteFacts) -> SiteFacts:
        assert site.run_dir is not None
        return replace(site, run_dir=replace(site.run_dir, **changed))

    return change


def whole(**changed: Any) -> Callable[[SiteFacts], SiteFacts]:
    return lambda site: replace(site, **changed)


def cut_short(site: SiteFacts) -> SiteFacts:
    """The job ends before its nodes have told everything."""
    return replace(site, results=tuple(replace(each, is_complete=False) for each in site.results))


def of(check: str, found: list[Finding]) -> list[Finding]:
    return [each for each in found if each.check == check]


@pytest.mark.parametrize("release", RELEASES)
def test_nothing_is_wrong_with_the_test_cluster(release: str) -> None:
    found = findings(site(release))
    assert [each for each in found if each.level is not Level.OK] == []
    assert exit_code(found) == 0
    assert all(each.found for each in found)
    assert {each.fix for each in found if each.level is Level.OK} == {""}
    assert of("slurm.release", found)[0].found.startswith(release)
    proctrack = "proctrack/linuxproc" if release == "22.05" else "proctrack/cgroup"
    assert of("slurm.proctrack", found)[0].found == proctrack


def test_grace_is_that_of_the_qos() -> None:
    (found,) = of("slurm.grace", findings(replace(site("26.05"), checkpoint=15.5)))
    assert (found.level, found.found) == (Level.LIMIT, "QOS low: 20 s; a checkpoint takes 15.5 s")
    assert "20 s from the notice to SIGKILL, and its workers 15 s of it to save" in found.why
    (found,) = of("slurm.grace", findings(replace(site("26.05"), checkpoint=14)))
    assert found.level is Level.OK
    (found,) = of("slurm.grace", findings(replace(site("26.05"), qos="")))
    assert (found.level, found.found) == (Level.UNKNOWN, "that of the job's QOS: normal 0 s, low 20 s, high 0 s")


def test_a_checkpoint_is_held_against_the_grace() -> None:
    slow = replace(partition(grace=30)(site()), checkpoint=41)
    (found,) = of("slurm.grace", findings(slow))
    assert found.level is Level.LIMIT
    assert found.found == "partition low: 30 s; a checkpoint takes 41 s"
    assert "workers 25 s of it to save: too little for a checkpoint of 41 s" in found.why
    assert "GraceTime of 46 s" in found.fix
    assert of("slurm.grace", findings(partition(grace=46)(slow)))[0].level is Level.OK
    (found,) = of("slurm.grace", findings(replace(slow, checkpoint=25)))
    assert found.level is Level.OK


FAULTS: list[tuple[Callable[[SiteFacts], SiteFacts], str, Level, str, tuple[str, ...]]] = [
    (memory("linux", "OverMemoryKill"), "slurm.memory_accounting", Level.LIMIT, "linux, OverMemoryKill", ()),
    (config(SLURM_VERSION="21.08.8"), "slurm.release", Level.LIMIT, "21.08.8", ()),
    (config(SLURM_VERSION="27.05.1"), "slurm.release", Level.UNKNOWN, "27.05.1", ()),
    (partition(state="DOWN"), "slurm.partition", Level.BROKEN, "low: DOWN", ()),
    (no_default, "slurm.partition", Level.UNKNOWN, "no default partition", ()),
    (partition(preempt_mode="CANCEL"), "slurm.preemption", Level.LIMIT, "low: CANCEL", ()),
    (partition(preempt_mode="GANG,SUSPEND"), "slurm.preemption", Level.LIMIT, "low: SUSPEND", ()),
    (partition(grace=0), "slurm.grace", Level.LIMIT, "low: 0 s", ()),
    (partition(max_time=300), "slurm.time_limit", Level.LIMIT, "MaxTime 5 min", ()),
    (partition(default_time=60), "slurm.time_limit", Level.LIMIT, "without --time 60 s", ()),
    (config(ProctrackType="proctrack/pgid"), "slurm.proctrack", Level.LIMIT, "pgid", ()),
    (config(SlurmdTimeout="0 sec"), "slurm.slurmd_timeout", Level.LIMIT, "never", ()),
    (config(SlurmdTimeout="3600 sec"), "slurm.slurmd_timeout", Level.LIMIT, "3600 s", ()),
    (config(UnkillableStepTimeout="20 sec"), "slurm.unkillable_step", Level.LIMIT, "20 s", ()),
    (whole(slurm=replace(site().slurm, config=None)), "slurm.controller", Level.BROKEN, "no answer", ()),
    (run_dir(error="/x: No space left; make space"), "run_dir.usable", Level.BROKEN, "/x: No space left", ()),
    (run_dir(is_exclusive=False), "run_dir.usable", Level.BROKEN, "a file was created twice", ()),
    (run_dir(free=1 << 20), "run_dir.space", Level.LIMIT, "1 MiB free", ()),
    (run_dir(quota_left=5 << 20), "run_dir.space", Level.LIMIT, "5 MiB left of your quota", ()),
    (run_dir(record_seconds=2.5), "run_dir.speed", Level.LIMIT, "2500 ms for a record", ()),
    (run_dir(write_speed=1e6), "run_dir.speed", Level.LIMIT, "1 MB/s", ()),
    (link(file_delay=None), "run_dir.shared", Level.BROKEN, "1 of 2 new files", ()),
    (lambda s: replace(s, results=s.results[:1]), "node.answers", Level.BROKEN, "no result", ("n2",)),
    (cut_short, "node.answers", Level.BROKEN, "ended before", ("n1", "n2")),
    (n2(python="3.12.1"), "node.python", Level.LIMIT, "3.12.1 on n2", ("n2",)),
    (torch(release="2.14.1"), "node.torch_release", Level.LIMIT, "2.14.1 on n2", ("n2",)),
    (n2(package="0.1.0"), "node.package", Level.LIMIT, "0.1.0 on n2", ("n2",)),
    (n2(package="0.1.0", protocol=4), "node.package", Level.BROKEN, "0.1.0 on n2", ("n2",)),
    (torch(error="torch 2.1 is older; pip install"), "node.torch", Level.BROKEN, "torch 2.1 is older", ("n2",)),
    (torch(release="9.1.0"), "node.torch", Level.UNKNOWN, "9.1.0", ("n2",)),
    (n2(gpus=(GpuFacts("H", "3 wrong"),), locked_memory=-1), "node.gpus", Level.BROKEN, "GPU 0: 3 wrong", ("n2",)),
    (n2(job_gpus=4), "node.gpus", Level.BROKEN, "no NVIDIA driver is loaded, this torch is a CPU build", ("n2",)),
    (
        n2(shared_memory_error="Read-only file system; mount it"),
        "node.shared_memory",
        Level.BROKEN,
        "Read-only",
        ("n2",),
    ),
    (n2(shared_memory=32 << 20), "node.shared_memory", Level.LIMIT, "32 MiB free", ("n2",)),
    (n2(descriptors_soft=256, descriptors_hard=1024), "node.descriptors", Level.LIMIT, "1024 hard", ("n2",)),
    (n2(locked_memory=65536, gpus=(GpuFacts("H"),)), "node.locked_memory", Level.LIMIT, "64 KiB", ("n2",)),
    (n2(controller_offset=-90.4), "node.clock", Level.LIMIT, "-90 s against the controller", ("n2",)),
    (n2(controller_offset=None), "node.clock", Level.UNKNOWN, "not known", ("n2",)),
    (
        n2(controller_offset=None, has_squeue=False),
        "node.slurm_commands",
        Level.LIMIT,
        "scontrol and squeue get",
        ("n2",),
    ),
    (
        lambda site: n2(failure_domain="s1/s3")(config(TopologyPlugin="topology/tree")(site)),
        "slurm.topology",
        Level.OK,
        "topology/tree: n1 in none; n2 in s1/s3",
        (),
    ),
    (n2(address="", address_error="no address; give one"), "network.address", Level.BROKEN, "no address", ("n2",)),
    (link(leader_port_error="timed out"), "network.leader_port", Level.BROKEN, "n2 does not reach n1: timed", ("n1",)),
    (link(free_port_error="refused"), "network.free_port", Level.BROKEN, "n2 does not reach n1: refused", ("n1",)),
    (link(round_trip=0.2), "network.round_trip", Level.LIMIT, "200.00 ms, from n2 to n1", ("n2", "n1")),
    (collective(CollectiveFacts("gloo", error="refused")), "network.gloo", Level.BROKEN, "refused", ("n2",)),
    (collective(CollectiveFacts("gloo", bandwidth=2e6)), "network.gloo", Level.LIMIT, "2 MB/s", ()),
    (collective(CollectiveFacts("nccl", error="no socket")), "network.nccl", Level.BROKEN, "no socket", ("n2",)),
    (whole(etcd=EtcdFacts("e:2379", error="e:2379: refused; start it")), "etcd", Level.BROKEN, "e:2379: refused", ()),
    (whole(etcd=EtcdFacts("e:2379", seconds=0.012)), "etcd", Level.OK, "12 ms", ()),
]


@pytest.mark.parametrize(("fault", "check", "level", "words", "nodes"), FAULTS, ids=lambda value: str(value)[:24])
def test_a_fault_is_found_and_is_the_only_one(
    fault: Callable[[SiteFacts], SiteFacts], check: str, level: Level, words: str, nodes: tuple[str, ...]
) -> None:
    found = findings(fault(site()))
    (one,) = [each for each in of(check, found) if words in each.found]
    assert (one.level, one.nodes) == (level, nodes)
    assert one.why
    assert bool(one.fix) == (level in (Level.LIMIT, Level.BROKEN)) or level is Level.UNKNOWN
    others = {each.check for each in found if each.level in (Level.LIMIT, Level.BROKEN)} - {check}
    # A torch that no agent takes is another release, too; the controller's time is known by scontrol.
    assert others <= {{"node.torch": "node.torch_release", "node.clock": "node.slurm_commands"}.get(check)}
    assert exit_code([one]) == {Level.BROKEN: 2, Level.LIMIT: 1}.get(level, 0)


@pytest.mark.parametrize(
    ("fault", "check", "words"),
    [
        (config(PreemptType="preempt/none"), "slurm.preemption", "preempt/none, partition low: OFF"),
        (config(PreemptType="preempt/none"), "slurm.grace", "no grace"),
        (partition(preempt_mode="OFF"), "slurm.preemption", "low: OFF"),
        (config(AuthInfo="(null)"), "slurm.preemption", "121 s later at the earliest"),
        (config(SlurmctldParameters="preempt_send_user_signal"), "slurm.preemption", "the signal of --signal"),
        (config(PreemptParameters="reorder_count=2,send_user_signal"), "slurm.preemption", "the signal of --signal"),
        (config(JobAcctGatherType="(null)"), "slurm.memory_accounting", "none"),
        (memory("linux", "UsePss", "OverMemoryKill"), "slurm.memory_accounting", "linux, UsePss,OverMemoryKill"),
        (memory("cgroup", "OverMemoryKill"), "slurm.memory_accounting", "jobacct_gather/cgroup, OverMemoryKill"),
        (on_gpus, "node.gpus", "4 x NVIDIA H100; driver 550.54.15, torch is built for CUDA 12.4"),
        (collective(CollectiveFacts("nccl", bandwidth=21e9)), "network.nccl", "21000 MB/s"),
    ],
)
def test_what_differs_between_sites_is_told_and_no_fault(
    fault: Callable[[SiteFacts], SiteFacts], check: str, words: str
) -> None:
    found = findings(fault(site()))
    assert any(words in f"{each.found}; {each.why}" for each in of(check, found))
    assert exit_code(found) == 0


def test_nodes_that_are_alike_are_one_row_and_others_another() -> None:
    found = of("node.shared_memory", findings(n2(shared_memory_error="No space left on device; make room")(site())))
    assert [(each.level, each.nodes) for each in found] == [(Level.OK, ("n1",)), (Level.BROKEN, ("n2",))]
    (found_alike,) = of("node.shared_memory", findings(site()))
    assert found_alike.nodes == ("n1", "n2")


def test_without_an_answer_of_any_node_nothing_is_said_of_ports() -> None:
    deaf = replace(site(), results=tuple(replace(each, links=()) for each in site().results))
    for name in ("network.leader_port", "network.free_port", "network.round_trip", "run_dir.shared"):
        assert [each.level for each in of(name, findings(deaf))] == [Level.UNKNOWN], name


def test_a_node_that_was_not_reached_says_nothing_of_the_run_directory() -> None:
    deaf = link(free_port_error="no answer within 3 s", file_delay=None, round_trip=None)(site())
    assert [each.level for each in of("run_dir.shared", findings(deaf))] == [Level.OK]


def test_of_several_partitions_one_counts() -> None:
    (found,) = of("slurm.partition", findings(replace(site(), partition="high,other")))
    assert found.found == "high: UP, 2 nodes"


def test_without_a_job_this_machine_is_looked_at_and_no_node_is_missing() -> None:
    alone = replace(site(), results=(), expected=(), job="", here=site().results[0].facts)
    found = findings(alone)
    checks = {each.check for each in found}
    assert {"node.torch", "node.descriptors", "run_dir.usable"} < checks
    assert not any(name.startswith("network.") or name == "node.answers" for name in checks)
    assert all(each.nodes == () for each in found)
    (shared,) = of("run_dir.shared", found)
    assert shared.level is Level.UNKNOWN
    assert "--nodes 2" in shared.fix
    remote = replace(alone, run_dir=RunDirFacts("/home/me", filesystem="nfs4"))
    assert [each.level for each in of("run_dir.shared", findings(remote))] == [Level.OK]


def test_when_all_nodes_are_missing_the_output_of_the_job_is_quoted() -> None:
    silent = replace(site(), results=(), job_output=("no slurm-elastic on n1", "exit"))
    (found,) = of("node.answers", findings(silent))
    assert found.found.endswith("the job printed: no slurm-elastic on n1 / exit")
    assert found.nodes == ("n1", "n2")
    assert exit_code(findings(silent)) == 2


def test_a_job_that_never_ran_says_nothing_about_nodes() -> None:
    cancelled = replace(site(), results=(), expected=(), job="7", here=NodeFacts("login"))
    found = findings(cancelled)
    assert [each.found for each in of("node.answers", found)] == ["job 7 ended before it had nodes"]
    assert not [each for each in found if each.check.startswith("node.") and each.check != "node.answers"]
    assert exit_code(found) == 2


def test_json_has_every_field_of_a_finding() -> None:
    found = Check("node.gpus").broken("a", "b", "c", ("n1",), "train.py:3")
    (row,) = json.loads(json.dumps(findings_json([found])))
    assert list(row) == ["check", "level", "found", "why", "fix", "nodes", "place"]
    assert list(row.values()) == ["node.gpus", "broken", "a", "b", "c", ["n1"], "train.py:3"]


def test_every_check_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text()
    every = {each.check for fault, *_ in FAULTS for each in findings(fault(site()))}
    assert {name for name in every if f"`{name}`" not in text} == set()
