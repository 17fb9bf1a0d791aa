"""Run the tests with several releases of torch, Python and Slurm, and write down what came of it.

    python3 -m tests.matrix                                        every cell of the plan
    TORCH=2.15.0 PYTHON=3.11 SLURM=26.05 python3 -m tests.matrix   one cell: all three layers
    PYTHON=3.13 python3 -m tests.matrix --layer unit               one layer of the newest torch with that Python
    TORCH=any python3 -m tests.matrix                              jobs and tests with torch and slurm_elastic alone:
                                                                   without numpy, which torch does not require
    python3 -m tests.matrix --table                                only the table in docs/versions.md

Each cell has an environment of its own below /opt/slurm-elastic/matrix. Python 3.14 is that of
the Debian root with Slurm 26.05: its cells run in there. A cell for which there is no Python or no wheel is recorded as
not available. Ends with 1 where a test has failed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tests.matrix.cells import (
    ANY_TORCH,
    COMMON_PYTHON,
    NEWEST_TORCH,
    Cell,
    Layer,
    Outcome,
    Result,
    cells,
    dumped,
    loaded,
    recorded,
    table,
)

CHECKOUT = Path(__file__).parents[2]
HOME = Path("/opt/slurm-elastic")
RESULTS = CHECKOUT / "docs" / "versions.json"
PAGE = CHECKOUT / "docs" / "versions.md"
INSTALLER = HOME / "matrix" / "installer" / "bin/uv"
NEWER_DEBIAN = HOME / "forky"
NEWER_PYTHON = "3.14"
"""The Python of that Debian root."""
ENTER = """\
root=$1 checkout=$2
shift 2
# A test has a file system for itself, which needs a root that is a mount point.
mount --rbind "$root" "$root"
mkdir -p "$root$checkout" "$root/etc/ssl/certs"
for shared in /proc /dev /sys /tmp /opt /etc/passwd /etc/group /etc/hosts /etc/resolv.conf "$checkout"; do
    mount --rbind "$shared" "$root$shared"
done
# Not shared: a package that is installed in there would write its own list over this machine's.
cp --dereference /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
exec chroot "$root" env --chdir="$checkout" "$@"
"""
"""Runs a command in another Debian root, in a mount namespace of its own."""
OWN_NETWORK = ("unshare", "--net", "sh", "-ec", 'ip link set lo up; exec "$0" "$@"')
"""Runs a command in a network namespace of its own: agents of another cell would take the same ports."""
BEGIN, END = "<!-- table: make test-matrix -->\n", "<!-- end of the table -->\n"


class NotAvailableError(Exception):
    """A cell cannot be had on this machine; the message says why."""


def main() -> int:
    """Run the cells that the environment names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only write the table anew")
    parser.add_argument("--layer", choices=[layer.value for layer in Layer], help="run this layer only")
    parser.add_argument("--keep", action="store_true", help="keep the environments, which take gigabytes each")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    arguments = parser.parse_args()
    failed = False
    for cell in () if arguments.table else cells(os.environ):
        layers = [layer for layer in cell.layers if arguments.layer in (None, layer.value)]
        for result in run(cell, layers, arguments.pytest, keep=arguments.keep) if layers else ():
            print(f"{cell}: {result.layer}: {result.outcome} {result.reason}", flush=True)
            failed |= result.outcome == Outcome.FAILED.value
            RESULTS.write_text(dumped(recorded(loaded(RESULTS.read_text()), result)))
            write_table()
    write_table()
    return 1 if failed else 0


