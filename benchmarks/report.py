"""Puts results into docs/benchmarks.md.

    python -m benchmarks.report FILE.json ...

Replaces what stands there between `<!-- NAME -->` and `<!-- end of NAME -->` for the benchmark of each file. Files of
the same benchmark, parts of it run apart, follow one another.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.tables import Cell, Results, Table

_DOCUMENT = Path(__file__).parents[1] / "docs" / "benchmarks.md"


def main() -> int:
    """Replace the sections of these results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description="Put results into the docs.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    text = _DOCUMENT.read_text()
    sections: dict[str, list[str]] = {}
    for path in parser.parse_args().files:
        results = Results.load(path)
        sections.setdefault(results.benchmark, []).append(_section(results))
    for benchmark, parts in sections.items():
        begin, end = f"<!-- {benchmark} -->\n", f"<!-- end of {benchmark} -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            print(f"{_DOCUMENT} has no place {begin.strip()} ... {end}", file=sys.stderr)
            return 2
        text = "".join([before, begin, "\n".join(parts), end, after])
    _DOCUMENT.write_text(text)
    return 0


def _section(results: Results) -> str:
    parts = ["```", results.command, "```", "", f"Measured on {results.machine}.", ""]
    for table in results.tables:
        parts += [_markdown(table), ""]
    if results.bars:
        rows: list[list[Cell]] = [[bar.promise, bar.measured, "yes" if bar.reached else "no"] for bar in results.bars]
        parts += [_markdown(Table("Promises", ["promise", "measured", "kept"], rows)), ""]
    return "\n".join(parts)


def _markdown(table: Table) -> str:
    rules = ["---", *["---:"] * (len(table.columns) - 1)]
    rows = [table.columns, rules, *([("" if cell is None else str(cell)) for cell in row] for row in table.rows)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([f"**{table.title}**", "", *lines, *(["", table.note] if table.note else [])])


if __name__ == "__main__":
    sys.exit(main())
