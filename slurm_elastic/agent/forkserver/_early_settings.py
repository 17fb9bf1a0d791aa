"""Finds the variables that a script sets before it imports torch: too late for a worker that is forked after that.

The agent asks before each round (`ForkServer.obstacle`), and such a worker starts cold. This is a search in the text of
the script's own file: a module that the script imports may set variables unseen.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence

from slurm_elastic.agent.forkserver._fork_eligibility import is_read_by_libraries

_NAMED = re.compile(
    r"""environ\s*\[\s*["'](?P<set>\w+)["']\s*\]\s*=(?!=)\s*(?:["'](?P<value>[^"']*)["']\s*(?:\#.*)?$)?"""
    r"""|environ\.setdefault\(\s*["'](?P<default>\w+)["']"""
    r"""|putenv\(\s*["'](?P<put>\w+)["']"""
)
_UNNAMED = re.compile(
    r"""environ\s*\[\s*[^"'\s\]][^\]]*\]*\s*\]\s*=(?!=)|environ\.setdefault\(\s*[^"'\s]"""
    r"""|environ\.update\(|environ\s*\|=|putenv\(\s*[^"'\s]"""
)
_WORD = re.compile(r"\b[A-Z][A-Z0-9_]+\b")


def early_setting(text: str, arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str] | None:
    """Return line and name of the first variable that the script sets and libraries read at their import; None if none.

    Args:
        text: The script's source.
        arguments: The script's own arguments: a script may set variables that they name.
        environment: That of the worker; to set a variable to the value that it has is no change.
    """
    return next(
        (
            (line, name)
            for line, name, value in _settings(text.splitlines(), arguments, environment)
            if is_read_by_libraries(name) and (value is None or environment.get(name) != value)
        ),
        None,
    )


def _settings(
    lines: Sequence[str], arguments: Sequence[str], environment: Mapping[str, str]
) -> Iterator[tuple[int, str, str | None]]:
    """Yield line, name and value, if the line has it, of each variable that may be set."""
    for number, line in enumerate(lines, 1):
        code = line.lstrip()
        if code.startswith("#") or ("environ" not in code and "putenv" not in code):
            continue
        for match in _NAMED.finditer(code):
            if match["default"] is None:
                yield number, match["set"] or match["put"], match["value"]
            elif match["default"] not in environment:
                yield number, match["default"], None
        if _UNNAMED.search(code):
            for words in (lines, arguments):
                yield from ((number, name, None) for word in words for name in _WORD.findall(word))


def script_file(options: Sequence[str]) -> str | None:
    """Return the path of the script that a worker's command runs; None for a function or a module that is not here.

    Args:
        options: The words of the command between the interpreter and the script's own arguments.
    """
    if not options or "-c" in options:
        return None
    if "-m" not in options:
        candidates = [options[-1], os.path.join(options[-1], "__main__.py")]  # noqa: PTH118
    else:
        stem = options[-1].replace(".", os.sep)
        candidates = [f"{stem}.py", os.path.join(stem, "__main__.py")]  # noqa: PTH118
    return next((path for path in candidates if os.path.isfile(path)), None)  # noqa: PTH113
