"""The batch script templates of the package."""

from __future__ import annotations

from pathlib import Path

from slurm_elastic.errors import UsageError, did_you_mean

_SUFFIX = ".sbatch"


def names() -> tuple[str, ...]:
    """Return the names of the templates."""
    return tuple(sorted(path.stem for path in _directory().glob(f"*{_SUFFIX}")))


def read(name: str) -> str:
    """Return the text of a template.

    Raises:
        UsageError: There is no such template.
    """
    choices = names()
    if name not in choices:
        mend = did_you_mean(name, choices, otherwise=f"the templates are {', '.join(choices)}")
        raise UsageError(f"no template {name!r}; {mend}")
    return (_directory() / f"{name}{_SUFFIX}").read_text(encoding="utf-8")


def summary(name: str) -> str:
    """Return the first comment of a template, which says what it is for."""
    return read(name).splitlines()[1].removeprefix("# ").rstrip(".")


def _directory() -> Path:
    package = Path(__file__).parents[1]
    # A wheel has the templates inside the package (pyproject.toml, force-include), a checkout beside it.
    installed = package / "sbatch_templates"
    return installed if installed.is_dir() else package.parent / "sbatch_templates"
