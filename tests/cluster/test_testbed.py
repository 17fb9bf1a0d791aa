"""The test cluster does what it promises."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.cluster.testbed import Cluster, Settings, TestbedError
from tests.cluster.testbed import config as rendered
from tests.cluster.testbed.lock import Lock
from tests.cluster.testbed.sessions import Session
from tests.cluster.testbed.settings import STATE
from tests.cluster.testbed.slurm import records

CHECKOUT = Path(__file__).parents[2]

# A task and its child write down which signals they get; the task passes USR1 on as USR2.
SIGNALS = """
import os, signal, time
role = "task"
def note(signum, frame):
    os.write(1, f"{role} {signal.Signals(signum).name}\\n".encode())
    if role == "task" and signum == signal.SIGUSR1:
        os.kill(child, signal.SIGUSR2)
for signum in (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(signum, note)
child = os.fork()
if child == 0:
    role = "child"
os.write(1, f"{role} ready\\n".encode())
while True:
    time.sleep(60)
"""


TIMED_OUT = 124


def connect_to_n2(cluster: Cluster, seconds: int = 20) -> int:
    """The exit code of a program on n1 that connects to n2's slurmd."""
    argv = ["timeout", str(seconds), "bash", "-c", "exec 3<>/dev/tcp/n2/6818"]
    return cluster.command(argv, machine="n1", check=False).returncode


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.proctrack("cgroup", "linuxproc")
def test_four_nodes_with_names_of_their_own_run_a_job_as_the_ordinary_user(cluster, workdir):
    report = 'echo "$SLURMD_NODENAME $(hostname) $(id -un) gpu=$CUDA_VISIBLE_DEVICES"'
    address = "getent ahostsv4 $(hostname) | head -n 1"
    (workdir / "job.sh").write_text(f"#!/bin/bash\nsrun --output=%N.txt bash -c '{report}; {address}'\n")

    job = cluster.submit(["--nodes=4", "job.sh"], workdir)

    cluster.wait_for(job, "COMPLETED")
    for number, node in enumerate(("n1", "n2", "n3", "n4"), start=1):
        assert (workdir / f"{node}.txt").read_text().split() == [
            *(node, node, "elastic", "gpu="),
            *(f"10.77.0.{100 + number}", "STREAM", node),
        ]


def test_the_release_is_the_one_asked_for(cluster, release):
    assert f" {release}." in cluster.command(["sinfo", "--version"]).stdout


def test_jobs_run_the_package_of_this_checkout(cluster, environment):
    code = "import pathlib, slurm_elastic, torch; print(pathlib.Path(slurm_elastic.__file__).parents[4])"
    shown = cluster.command(["srun", str(environment / "python"), "-c", code])

    assert shown.stdout.strip() == str(environment.parent)


def test_gpus_are_given_to_those_who_ask(cluster):
    shown = cluster.command(["srun", "--gpus-per-node=2", "printenv", "CUDA_VISIBLE_DEVICES"])

    assert shown.stdout == "0,1\n"


def test_a_killed_node_has_no_processes_and_comes_back(cluster, workdir):
    orphan = "setsid sleep 600 & sleep 600"
    cluster.submit(["--nodelist=n2", "--wrap", orphan], workdir)
    # n1 knows n2's hardware address from here on, and must still reach it afterwards.
    assert connect_to_n2(cluster) == 0
    cluster.wait_until("no sleep on n2", lambda: len(sleeps(cluster, "n2")) == 2)

    cluster.kill("n2")

    assert cluster.processes("n2", user=None) == []
    cluster.start("n2")
    assert connect_to_n2(cluster) == 0
    assert cluster.command(["srun", "--nodelist=n2", "hostname"]).stdout == "n2\n"


def sleeps(cluster: Cluster, node: str) -> list[object]:
    return [process for process in cluster.processes(node) if process.name == "sleep"]


def test_a_cut_node_is_silent_until_it_is_healed(cluster):
    assert connect_to_n2(cluster) == 0

    cluster.cut("n2")
    assert connect_to_n2(cluster, 1) == TIMED_OUT

    cluster.heal("n2")
    assert connect_to_n2(cluster) == 0


def test_restore_undoes_what_a_test_did(cluster, workdir):
    stubborn = "trap '' TERM; while :; do sleep 1; done"
    cluster.submit(["--nodes=4", "--wrap", stubborn], workdir)
    cluster.kill("n1")
    cluster.cut("n4")
    cluster.command(["scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=test"], user="root")
    cluster.kill("ctl")

    cluster.restore()

    assert cluster.command(["squeue", "-h"]).stdout == ""
    shown = cluster.command(["srun", "--nodes=4", "hostname"]).stdout
    assert sorted(shown.split()) == ["n1", "n2", "n3", "n4"]


def test_the_controller_can_be_lost_and_comes_back(cluster):
    cluster.kill("ctl")
    assert cluster.processes("ctl", user=None) == []
    cluster.start("ctl")

    # The state that slurmctld had saved may be seconds old.
    cluster.restore()
    assert cluster.command(["srun", "hostname"]).returncode == 0


@pytest.mark.nightly
def test_preemption_takes_one_of_four_single_node_jobs_and_requeues_it(cluster, workdir):
    (workdir / "signals.py").write_text(SIGNALS)
    job = cluster.submit(
        [
            *("--array=0-3", "--exclusive", "--requeue", "--open-mode=append", "--output=%a.txt"),
            *("--wrap", "srun /usr/bin/python3 signals.py"),
        ],
        workdir,
    )
    outputs = [workdir / f"{index}.txt" for index in range(4)]
    cluster.wait_until("not all ready", lambda: all("task ready" in lines(path) for path in outputs))

    # On a node that is named: else Slurm may warn another job while the first one is being killed.
    high = cluster.submit(["--partition=high", "--exclusive", "--nodelist=n3", "--wrap", "sleep 600"], workdir)

    def told() -> list[int]:
        return [index for index, path in enumerate(outputs) if "task SIGTERM" in lines(path)]

    cluster.wait_until("nobody was told", lambda: bool(told()))
    (victim,) = told()
    fields = cluster.job(f"{job}_{victim}")
    assert (fields["JobState"], fields["Restarts"], fields["NodeList"]) == ("RUNNING", "0", "n3")
    assert fields["PreemptTime"] != "None"
    # Its grace, until the end of which is looked at, and until it is killed.
    cluster.wait_for(f"{job}_{victim}", "PENDING", timeout=15 + 30 + 5 + 30)
    cluster.wait_for(high, "RUNNING")
    assert told() == [victim]
    assert cluster.job(f"{job}_{victim}")["Restarts"] == "1"


@pytest.mark.proctrack("cgroup", "linuxproc")
def test_a_signal_reaches_whom_the_process_tracking_says(cluster, workdir, proctrack):
    (workdir / "signals.py").write_text(SIGNALS)
    job = cluster.submit(
        ["--output=out.txt", "--wrap", "srun /usr/bin/python3 signals.py"],
        workdir,
    )
    output = workdir / "out.txt"
    cluster.wait_until("not ready", lambda: {"task ready", "child ready"} <= set(lines(output)))

    cluster.command(["scancel", "--signal=USR1", str(job)])

    told = {"task SIGUSR1", "child SIGUSR2", *(["child SIGUSR1"] if proctrack == "linuxproc" else [])}
    cluster.wait_until("no signal", lambda: told <= set(lines(output)))
    assert ("child SIGUSR1" in lines(output)) == (proctrack == "linuxproc")


@pytest.mark.accounting
def test_accounting_knows_a_job(cluster, workdir):
    job = cluster.submit(["--wrap", "true"], workdir)

    def state() -> str:
        return cluster.command(["sacct", "-X", "-n", "-P", "-j", str(job), "-o", "state"]).stdout.strip()

    cluster.wait_until("sacct does not know the job", lambda: state() == "COMPLETED")


def traces(name: str) -> list[str]:
    """Whatever a cluster can leave on the machine: processes, namespaces, mounts, control groups, files."""
    found = [str(path) for path in Path("/run/netns").glob(f"slurm-elastic.{name}.*")]
    found += [line for line in Path("/proc/mounts").read_text().splitlines() if name in line]
    found += [str(path) for path in Path("/sys/fs/cgroup").glob(f"freezer/slurm-elastic/{name}")]
    found += [str(path) for path in STATE.glob(f"{name}*")]
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if f"/{name}/".encode() in (directory / "cmdline").read_bytes():
                found.append(str(directory))
        except OSError:
            continue
    return found


def left_of(name: str, own: str = "") -> list[str]:
    """The traces of a session's cluster, which has ended; if another session has its place by now, they are not of it.

    The place called `own` is the caller's.
    """
    place = name.split("-")[0]
    lock = Lock(place)
    if place != own and not lock.acquire(wait=False):
        return []
    try:
        return traces(name)
    finally:
        lock.release()


@pytest.fixture
def spare(cluster_session, release):
    """Settings of a small cluster that no other test uses."""
    settings = Settings(f"{cluster_session.name}-spare", nodes=1, release=release)
    yield settings
    Cluster(settings).down()


def test_down_leaves_nothing(spare, workdir):
    cluster = Cluster.up(spare)
    job = cluster.submit(["--wrap", "sleep 600"], workdir)
    cluster.wait_for(job, "RUNNING")
    assert traces(spare.name)

    cluster.down()

    assert traces(spare.name) == []


def test_up_uses_a_healthy_cluster_and_replaces_another(spare):
    first = Cluster.up(spare)
    before = init_of(first, "n1")

    assert init_of(Cluster.up(spare), "n1") == before
    first.kill("n1")
    again = Cluster.up(spare)
    assert again.command(["srun", "hostname"]).stdout == "n1\n"


def init_of(cluster: Cluster, node: str) -> int:
    """The id that the host gives the node's first process."""
    (pid,) = [process.pid for process in cluster.processes(node, user=None) if process.inner_pid == 1]
    return pid


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        cwd=CHECKOUT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_up_cleans_what_a_killed_up_left_half_made(spare):
    code = """
        import sys
        from tests.cluster.testbed import Cluster, Settings
        Cluster.up(Settings(sys.argv[1], nodes=20, release=sys.argv[2]))
    """
    with python(code, spare.name, spare.release) as process:
        while not Path(f"/run/netns/{spare.namespace('n3')}").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()

    cluster = Cluster.up(spare)

    assert cluster.command(["srun", "hostname"]).stdout == "n1\n"
    cluster.down()
    assert traces(spare.name) == []


def test_the_next_session_removes_what_a_killed_one_left(release):
    code = """
        import signal, sys
        from tests.cluster.testbed import Settings
        from tests.cluster.testbed.sessions import Session
        with Session() as session:
            cluster = session.cluster(Settings(session.name, nodes=1, release=sys.argv[1]))
            print(cluster.settings.name, flush=True)
            signal.pause()
    """
    with python(code, release) as process:
        name = process.stdout.readline().strip()
        before = traces(name)
        process.kill()
    assert before

    with Session() as session:
        assert left_of(name, session.name) == []


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_a_test_run_that_is_ended_takes_its_cluster_down(tmp_path, ending):
    test = tmp_path / "test_that_waits.py"
    test.write_text(
        textwrap.dedent("""
            import signal, sys
            def test_that_waits(cluster):
                print(cluster.settings.name, file=sys.stderr, flush=True)
                signal.pause()
        """)
    )
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "tests.cluster.conftest"]
    with subprocess.Popen(
        [*command, "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(test)],
        cwd=CHECKOUT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        name = process.stderr.readline().strip()
        before = traces(name)
        os.kill(process.pid, ending)
        try:
            process.wait(timeout=60)
        finally:
            process.kill()
    assert before
    assert process.returncode == pytest.ExitCode.INTERRUPTED

    assert left_of(name) == []


def test_slurm_conf_follows_the_settings():
    plain = rendered.slurm_conf(Settings(nodes=2, proctrack="linuxproc"))
    accounted = rendered.slurm_conf(Settings(accounting=True))

    assert "ProctrackType=proctrack/linuxproc\n" in plain
    assert "Nodes=n[1-2] " in plain
    assert "AccountingStorageType=accounting_storage/none\n" in plain
    assert "AccountingStorageHost=dbd\n" in accounted


@pytest.mark.parametrize(
    "bad", [{"name": "a.b"}, {"name": ""}, {"nodes": 0}, {"proctrack": "pgid"}, {"release": "19.05"}]
)
def test_bad_settings_are_refused(bad):
    with pytest.raises(TestbedError):
        Settings(**bad)


def test_scontrol_records_are_split_into_fields():
    shown = """\
JobId=7 ArrayJobId=7 ArrayTaskId=1 JobName=a=b c
   UserId=elastic(999) JobState=RUNNING Reason=None
   TRES=cpu=4,node=4
   Command=/x/train.sh --lr 1 Seed=3

JobId=8 JobName=d
   JobState=PENDING
"""
    first, second = records(shown)

    assert first["JobName"] == "a=b c"
    assert first["JobState"] == "RUNNING"
    assert first["TRES"] == "cpu=4,node=4"
    assert first["Command"] == "/x/train.sh --lr 1 Seed=3"
    assert second == {"JobId": "8", "JobName": "d", "JobState": "PENDING"}
