"""The releases of Python and torch on the nodes of a run: different ones are named in one line."""

from __future__ import annotations

import sys


def own_releases() -> str:
    """Return the releases that this process has loaded, such as ``Python 3.11, torch 2.15.0+cu130``."""
    torch = sys.modules.get("torch")
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    return python if torch is None else f"{python}, torch {torch.__version__}"


class Releases:
    """The releases that the agents of a leader have named when they joined."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}

    def note(self, node: str, releases: str) -> str:
        """Note the releases of an agent.

        Args:
            node: Slurm's name of the agent's node.
            releases: As in `own_releases`; empty for an agent of a version that does not name them.

        Returns:
            One line for the log if the releases are new and differ from those of another agent; else empty.
        """
        if not releases or releases in self._first:
            return ""
        others = [f"{other} has {said}" for said, other in self._first.items()]
        self._first[releases] = node
        if not others:
            return ""
        return f"{node} has {releases}, but {', '.join(others)}; install the same releases on all nodes of a run"
