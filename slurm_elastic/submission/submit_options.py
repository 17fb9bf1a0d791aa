"""The command line of ``slurm-elastic submit``: separates options of sbatch, of the agents and of the command.

All of them stand before the script in any order. An option that the agents know is theirs if it is not abbreviated;
every other option, and every single letter except -m, is an option of sbatch.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from slurm_elastic.errors import UsageError
from slurm_elastic.submission.batch_script import LONG_NAMES

_SBATCH_SWITCHES = frozenset(
    {
        "consolidate-segments",
        "contiguous",
        "exclusive",
        "get-user-env",
        "hold",
        "ignore-pbs",
        "nice",
        "no-kill",
        "no-requeue",
        "oom-kill-step",
        "overcommit",
        "oversubscribe",
        "propagate",
        "quiet",
        "reboot",
        "requeue",
        "resv-ports",
        "spread-job",
        "spread-segments",
        "stepmgr",
        "test-only",
        "use-min-nodes",
        "verbose",
        "wait",
    }
)
"""Options of sbatch whose value is missing or optional (sbatch(1), 22.05 to 26.05)."""

SBATCH_OPTIONS = tuple(sorted({*LONG_NAMES.values(), *_SBATCH_SWITCHES}))
"""Long options of sbatch without dashes, for a shell to complete; sbatch has more."""

OWN = frozenset({"shape", "template", "nodes", "dry-run", "follow"})
"""Options of the command without dashes, beside its help."""

_OWN_SWITCHES = frozenset({"dry-run", "follow", "help"})
_OWN = OWN | _OWN_SWITCHES
_NEARLY = 0.85
"""Ratio of `difflib.SequenceMatcher`: no option of sbatch is as near to one of ours (22.05 to 26.05)."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A command line, separated.

    Attributes:
        own: Options of the command, ``nodes`` among them; None for an option without a value.
        sbatch: Options of sbatch by their long names; None for an option without a value.
        agent: Options of the agents, as given.
        script: The script, or with -m the module; None if there is none.
        arguments: Arguments of the script.
    """

    own: dict[str, str | None]
    sbatch: dict[str, str | None]
    agent: tuple[str, ...]
    script: str | None
    arguments: tuple[str, ...]


def read_command_line(
    arguments: Sequence[str], agent_options: Collection[str], agent_switches: Collection[str]
) -> CommandLine:
    """Separate the options.

    Args:
        arguments: The words that follow ``submit`` on the command line.
        agent_options: Long options of the agents, with dashes in front and inside.
        agent_switches: Those of them that take no value, and ``-m``.

    Raises:
        UsageError: An option lacks its value, or looks like a misspelt option of the agents or of the command.
    """
    own: dict[str, str | None] = {}
    sbatch: dict[str, str | None] = {}
    agent: list[str] = []
    rest = iter(arguments)
    script = None
    for word in rest:
        if not word.startswith("-") or word == "-":
            script = word
            break
        if word == "--":
            script = next(rest, None)
            break
        option, sign, _value = word.partition("=")
        dashed = "--" + option[2:].replace("_", "-") if option.startswith("--") else option
        if dashed in agent_switches:
            agent.append(word)
        elif dashed in agent_options:
            agent += [word] if sign else [word, _next(rest, word)]
        else:
            _require_unlike(option, agent_options)
            _of_sbatch(word, rest, own, sbatch)
    return CommandLine(own, sbatch, tuple(agent), script, tuple(rest))


def _of_sbatch(word: str, rest: Iterator[str], own: dict[str, str | None], sbatch: dict[str, str | None]) -> None:
    if word.startswith("--"):
        name, sign, text = word[2:].partition("=")
        value: str | None = text if sign else None
    else:
        name, value = LONG_NAMES.get(word[1], "help" if word == "-h" else word[1]), word[2:].removeprefix("=") or None
    switches = _SBATCH_SWITCHES | _OWN_SWITCHES
    if value is None and name not in switches:
        value = _next(rest, word)
    (own if name in _OWN else sbatch)[name] = value


def _require_unlike(option: str, agent_options: Collection[str]) -> None:
    """Refuse an option that looks like a misspelt option of ours: sbatch would refuse it without a suggestion.

    sbatch itself checks its options: some, such as those of its plugins, are unknown here.
    """
    ours = {*agent_options, *(f"--{name}" for name in _OWN)}
    others = {f"--{name}" for name in SBATCH_OPTIONS}
    if option in ours | others:
        return
    near = difflib.get_close_matches(option, ours | others, n=1, cutoff=_NEARLY)
    if near and near[0] in ours:
        raise UsageError(f"no option {option}; did you mean {near[0]}?")


def _next(rest: Iterator[str], option: str) -> str:
    value = next(rest, None)
    if value is None:
        raise UsageError(f"{option} lacks its value")
    return value