def write_table() -> None:
    """Write the table of the recorded results into the page; a unit test compares the two."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(loaded(RESULTS.read_text()))}\n{END}{rest.partition(END)[2]}")


def run(cell: Cell, layers: Sequence[Layer], options: Sequence[str], *, keep: bool) -> Iterator[Result]:
    """Run these layers of a cell, and yield each one's result as it comes."""
    directory = HOME / "matrix" / f"torch-{cell.torch}-python-{cell.python}"
    try:
        if any(layer in (Layer.CLUSTER, Layer.FRESH) for layer in layers):
            require_release(cell)
        python, inside = interpreter(cell.python)
        make_environment(cell, directory, python, inside)
        if cell.torch == ANY_TORCH:
            # pip has chosen a release.
            found = 'import importlib.metadata; print(importlib.metadata.version("torch"))'
            cell = replace(cell, torch=output(*inside, str(directory / "bin/python"), "-c", found))
        for layer in layers:
            if layer in (Layer.FRESH_UNIT, Layer.FRESH_LOCAL):
                install(directory, inside, "pytest")
            yield tested(cell, layer, directory, inside, options)
    except NotAvailableError as error:
        for layer in layers:
            yield result(cell, layer, Outcome.NOT_AVAILABLE, reason=str(error))
    finally:
        if not keep:
            subprocess.run(["rm", "-rf", str(directory)], check=True)


def require_release(cell: Cell) -> None:
    """Make the Debian root of a release of Slurm."""
    if not cell.slurm:
        return
    if cell.python != COMMON_PYTHON:
        raise NotAvailableError(f"the test cluster's machines have Python {COMMON_PYTHON}")
    setup = subprocess.run([str(CHECKOUT / ".ci/setup"), "--release", cell.slurm], check=False)
    if setup.returncode != 0:
        raise NotAvailableError(f"no Slurm {cell.slurm}")


def make_environment(cell: Cell, directory: Path, python: str, inside: Sequence[str]) -> None:
    """Install torch, this checkout and what the tests need; `inside` starts every command that runs that Python."""
    if not INSTALLER.exists():
        # uv shares the gigabytes of one torch between environments.
        call("/usr/bin/python3", "-m", "venv", str(INSTALLER.parents[1]))
        call(str(INSTALLER.with_name("pip")), "install", "--quiet", "uv")
    if not (directory / "bin/python").exists():
        call(*inside, python, "-m", "venv", str(directory))
    packages = [f"torch=={cell.torch}", "pip", "hatchling", "wheel", f"{CHECKOUT}[test]"]
    if cell.torch == ANY_TORCH:
        packages = ["torch", str(CHECKOUT)]
    try:
        install(directory, inside, *packages)
    except NotAvailableError as error:
        lacking = "no wheels for torch" if "torch" in str(error) else "not all packages"
        raise NotAvailableError(f"{lacking} {cell.torch} and Python {cell.python}") from None
    # uv takes the package of an earlier checkout for this one, as its version is the same.
    install(directory, inside, "--reinstall", "--no-deps", str(CHECKOUT))


def install(directory: Path, inside: Sequence[str], *packages: str) -> None:
    """Install packages in an environment.

    Raises:
        NotAvailableError: They cannot be had.
    """
    uv = [*inside, str(INSTALLER), "pip", "install", "--quiet", "--compile-bytecode"]
    done = subprocess.run(
        [*uv, "--python", str(directory / "bin/python"), *packages],
        env={**os.environ, "UV_CACHE_DIR": str(HOME / "matrix" / "cache"), **as_pip(INSTALLER.with_name("pip"))},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr)
        raise NotAvailableError(done.stderr)


def as_pip(pip: Path) -> dict[str, str]:
    """Return variables that let uv look for packages where pip is configured to."""
    shown = subprocess.run([str(pip), "config", "list"], stdout=subprocess.PIPE, text=True, check=True).stdout
    given = dict(line.split("=", 1) for line in shown.splitlines())
    names = {"find-links": "UV_FIND_LINKS", "extra-index-url": "UV_EXTRA_INDEX_URL", "index-url": "UV_DEFAULT_INDEX"}
    values = {key.rpartition(".")[2]: value.strip("'") for key, value in given.items()}
    found = {variable: values[name].replace("\\n", " ") for name, variable in names.items() if name in values}
    if "cert" in values:
        found["SSL_CERT_FILE"] = values["cert"]
    return {**found, "UV_INDEX_STRATEGY": "unsafe-best-match", "UV_PYTHON_DOWNLOADS": "never", "UV_HTTP_TIMEOUT": "300"}


