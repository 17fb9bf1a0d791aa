"""The plan of a submission, and the batch script that follows from it."""

from __future__ import annotations

import enum
import os
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from slurm_elastic.errors import UsageError
from slurm_elastic.submission.batch_script import TEMPLATES, BatchScript

TEMPLATE_VARIABLE = "SLURM_ELASTIC_TEMPLATE"
"""Names the template for submissions that give none: of a site, or of a user."""

WHOLE_ARRAY = "SLURM_ELASTIC_VERDICT=array"

_RANGE = re.compile(r"([0-9]{1,6})(?:[:-]([0-9]{1,6}))?")

_TASKS = "one agent per node starts its workers; give their number by workers_per_node (--nproc-per-node)"
_IMPOSSIBLE = {
    "ntasks": _TASKS,
    "ntasks-per-node": _TASKS,
    "ntasks-per-core": _TASKS,
    "ntasks-per-gpu": _TASKS,
    "ntasks-per-socket": _TASKS,
    "gpus-per-task": "there is one task per node, the agent; use gpus_per_node (--gpus-per-node)",
    "cpus-per-gpu": "srun would bind the agent, not the workers; use cpus_per_task (--cpus-per-task), for a whole node",
    "array": 'a submission is one run; for one on the elements of an array give shape="array" (--shape array)',
    "wrap": "the submission makes the batch script",
    "het-group": "a run is one job, or one array",
    "parsable": "the job id is printed anyway",
}
"""Options of sbatch that a submission refuses, and why."""


class Shape(enum.Enum):
    """The way in which a run gets its nodes. The values are the names of the templates."""

    ALLOCATION = "allocation"
    ARRAY = "array"

    @classmethod
    def parse(cls, text: object) -> Shape:
        """Return the shape with a name.

        Raises:
            UsageError: There is no such shape.
        """
        try:
            return cls(text)
        except ValueError:
            raise UsageError(f"shape {text!r} is neither allocation (one job) nor array (a job per node)") from None


@dataclass(frozen=True, slots=True)
class NodeRange:
    """The number of nodes that the job asks for and that a round needs.

    Attributes:
        least: A round needs, and the job asks for, at least this many nodes.
        most: The job asks for at most this many nodes.
    """

    least: int
    most: int

    def __post_init__(self) -> None:
        for number in (self.least, self.most):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise UsageError(f"{number!r} is no number of nodes; give one from 1 on")
        if self.least > self.most:
            raise UsageError(f"at least {self.least} nodes and at most {self.most}: lower the least or raise the most")

    @classmethod
    def parse(cls, text: str) -> NodeRange:
        """Parse ``4``, ``2:4`` or, as sbatch writes it, ``2-4``.

        Raises:
            UsageError: The text is none of them.
        """
        match = _RANGE.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"--nodes {text!r} is neither a number nor MIN:MAX; write it as in 4 or 2:4")
        return cls(int(match[1]), int(match[2] or match[1]))

    @property
    def for_sbatch(self) -> str:
        """The value of sbatch's ``--nodes``."""
        return str(self.most) if self.least == self.most else f"{self.least}-{self.most}"

    @property
    def for_agents(self) -> str:
        """The option of the agents."""
        return f"--nnodes={self.least}:{self.most}"


@dataclass(frozen=True, slots=True)
class Plan:
    """A submission.

    Attributes:
        shape: The way in which the run gets its nodes.
        nodes: The number of nodes; None for that of the template.
        options: Options of sbatch, which replace the template's.
        without: Options of the template that the script leaves out.
        agent: Options of the agents.
        program: What the workers run, with its arguments.
        setup: Lines before the site block.
        srun_options: Options of srun that are added to those of the site block.
        teardown: Lines that bash runs when the script exits.
    """

    shape: Shape
    nodes: NodeRange | None = None
    options: Mapping[str, str | None] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    agent: tuple[str, ...] = ()
    program: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    srun_options: tuple[str, ...] = ()
    teardown: tuple[str, ...] = ()

    def script(self, template: str) -> BatchScript:
        """Return the batch script that a template becomes.

        Raises:
            UsageError: An option would break the run, or the template cannot be used.
        """
        for name in self.options:
            require_possible(name)
        made: dict[str, str | None] = {}
        if self.nodes is not None and self.shape is Shape.ARRAY:
            made = {"array": f"0-{self.nodes.most - 1}", "nodes": "1"}
        elif self.nodes is not None:
            made = {"nodes": self.nodes.for_sbatch}
        script = BatchScript.from_template(template).with_options({**made, **self.options}, without=self.without)
        of_nodes = () if self.nodes is None else (self.nodes.for_agents,)
        return replace(
            script,
            arguments=(*of_nodes, *self.agent, *self.program),
            setup=self.setup,
            srun_options=self.srun_options,
            teardown=self.teardown,
        )


def require_possible(option: str) -> None:
    """Refuse an option of sbatch that would break the run.

    Raises:
        UsageError: The option would break the run; the message says why.
    """
    if option in _IMPOSSIBLE:
        raise UsageError(f"--{option} is not possible: {_IMPOSSIBLE[option]}")


def read_template(template: str | Path | None, shape: Shape) -> str:
    """Return the text of a template.

    Args:
        template: Path of the template; None for that in SLURM_ELASTIC_TEMPLATE, else the template of the package.
        shape: Names the template of the package.

    Raises:
        UsageError: The template cannot be read.
    """
    path = template or os.environ.get(TEMPLATE_VARIABLE)
    if not path:
        return TEMPLATES.read(shape.value)
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"template {path}: {why}; slurm-elastic template prints one to adapt") from None
    if shape is Shape.ARRAY:
        # A site may have one template for both shapes, or one of an earlier release.
        text = re.sub(r"\bSLURM_ELASTIC_VERDICT=1\b", WHOLE_ARRAY, text)
        if WHOLE_ARRAY not in text:
            raise UsageError(
                f'template {path} lacks the line "export {WHOLE_ARRAY}", so that each element of the array would be a '
                "run of its own; compare it with slurm-elastic template array"
            )
    return text


def environment_lines() -> tuple[str, ...]:
    """Return lines that put this interpreter's ``slurm-elastic`` first in PATH.

    sbatch passes its environment to the job. But a notebook's kernel often runs without the PATH of its environment,
    and a site may configure sbatch to pass nothing.

    Raises:
        UsageError: This interpreter has no ``slurm-elastic``.
    """
    for directory in (Path(sys.executable).parent, Path(sysconfig.get_path("scripts", "posix_user"))):
        if (directory / "slurm-elastic").is_file():
            return (f'export PATH={shlex.quote(str(directory))}:"$PATH"',)
    if shutil.which("slurm-elastic"):
        return ()
    raise UsageError(f"no slurm-elastic beside {sys.executable} or in PATH; pip install slurm_elastic for this Python")
