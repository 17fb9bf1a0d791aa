"""Options that several benchmarks have."""

from __future__ import annotations

import argparse


def add_parts(parser: argparse.ArgumentParser, *parts: str, option: str = "--only") -> None:
    """Add an option that takes the names of some parts, with commas between them; without it all are run."""

    def names(text: str) -> list[str]:
        chosen = text.split(",")
        for name in chosen:
            if name not in parts:
                raise argparse.ArgumentTypeError(f"there is no {name!r}; choose from {','.join(parts)}")
        return chosen

    parser.add_argument(option, type=names, default=list(parts), metavar="PART,...", help=f"some of {','.join(parts)}")