def interpreter(release: str) -> tuple[str, Sequence[str]]:
    """Return a Python of this release and the start of every command that runs it.

    It is this machine's own, one in PATH, one that pyenv has built, or that of a newer Debian in its root.
    """
    candidates = [Path(f"/usr/bin/python{release}"), *(Path(d) / f"python{release}" for d in os.get_exec_path())]
    candidates += sorted(Path.home().glob(f".pyenv/versions/{release}.*/bin/python"))
    for candidate in candidates:
        if candidate.exists() and _is_python(release, [str(candidate)]):
            return str(candidate), ()
    if release == NEWER_PYTHON:
        inside = (*("unshare", "--mount", "sh", "-ec", ENTER, "sh"), str(NEWER_DEBIAN), str(CHECKOUT))
        python = f"/usr/bin/python{release}"
        if not Path(f"{NEWER_DEBIAN}{python}").exists():
            call(str(CHECKOUT / ".ci/setup"), "--release", "26.05")
            apt = ("apt-get", "install", "--yes", "--quiet=2", "--no-install-recommends", f"python{release}-venv")
            subprocess.run([*inside, *apt], check=False)
        if _is_python(release, [*inside, python]):
            return python, inside
    raise NotAvailableError(f"no Python {release}")


def _is_python(release: str, command: Sequence[str]) -> bool:
    asked = [*command, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    done = subprocess.run(asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    return done.stdout.strip() == release


def tested(cell: Cell, layer: Layer, directory: Path, inside: Sequence[str], options: Sequence[str]) -> Result:
    """Run a layer of tests and count them."""
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.xml"
        python = str(directory / "bin/python")
        environ = {**os.environ, **({"SLURM_ELASTIC_TEST_RELEASE": cell.slurm} if cell.slurm else {})}
        if layer is Layer.FRESH:
            # The tests run in the environment that .ci/setup made, the jobs in the one without anything for tests.
            python = str(HOME / "venv/bin/python")
            environ["SLURM_ELASTIC_TEST_ENVIRONMENT"] = str(directory)
        if layer in (Layer.FRESH_UNIT, Layer.FRESH_LOCAL):
            # torch's own warning without numpy.
            environ["PYTHONWARNINGS"] = "ignore:Failed to initialize NumPy"
        pytest = [python, "-m", "pytest", layer.tests, "-q", f"--junitxml={report}"]
        alone = OWN_NETWORK if layer in (Layer.LOCAL, Layer.FRESH_LOCAL) else ()
        done = subprocess.run([*alone, *inside, *pytest, *options], cwd=CHECKOUT, env=environ, check=False)
        if not report.exists():
            return result(cell, layer, Outcome.FAILED, reason="pytest did not run")
        (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed, ran = counts["failures"] + counts["errors"], counts["tests"] - counts["skipped"]
    good = done.returncode == 0 and not failed and ran > 0
    # 1: tests have failed; anything else: not all have run.
    reason = "" if done.returncode in (0, 1) else f"pytest ended with {done.returncode} after {ran:,} tests"
    return result(cell, layer, Outcome.PASSED if good else Outcome.FAILED, reason=reason, tests=ran, failed=failed)


def result(cell: Cell, layer: Layer, outcome: Outcome, *, reason: str = "", tests: int = 0, failed: int = 0) -> Result:
    """Return a result of today and of this checkout."""
    changes = output("git", "status", "--porcelain", "--", ".", ":!docs/versions.*")
    commit = output("git", "rev-parse", "--short", "HEAD") + ("+" if changes else "")
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    torch = NEWEST_TORCH if cell.torch == ANY_TORCH else cell.torch
    slurm = "" if layer in (Layer.FRESH_UNIT, Layer.FRESH_LOCAL) else cell.slurm
    return Result(torch, cell.python, slurm, layer.value, outcome.value, reason, tests, failed, date, commit)


def output(*command: str) -> str:
    """Return what a command prints."""
    return subprocess.run(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def call(*command: str) -> None:
    """Run a command that has to succeed."""
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
