"""Fixtures of the cluster layer: a real Slurm cluster, a directory that all nodes see, an environment for jobs.

    def test_something(cluster, workdir, environment): ...

    @pytest.mark.proctrack("linuxproc")     the other process tracking; "cgroup" without the mark
    @pytest.mark.proctrack("cgroup", "linuxproc")     runs the test on each; with nightly="linuxproc" on that by night
    @pytest.mark.topology("tree")           n1 and n3 on one switch, n2 and n4 on another one; or "block"
    @pytest.mark.accounting                 with slurmdbd: sacct works, and preemption is by QOS, not by partition

SLURM_ELASTIC_TEST_RELEASE=24.11 or 26.05 runs the whole layer on that Slurm release. Jobs run in an environment of
their own, or in the one at SLURM_ELASTIC_TEST_ENVIRONMENT as it is.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests import late
from tests.cluster.aftermath import describe
from tests.cluster.jobs import PATIENT, Jobs
from tests.cluster.testbed import Cluster, Settings, TestbedError
from tests.cluster.testbed.sessions import Session

VENV = Path(sys.prefix)
"""The environment that the tests run in; users of the cluster have to be able to execute it."""
FRAMEWORKS = Path("/opt/slurm-elastic/frameworks")
"""Training frameworks, stacked upon the environment that `make setup` creates."""
CHECKOUT = Path(__file__).parents[2]
# Not below /tmp's pytest directories: those are private to root.
WORK = Path("/var/tmp/slurm-elastic-tests")

_failed = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "topology(kind): Slurm's topology plugin")
    config.addinivalue_line("markers", "proctrack(*names, nightly): process trackings to run the test on")


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without root there are no namespaces; anything else that is missing is an error, not a skip."""
    if os.geteuid() != 0:
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.skip(reason="the cluster layer needs root"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "proctrack" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("proctrack")
        names: list[Any] = list(marker.args) if marker else ["cgroup"]
        if marker and "nightly" in marker.kwargs:
            names.append(pytest.param(marker.kwargs["nightly"], marks=pytest.mark.nightly))
        metafunc.parametrize("proctrack", names, indirect=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed:
        item.stash[_failed] = True
    found = getattr(item, "funcargs", {})
    # Before the fixtures clear everything away.
    if report.failed and report.when == "call" and "cluster" in found:
        try:
            text = describe(found["cluster"], found.get("workdir"))
        except Exception as error:
            # Files and machines may go at any moment.
            text = f"cannot be said: {error!r}"
        report.sections.append(("what there was on the cluster", text))
    return report


@pytest.fixture
def proctrack(request: pytest.FixtureRequest) -> str:
    """The process tracking of the test's cluster."""
    return request.param


@pytest.fixture(scope="session")
def release() -> str:
    """The Slurm release under test."""
    return os.environ.get("SLURM_ELASTIC_TEST_RELEASE", "22.05")


@pytest.fixture(scope="session")
def cluster_session() -> Iterator[Session]:
    """All clusters of this session; none outlives it."""
    # Ended as by Ctrl-C, so that the clusters go down; SIGKILL leaves them to the next session.
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with Session() as session:
            yield session
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture
def cluster(
    request: pytest.FixtureRequest, cluster_session: Session, proctrack: str, release: str
) -> Iterator[Cluster]:
    """Idle nodes without jobs, n1 to n4; shared by the tests that want the same cluster."""
    accounting = request.node.get_closest_marker("accounting") is not None
    topology = request.node.get_closest_marker("topology")
    kind = topology.args[0] if topology else ""
    settings = Settings(cluster_session.name, 4, proctrack, accounting, release, kind)
    cluster = cluster_session.cluster(settings)
    yield cluster
    cluster.restore()


@pytest.fixture
def workdir(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A fresh directory of the ordinary user that every node sees; kept if the test fails."""
    directory = shared_directory(request.node.name)
    yield directory
    if request.node.stash.get(_failed, False):
        print(f"kept: {directory}")
    else:
        remove_shared_directory(directory)


def shared_directory(name: str) -> Path:
    """Make a fresh directory of the ordinary user that every node sees."""
    prefix = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:40]
    directory = _fresh_directory(f"{prefix}-")
    shutil.chown(directory, "elastic", "elastic")
    return directory


def _fresh_directory(prefix: str) -> Path:
    while True:
        WORK.mkdir(mode=0o755, exist_ok=True)
        # Another session that ends may remove the parent in between.
        with contextlib.suppress(FileNotFoundError):
            directory = Path(tempfile.mkdtemp(prefix=prefix, dir=WORK))
            directory.chmod(0o755)
            return directory


def remove_shared_directory(directory: Path) -> None:
    """Remove what `shared_directory` made."""
    shutil.rmtree(directory)
    _remove_if_empty(WORK)


@pytest.fixture
def jobs(request: pytest.FixtureRequest, cluster: Cluster, workdir: Path, environment: Path) -> Iterator[Jobs]:
    """Submits trainings; a test that uses it has to end its jobs, and nothing of them may be left on any node."""
    submitter = Jobs(cluster, workdir, environment)
    submitter.environ.update(PATIENT)
    if late.environment():
        # The user of the jobs may not read the checkout, so `own_environment` has the hook.
        submitter.environ[late.VARIABLE] = os.environ[late.VARIABLE]
    yield submitter
    if not request.node.stash.get(_failed, False):
        assert submitter.going_on() == ""
        # A job that was cancelled last may still be ending, with its processes.
        cluster.wait_until("jobs do not end", lambda: submitter.running() == "", 20)
        with contextlib.suppress(TestbedError):
            cluster.wait_until("", lambda: submitter.processes() == {}, 5)
        assert submitter.processes() == {}


@pytest.fixture(scope="session")
def environment() -> Iterator[Path]:
    """The bin directory of an environment with this checkout's package, installed as a user installs it."""
    if given := os.environ.get("SLURM_ELASTIC_TEST_ENVIRONMENT"):
        yield Path(given) / "bin"
        return
    if not (VENV / "bin/python").exists():
        pytest.fail(f"{VENV} is missing: run `make setup` first", pytrace=False)
    with own_environment() as programs:
        yield programs


@contextlib.contextmanager
def own_environment(upon: Path = VENV) -> Iterator[Path]:
    """Install the wheel of this checkout, and yield the directory of its programs.

    It is the caller's own and stacked upon the common one, so that sessions of different checkouts do not change each
    other's package.
    """
    own = _fresh_directory("environment-")
    try:
        _run(str(VENV / "bin/python"), "-m", "venv", "--without-pip", str(own))
        (below,) = upon.glob("lib/python3*/site-packages")
        (packages,) = own.glob("lib/python3*/site-packages")
        (packages / "below.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n")
        if late.environment():
            shutil.copy(late.HOOK / "sitecustomize.py", packages)
        pip = [str(VENV / "bin/pip"), "--disable-pip-version-check"]
        # As it is published: the wheel comes from the sdist, and the sdist from the checkout.
        dist = own / "dist"
        sdist = ["hatchling", "build", "--target", "sdist", "--directory", str(dist)]
        _run(str(VENV / "bin/python"), "-m", *sdist, cwd=CHECKOUT)
        wheel = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(dist)]
        _run(*pip, *wheel, *map(str, dist.glob("*.tar.gz")))
        install = ["--python", str(own / "bin/python"), "install", "--quiet", "--no-deps", "--ignore-installed"]
        _run(*pip, *install, *map(str, dist.glob("*.whl")))
        yield own / "bin"
    finally:
        shutil.rmtree(own, ignore_errors=True)
        _remove_if_empty(WORK)


def _remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


def _run(*argv: str, cwd: Path | None = None) -> None:
    done = subprocess.run(
        argv, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, umask=0o022, check=False
    )
    if done.returncode != 0:
        pytest.fail(f"{' '.join(argv)}: exit {done.returncode}\n{done.stdout}", pytrace=False)
