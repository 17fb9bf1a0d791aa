"""Findings as lines, or as a table on a terminal."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from slurm_elastic.cli._run_view import Terminal
from slurm_elastic.finding import Finding
from slurm_elastic.text import printable

_COLOURS = {"ok": "green", "unknown": "yellow", "limit": "yellow", "broken": "bold red"}

_WIDE = 80
"""Columns below which a table has no room for sentences side by side."""


def show_findings(findings: Sequence[Finding], terminal: Terminal) -> None:
    """Print a table on a terminal that is wide enough, else a few lines for each finding."""
    wide = shutil.get_terminal_size().columns >= _WIDE
    if wide and sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        _show_table(findings)
        return
    for finding in findings:
        terminal.write(f"{finding.level.value:<8}{finding.check}{_where(finding, ' [', ']')}: {_fit(finding.found)}")
        if finding.why:
            terminal.write(f"        why: {_fit(finding.why)}")
        if finding.fix:
            terminal.write(f"        fix: {_fit(finding.fix)}")


def _show_table(findings: Sequence[Finding]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("check", no_wrap=True)
    for name in ("found", "why it matters", "fix"):
        table.add_column(name, ratio=1, overflow="fold")
    for finding in findings:
        check = Text(f"{finding.check}{_where(finding, chr(10), '')}", style="")
        title = Text(f"{finding.level.value} ", style=_COLOURS[finding.level.value]) + check
        table.add_row(title, *(Text(_fit(text)) for text in (finding.found, finding.why, finding.fix)))
    Console(highlight=False).print(table)


def _where(finding: Finding, before: str, after: str) -> str:
    """Return the nodes, or the place in the script, that a finding is about."""
    from slurm_elastic.slurm import compress

    text = compress(finding.nodes) if finding.nodes else printable(finding.place, 200)
    return f"{before}{text}{after}" if text else ""


def _fit(text: str) -> str:
    return printable(text, 1000)
