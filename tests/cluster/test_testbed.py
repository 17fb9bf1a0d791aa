"""The test cluster has the package of this checkout, and what a killed session leaves on the machine is removed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.cluster.testbed.lock import Lock
from tests.cluster.testbed.sessions import Session
from tests.cluster.testbed.settings import STATE

CHECKOUT = Path(__file__).parents[2]


def test_jobs_run_the_package_of_this_checkout(cluster, environment):
    code = "import pathlib, slurm_elastic; print(pathlib.Path(slurm_elastic.__file__).parents[4])"
    shown = cluster.command(["srun", str(environment / "python"), "-c", code])

    assert shown.stdout.strip() == str(environment.parent)


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


def python(*arguments: str) -> subprocess.Popen[str]:
    """A Python whose one output is read."""
    command = [sys.executable, *map(textwrap.dedent, arguments)]
    return subprocess.Popen(command, cwd=CHECKOUT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)


def require_gone(name: str, own: str = "") -> None:
    """Nothing is left of a cluster; what is there now is not of it if another session has its place."""
    place = name.split("-")[0]
    lock = Lock(place)
    if place == own or lock.acquire(wait=False):
        assert traces(name) == []
        lock.release()


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
    with python("-c", code, release) as process:
        name = process.stdout.readline().strip()
        before = traces(name)
        process.kill()
    assert before

    with Session() as session:
        require_gone(name, session.name)


def test_a_test_run_that_is_ended_takes_its_cluster_down(tmp_path):
    test = tmp_path / "test_that_waits.py"
    test.write_text(
        textwrap.dedent("""
            import time
            def test_that_waits(cluster):
                print(f"cluster: {cluster.settings.name}", flush=True)
                # Not signal.pause(), which a signal that comes just before it does not end (pause(2)).
                while True:
                    time.sleep(0.1)
        """)
    )
    options = ("-q", "-s", "-p", "tests.cluster.conftest", "-p", "no:cacheprovider", f"--rootdir={tmp_path}")
    with python("-m", "pytest", *options, str(test)) as process:
        name = next(line.split()[1] for line in process.stdout if line.startswith("cluster: "))
        before = traces(name)
        process.terminate()
        try:
            process.wait(timeout=60)
        finally:
            process.kill()
    assert before
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    require_gone(name)
