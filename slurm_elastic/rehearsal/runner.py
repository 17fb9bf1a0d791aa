"""A rehearsal: one run without mishaps, one with them, and what was seen of both."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from slurm_elastic.errors import UsageError
from slurm_elastic.finding import Finding, Level
from slurm_elastic.observe.report import Report
from slurm_elastic.rehearsal._run import RehearsedRun
from slurm_elastic.rehearsal.checks import findings, require_comparable
from slurm_elastic.rehearsal.facts import RunFacts, changes_of, losses
from slurm_elastic.rehearsal.files import NewNames
from slurm_elastic.rehearsal.scenario import Kind, Mishap, Plan, plan, spread


@dataclass(frozen=True)
class Options:
    """The wishes of the user.

    Attributes:
        command: The script with its arguments; an argument may contain ``{run}``, which stands for the directory of
            the run.
        nodes: Number of nodes at the start.
        mishaps: The mishaps; None for `kinds`.
        kinds: Kinds of mishaps, to be spread over the training.
        tolerance: By which part of themselves losses may differ.
        agent_options: Options of the agent.
        links: Files and directories that the script finds in its current directory.
        keep: A directory that gets everything; None to remove it all.
        timeout: Seconds without a step after which a run is ended.
        say: Takes a line about what happens.
    """

    command: tuple[str, ...]
    nodes: int = 3
    mishaps: tuple[Mishap, ...] | None = None
    kinds: tuple[Kind, ...] = (Kind.PREEMPT, Kind.JOIN, Kind.KILL)
    tolerance: float = 0.02
    agent_options: tuple[str, ...] = ()
    links: tuple[Path, ...] = ()
    keep: Path | None = None
    timeout: float = 300.0
    say: Callable[[str], None] = field(default=lambda line: None)


@dataclass(frozen=True)
class Rehearsal:
    """A rehearsal that is over.

    Attributes:
        plan: The mishaps.
        undisturbed: What was seen of the run without mishaps.
        disturbed: What was seen of the run with them.
        findings: What follows from it.
        steps_lost: Steps that were taken again, of all mishaps.
        losses: The losses of the disturbed run that counted, by step.
        report: The report of the disturbed run.
    """

    plan: Plan
    undisturbed: RunFacts
    disturbed: RunFacts
    findings: tuple[Finding, ...]
    steps_lost: int
    losses: dict[int, float]
    report: Report

    @property
    def ok(self) -> bool:
        """True if nothing has to be fixed."""
        return not any(finding.level in (Level.LIMIT, Level.BROKEN) for finding in self.findings)


def rehearse(options: Options) -> Rehearsal:
    """Run the script without and with mishaps, and judge what was seen.

    All processes are ended and, without `Options.keep`, all files removed, however this ends.

    Raises:
        UsageError: The script cannot be rehearsed, or the scenario cannot be.
    """
    script = Path(options.command[0])
    if not script.is_file():
        raise UsageError(f"{script} is no file; name a Python script")
    if options.nodes < 1 or options.nodes > 64:
        raise UsageError(f"--nodes {options.nodes}: a rehearsal has 1 to 64 nodes on this machine")
    if options.mishaps is not None:
        plan(options.mishaps, options.nodes)
    else:
        plan(spread(options.kinds, options.nodes, len(options.kinds) + 1), options.nodes)
    with _directory(options.keep) as directory, contextlib.closing(NewNames(directory)) as names:
        nothing = Plan(options.nodes, options.nodes)
        undisturbed = RehearsedRun(options, directory, "undisturbed", nothing, names).facts()
        steps = require_comparable(undisturbed, options.mishaps)
        mishaps = spread(options.kinds, options.nodes, steps) if options.mishaps is None else options.mishaps
        planned = plan(mishaps, options.nodes)
        run = RehearsedRun(options, directory, "disturbed", planned, names, undisturbed)
        disturbed = run.facts()
        results = findings(planned, undisturbed, disturbed, options.tolerance)
        lost = sum(change.lost for change in changes_of(disturbed))
        return Rehearsal(planned, undisturbed, disturbed, tuple(results), lost, losses(disturbed), run.report())


@contextlib.contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        try:
            keep.mkdir(parents=True)
        except OSError as error:
            raise UsageError(f"--keep {keep}: {error.strerror}; name a directory that does not exist") from None
        yield keep.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="slurm-elastic-rehearsal-", ignore_cleanup_errors=True) as made:
        yield Path(made)
