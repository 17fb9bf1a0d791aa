"""The fixture ``elastic_run`` of pytest: a rehearsal in a test. Entry point ``pytest11``.

pytest imports this module in every session where the package is installed, so it imports nothing else of it before a
test uses the fixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from slurm_elastic.rehearsal.runner import Rehearsal
    from slurm_elastic.rehearsal.scenario import Mishap


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--elastic-nodes``."""
    group = parser.getgroup("slurm_elastic", "rehearsals of slurm_elastic")
    group.addoption("--elastic-nodes", type=int, default=3, metavar="N", help="nodes of elastic_run (default: 3)")


class ElasticRun:
    """Rehearses scripts, which are looked for in a directory; `nodes` counts where a call gives none."""

    def __init__(self, nodes: int, directory: Path) -> None:
        self._nodes, self._directory = nodes, directory

    def __call__(
        self,
        script: str | Path,
        *arguments: str,
        mishaps: Sequence[Mishap] | None = None,
        nodes: int | None = None,
        nproc_per_node: int | None = None,
        tolerance: float = 0.02,
        timeout: float = 300.0,
        links: Sequence[str | Path] = (),
    ) -> Rehearsal:
        """Run a script without and with mishaps on this machine, and return what was found.

        Args:
            script: The script; a relative path is taken from the directory of the test, then from pytest's root.
            mishaps: The mishaps; without any, a preemption, a join and a kill are spread over the training.
            nodes: Nodes at the start; without it those of ``--elastic-nodes``.
            tolerance: By which part of themselves losses may differ.
            timeout: Seconds without a step after which a run is ended.
            links: Files and directories that the script finds in its current directory.
        """
        from slurm_elastic.errors import UsageError
        from slurm_elastic.rehearsal.runner import Options, rehearse

        options = Options(
            command=(str(self._found(Path(script))), *arguments),
            nodes=self._nodes if nodes is None else nodes,
            mishaps=None if mishaps is None else tuple(mishaps),
            tolerance=tolerance,
            agent_options=() if nproc_per_node is None else (f"--nproc-per-node={nproc_per_node}",),
            links=tuple(self._found(Path(link)) for link in links),
            timeout=timeout,
            # pytest shows it with a test that fails.
            say=print,
        )
        try:
            return rehearse(options)
        except UsageError as error:
            pytest.fail(str(error), pytrace=False)

    def _found(self, path: Path) -> Path:
        beside = self._directory / path
        return beside if beside.exists() else path


@pytest.fixture
def elastic_run(request: pytest.FixtureRequest) -> ElasticRun:
    """Run a script through mishaps: ``elastic_run("train.py", mishaps=[kill(node=1, step=20)])``."""
    return ElasticRun(request.config.getoption("--elastic-nodes"), request.path.parent)
