"""Fixtures of the container layer: those of the cluster layer, and an image with this checkout's package."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# The hooks and fixtures of the cluster layer are this layer's as well.
from tests.cluster.conftest import (  # noqa: F401
    CHECKOUT,
    VENV,
    cluster,
    cluster_session,
    environment,
    jobs,
    proctrack,
    pytest_configure,
    pytest_generate_tests,
    pytest_runtest_makereport,
    release,
    remove_shared_directory,
    shared_directory,
    workdir,
)

APPTAINER = Path("/opt/slurm-elastic/apptainer/usr/bin/apptainer")
BASE = Path("/opt/slurm-elastic/image-base")
DEFINITION = CHECKOUT / "docs/containers/slurm_elastic.def"


@pytest.fixture(scope="session")
def image(environment: Path) -> Iterator[Path]:  # noqa: F811
    """An image that Apptainer built from the definition of the documentation, with the wheel of `environment`.

    torch is not in it: it comes from outside, where the image's Python finds it.
    """
    if not (APPTAINER.exists() and (BASE / ".setup").exists()):
        pytest.fail("there is no Apptainer: run `.ci/setup --apptainer`", pytrace=False)
    directory = shared_directory("image")
    (wheel,) = (environment.parent / "dist").glob("*.whl")
    arguments = {
        "bootstrap": "localimage",
        "base": str(BASE),
        "wheel": str(wheel),
        "pip_options": "--no-deps --no-index --ignore-installed --break-system-packages",
    }
    command = [str(APPTAINER), "build", "--sandbox", f"--bind={VENV}"]
    for name, value in arguments.items():
        command += ["--build-arg", f"{name}={value}"]
    try:
        _as_root_of_a_namespace([*command, str(directory / "image"), str(DEFINITION)])
        subprocess.run(["chmod", "-R", "a+rX", str(directory / "image")], check=True)
        yield directory / "image"
    finally:
        remove_shared_directory(directory)


def _as_root_of_a_namespace(command: list[str]) -> None:
    """Run a command with all capabilities, which root of this machine may lack; Apptainer asks for them to build."""
    wait = ["unshare", "--user", "--mount", "--", "bash", "-c", 'read -r; exec "$@"', "bash"]
    process = subprocess.Popen(
        [*wait, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    own, deadline = Path("/proc/self/ns/user").readlink(), time.monotonic() + 10
    while Path(f"/proc/{process.pid}/ns/user").readlink() == own:
        assert time.monotonic() < deadline, "unshare makes no user namespace"
        time.sleep(0.01)
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{process.pid}/{name}").write_text("0 0 65536\n")
    output, _ = process.communicate("\n", timeout=300)
    if process.returncode != 0:
        pytest.fail(f"{shutil.which(command[0])} {command[1]}: exit {process.returncode}\n{output}", pytrace=False)
