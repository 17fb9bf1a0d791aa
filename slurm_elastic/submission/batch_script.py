"""Batch scripts as data, made from a template for a submission; templates and examples that are shipped."""

from __future__ import annotations

import enum
import os
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurm_elastic._version import __version__
from slurm_elastic.errors import UsageError, did_you_mean

Options = Mapping[str, "str | None"]
"""Options of sbatch by their long names without dashes; None for one without a value."""

LONG_NAMES = {
    "a": "array",
    "A": "account",
    "b": "begin",
    "B": "extra-node-info",
    "c": "cpus-per-task",
    "C": "constraint",
    "d": "dependency",
    "D": "chdir",
    "e": "error",
    "F": "nodefile",
    "G": "gpus",
    "H": "hold",
    "i": "input",
    "J": "job-name",
    "k": "no-kill",
    "L": "licenses",
    "m": "distribution",
    "M": "clusters",
    "n": "ntasks",
    "N": "nodes",
    "o": "output",
    "O": "overcommit",
    "p": "partition",
    "q": "qos",
    "Q": "quiet",
    "s": "oversubscribe",
    "S": "core-spec",
    "t": "time",
    "v": "verbose",
    "w": "nodelist",
    "W": "wait",
    "x": "exclude",
}
"""Long names of sbatch's short options (sbatch(1), 22.05 to 26.05)."""

_RANGE = re.compile(r"([0-9]{1,6})(?:[:-]([0-9]{1,6}))?")
_DIRECTIVE = "#SBATCH"
_SITE_END = "# ---- End of the site block"


class Shape(enum.Enum):
    """The way in which a run gets its nodes. The values are the names of the templates."""

    ALLOCATION = "allocation"
    ARRAY = "array"

    @classmethod
    def _missing_(cls, value: object) -> Shape:
        raise UsageError(f"shape {value!r} is neither allocation (one job) nor array (a job per node)")


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
    def for_agents(self) -> str:
        """The option of the agents."""
        return f"--nnodes={self.least}:{self.most}"


@dataclass(frozen=True, slots=True)
class BatchScript:
    """A batch script that starts one agent on every node of its job.

    Attributes:
        options: Options of sbatch, in the order of their lines; None for an option without a value.
        arguments: Arguments of the agents, the script's ``"$@"``.
        setup: Lines before the site block.
        site: The template's lines up to the end of its site block; all of them if it marks none.
        srun_options: Options of srun that are added to those of the site block.
        body: The template's lines after its site block.
        teardown: Lines that bash runs when the script exits, unless it is killed.
    """

    options: tuple[tuple[str, str | None], ...]
    arguments: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    site: tuple[str, ...] = ()
    srun_options: tuple[str, ...] = ()
    body: tuple[str, ...] = ()
    teardown: tuple[str, ...] = ()

    @classmethod
    def from_template(cls, text: str) -> BatchScript:
        """Parse a template.

        sbatch reads options from comments before the first command (sbatch(1)). The script leaves out comments up to
        the last option, which describe the options, and keeps everything after it.

        Raises:
            UsageError: The template is no bash script, or does not pass its arguments to the agents.
        """
        lines = text.splitlines()
        if not lines or not re.fullmatch(r"#!\s*\S*\bbash\b.*", lines[0]):
            raise UsageError('the template is no bash script; it has to begin with "#!/bin/bash"')
        if '"$@"' not in text:
            raise UsageError('the template lacks "$@", the arguments of the agents; begin from slurm-elastic template')
        code = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
        head = max((i + 1 for i in range(code) if lines[i].startswith(_DIRECTIVE)), default=1)
        options: dict[str, str | None] = {}
        for line in lines[:head]:
            if line.startswith(_DIRECTIVE):
                options.update(_parse(line))
        end = next((i + 1 for i, line in enumerate(lines) if i >= head and line.startswith(_SITE_END)), head)
        return cls(tuple(options.items()), site=tuple(lines[head:end]), body=tuple(lines[end:]))

    def with_options(
        self,
        options: Options,
        nodes: NodeRange | None = None,
        shape: Shape = Shape.ALLOCATION,
        without: Collection[str] = (),
    ) -> BatchScript:
        """Return the script with other options of sbatch.

        Args:
            nodes: None for the number of the script.
            without: Options that the script does not keep.

        Raises:
            UsageError: An option would break the run.
        """
        for name in options:
            require_possible(name)
        made: dict[str, str | None] = {}
        if nodes is not None and shape is Shape.ARRAY:
            made = {"array": f"0-{nodes.most - 1}", "nodes": "1"}
        elif nodes is not None:
            made = {"nodes": str(nodes.most) if nodes.least == nodes.most else f"{nodes.least}-{nodes.most}"}
        kept = {name: value for name, value in self.options if name not in without}
        return replace(self, options=tuple({**kept, **made, **options}.items()))

    def text(self) -> str:
        """Return the text of the script.

        Raises:
            UsageError: There are options for srun, and the template does not mark the end of its site block.
        """
        lines = ["#!/bin/bash", f"# Made by slurm-elastic {__version__}."]
        for name, value in self.options:
            lines.append(f"{_DIRECTIVE} --{name}" if value is None else f"{_DIRECTIVE} --{name}={shlex.quote(value)}")
        lines += [""]
        if self.arguments:
            lines += ["# The agents' options, and the program of the workers.", f"set -- {shlex.join(self.arguments)}"]
        if self.teardown:
            lines += ["teardown() {", *(f"  {line}" for line in self.teardown), "}", "trap teardown EXIT"]
        lines += [*self.setup, *self.site]
        if self.srun_options:
            if not self.site:
                raise UsageError(
                    f"options for srun need the line {_SITE_END!r} in the template; add it after srun_options"
                )
            lines += [f"srun_options+=({shlex.join(self.srun_options)})"]
        return "\n".join([*lines, *self.body]) + "\n"


