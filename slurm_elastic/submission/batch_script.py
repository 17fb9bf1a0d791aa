"""Batch scripts as data: the templates that are shipped, parsed, with options and lines of a submission inserted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
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

_DIRECTIVE = "#SBATCH"
_SITE_END = "# ---- End of the site block"


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

        Args:
            text: The template.

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

    def with_options(self, options: Options, *, without: Iterable[str] = ()) -> BatchScript:
        """Return the script with these options, which replace the template's, and without some of the template's."""
        left_out = set(without)
        merged = {name: value for name, value in self.options if name not in left_out}
        merged.update(options)
        return replace(self, options=tuple(merged.items()))

    def text(self) -> str:
        """Return the text of the script.

        Raises:
            UsageError: There are options for srun, and the template does not mark the end of its site block.
        """
        lines = ["#!/bin/bash", f"# Made by slurm-elastic {__version__}."]
        lines += [_directive(name, value) for name, value in self.options]
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


def _directive(name: str, value: str | None) -> str:
    return f"{_DIRECTIVE} --{name}" if value is None else f"{_DIRECTIVE} --{name}={shlex.quote(value)}"


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
