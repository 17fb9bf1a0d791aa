"""The batch script templates and the example scripts that come with the package.

Submissions, the doctor and the commands that print them read them here. A wheel has them inside the package
(pyproject.toml, force-include), a checkout beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slurm_elastic.errors import UsageError, did_you_mean


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