def _parse(line: str) -> Sequence[tuple[str, str | None]]:
    """Return the options of a line; a word after an option is its value."""
    try:
        words = shlex.split(line.removeprefix(_DIRECTIVE), comments=True)
    except ValueError as error:
        raise UsageError(f"the template's line {line!r} cannot be read: {error}") from None
    options: list[tuple[str, str | None]] = []
    for word in words:
        if word.startswith("--"):
            name, sign, value = word[2:].partition("=")
            options.append((name, value if sign else None))
        elif word.startswith("-") and len(word) > 1:
            options.append((LONG_NAMES.get(word[1], word[1]), word[2:] or None))
        elif options and options[-1][1] is None:
            options[-1] = (options[-1][0], word)
        else:
            raise UsageError(f"the template's line {line!r} cannot be read: {word!r} belongs to no option")
    return options


# The batch script templates and the example scripts that come with the package.
#
# Submissions, the doctor and the commands that print them read them here. A wheel has them inside the package
# (pyproject.toml, force-include), a checkout beside it.
@dataclass(frozen=True, slots=True)
class ShippedFiles:
    """Text files of one kind, by their names without suffix.

    Attributes:
        kind: The word for one of them.
        directory: Where they are, inside or beside the package.
        suffix: What their file names end with.
    """

    kind: str
    directory: str
    suffix: str

    def names(self) -> tuple[str, ...]:
        """Return the names, sorted."""
        return tuple(sorted(path.stem for path in self._directory().glob(f"*{self.suffix}")))

    def read(self, name: str) -> str:
        """Return the text of a file.

        Raises:
            UsageError: There is no such file.
        """
        names = self.names()
        if name not in names:
            fix = did_you_mean(name, names, otherwise=f"the {self.kind}s are {', '.join(names)}")
            raise UsageError(f"no {self.kind} {name!r}; {fix}")
        return (self._directory() / f"{name}{self.suffix}").read_text(encoding="utf-8")

    def summary(self, name: str) -> str:
        """Return the first comment or the first line of the docstring, which says what the file is for."""
        return next(line for line in self.read(name).splitlines() if not line.startswith("#!")).strip('# ".')

    def _directory(self) -> Path:
        package = Path(__file__).parents[1]
        installed = package / self.directory
        return installed if installed.is_dir() else package.parent / self.directory


TEMPLATES = ShippedFiles("template", "sbatch_templates", ".sbatch")
EXAMPLES = ShippedFiles("example", "docs/examples", ".py")


TEMPLATE_VARIABLE = "SLURM_ELASTIC_TEMPLATE"
"""Names the template for submissions that give none: of a site, or of a user."""

WHOLE_ARRAY = "SLURM_ELASTIC_VERDICT=array"

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
    "array-parallelism": 'each submission of a batch is a job; for elements that are one run give shape="array"',
    "wrap": "the submission makes the batch script",
    "het-group": "a run is one job, or one array",
    "parsable": "the job id is printed anyway",
}
"""Options of sbatch that a submission refuses, and why."""


def require_possible(option: str) -> None:
    """Refuse an option of sbatch that would break the run.

    Raises:
        UsageError: The option would break the run; the message says why.
    """
    if option in _IMPOSSIBLE:
        raise UsageError(f"--{option} is not possible: {_IMPOSSIBLE[option]}")


def read_template(template: str | Path | None, shape: Shape) -> str:
    """Return the text of a template; None for that in SLURM_ELASTIC_TEMPLATE, else the one of the package.

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
