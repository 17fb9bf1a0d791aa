"""Options that several benchmarks have."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def make_parser(benchmark: str, repetitions: int = 0) -> argparse.ArgumentParser:
    """A parser with `--json`, and with `--repetitions` if the benchmark repeats anything by default."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{benchmark}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    if repetitions:
        parser.add_argument(
            "--repetitions", type=int, default=repetitions, metavar="N", help="of which medians are taken"
        )
    return parser


def add_sizes(parser: argparse.ArgumentParser, option: str, *sizes: int) -> None:
    """Add an option that takes numbers of agents, with commas between them."""
    parser.add_argument(
        option, type=lambda text: [int(size) for size in text.split(",")], default=list(sizes), metavar="N,..."
    )


def add_parts(
    parser: argparse.ArgumentParser, *parts: str, option: str = "--only", default: Sequence[str] = ()
) -> None:
    """Add an option that takes the names of some parts, with commas between them; all of them without `default`."""

    def names(text: str) -> list[str]:
        chosen = text.split(",")
        for name in chosen:
            if name not in parts:
                raise argparse.ArgumentTypeError(f"there is no {name!r}; choose from {','.join(parts)}")
        return chosen

    parser.add_argument(
        option, type=names, default=list(default or parts), metavar="PART,...", help=f"some of {','.join(parts)}"
    )
