"""The report of a run, or of several, as one HTML page that needs no network and no script. Pure."""

from __future__ import annotations

import bisect
import itertools
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from slurm_elastic.finding import Finding
from slurm_elastic.observe.goodput import Bucket, Goodput, last_step
from slurm_elastic.observe.report import Report, RoundReport
from slurm_elastic.observe.views import RunState
from slurm_elastic.slurm.hostlist import compress, natural_key
from slurm_elastic.text import local_time, printable

_WIDTH = 1000
_LEFT = 90
_ROW, _SMALL_ROW, _MANY = 18, 5, 64
"""Height of a node's row, and its height with more nodes than that."""
_SHORTEST = 0.4
"""Widths below this many units are not drawn: a run of weeks has segments of milliseconds."""
_MOST_ROUNDS = 500
_NUMBER, _SENTENCE = ' class="n"', ' class="cause"'
"""Attributes of the cells of a column."""

_NAMES = {
    Bucket.PRODUCTIVE: "steps that counted",
    Bucket.COLLECTIVES: "of these: waiting, as for other ranks",
    Bucket.WASTED: "steps taken again",
    Bucket.UNREPORTED: "workers without reports",
}
"""Names of buckets where they are not those in JSON."""

_Points = Sequence[tuple[float, float]]
_STYLE = Path(__file__).with_name("page.css")
_CARDS = ("goodput", "node time", "rounds", "nodes at most", "last step", "steps taken again", "restarts charged")
"""Facts at the top of the page of one run."""


def html_page(report: Report, findings: Sequence[Finding] = ()) -> str:
    """Return the page, with the findings of a rehearsal if there are some."""
    title = f"run {escape(report.status.run)}"
    failed, begins = report.status.state is RunState.FAILED, [round_.start for round_ in report.rounds]
    return _page(
        title,
        _head(report, title),
        _failure(report) if failed else iter(()),
        _cards(report),
        _findings(findings),
        _goodput(report),
        _timeline(report),
        _curve(report, "World size", _world_sizes(report.rounds)),
        _curve(report, "Steps per second", report.samples, begins),
        _curve(report, "Loss", report.losses, begins),
        _rounds(report.rounds),
        _slow(report.rounds),
        iter(()) if failed else _failure(report),
        _notes(report),
    )


def html_comparison(reports: Sequence[Report]) -> str:
    """Return a page with several runs side by side."""
    title = f"{len(reports)} runs"
    return _page(title, _side_by_side(reports, title), *(_timeline_of(report) for report in reports))


def _page(title: str, *parts: Iterator[str]) -> str:
    names = [bucket.value for bucket in Bucket]
    begin = [
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<link rel="icon" href="data:,"><title>{title}</title><style>\n{_STYLE.read_text()}',
        *(f".{name} {{ fill: var(--{name}); background: var(--{name}); }}\n" for name in names),
        "</style></head><body>",
    ]
    return "".join([*begin, *itertools.chain.from_iterable(parts), "</body></html>\n"])


def _table(titles: Sequence[str], kinds: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a table of cells of HTML; each column has a title and attributes of its cells."""
    yield '<div class="wide"><table><tr>'
    yield "".join(f"<th{kind}>{title}</th>" for title, kind in zip(titles, kinds, strict=True))
    for row in rows:
        yield "</tr><tr>"
        yield "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(row, kinds, strict=True))
    yield "</tr></table></div>"


def _side_by_side(reports: Sequence[Report], title: str) -> Iterator[str]:
    yield f"<h1>{title}</h1>"
    facts = [dict(_facts(report)) for report in reports]
    rows = [[name, *(column[name] for column in facts)] for name in facts[0]]
    for bucket in Bucket:
        seconds = [(report.total.seconds[bucket], report.total.node_seconds or 1.0) for report in reports]
        shares = (f'<span title="{_duration(own)}">{100 * own / whole:.1f} %</span>' for own, whole in seconds)
        rows.append([_named(bucket), *shares])
    runs = [f"run {escape(report.status.run)}" for report in reports]
    yield from _table(["", *runs], ["", *[_NUMBER] * len(runs)], rows)


def _timeline_of(report: Report) -> Iterator[str]:
    yield f"<h2>run {escape(report.status.run)}</h2>"
    yield from _bar(report.total)
    yield from _timeline(report)
    missing = "; ".join(dict.fromkeys((*report.total.missing, *report.status.problems)))
    if missing:
        yield f'<p class="dim">not known: {escape(printable(missing, 1000))}</p>'


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    status, redone, progress = report.status, report.total.redone_steps, [round_.progress for round_ in report.rounds]
    speeds = sorted(value for _, value in report.samples)
    speeds = speeds or sorted(speed for round_ in progress if (speed := round_.worker.steps_per_second) is not None)
    last = status.step if status.step is not None else last_step(progress) or None
    yield "state", status.state.value
    yield "began", _date(report.start)
    yield "lasted", _duration(report.end - report.start)
    yield "goodput", _share(report.total.share)
    yield "node time", _duration(report.total.node_seconds)
    yield "rounds", str(len(report.rounds))
    yield "nodes at most", str(max((len(round_.round.nodes) for round_ in report.rounds), default=0))
    yield "workers at most", str(max((round_.round.world_size for round_ in report.rounds), default=0))
    yield "last step", "unknown" if last is None else str(last)
    yield "steps per second, median", f"{speeds[len(speeds) // 2]:.3g}" if speeds else "unknown"
    yield "steps taken again", "unknown" if redone is None else str(redone)
    yield "goodput without planned stops", _share(report.total.share_without_planned_stops)
    yield "restarts charged", str(status.restarts)


def _findings(findings: Sequence[Finding]) -> Iterator[str]:
    rows = []
    for finding in findings:
        place = f'<br><span class="dim">{escape(printable(finding.place))}</span>' if finding.place else ""
        sentences = map(escape, (finding.found, finding.why, finding.fix))
        rows.append([f"<b>{finding.level.value}</b> {finding.check}{place}", *sentences])
    if rows:
        yield "<h2>Findings</h2>"
        yield from _table(("check", "found", "why it matters", "fix"), ("", _SENTENCE, _SENTENCE, _SENTENCE), rows)


def _head(report: Report, title: str) -> Iterator[str]:
    yield f"<h1>{title}: {report.status.state.value}</h1>"
    span = f"{_date(report.start)} to {_date(report.end)}"
    jobs = ", ".join(dict.fromkeys(agent.job for agent in report.status.agents if agent.job not in ("", "0")))
    whose = f", job {escape(printable(jobs))}" if jobs else ""
    command = f"<br>{escape(printable(shlex.join(report.status.command), 1000))}" if report.status.command else ""
    yield f'<p class="dim">{span}, {_duration(report.end - report.start)}{whose}{command}</p>'
    if report.status.state is RunState.STOPPED and report.records.events:
        yield f"<p>last: {escape(printable(report.records.events[-1].text))}</p>"


def _cards(given: Report) -> Iterator[str]:
    yield '<div class="cards">'
    for name, value in _facts(given):
        if name in _CARDS and value != "unknown":
            yield f'<div class="card"><span class="dim">{name}</span><b>{value}</b></div>'
    yield "</div>"


def _goodput(report: Report) -> Iterator[str]:
    yield "<h2>Where the node time went</h2>"
    yield from _bar(report.total)
    starts = report.starts if len(report.starts) > 1 else {}
    whole = report.total.node_seconds or 1.0
    rows = []
    for bucket, seconds in report.total.seconds.items():
        if seconds:
            by_start = (_duration(start.seconds[bucket]) for start in starts.values())
            rows.append([_named(bucket), _duration(seconds), f"{100 * seconds / whole:.1f} %", *by_start])
    sums = (_duration(start.node_seconds) for start in starts.values())
    rows.append(["<b>node time</b>", _duration(report.total.node_seconds), "100 %", *sums])
    titles = ["bucket", "total", "share", *(f"start {number}" for number in starts)]
    yield from _table(titles, ["", *[_NUMBER] * (len(titles) - 1)], rows)
    if report.total.without_planned_stops is not None:
        steps, _ = report.total.without_planned_stops
        yield "<p>Without planned stops, with a restart from the newest checkpoint at each change of the nodes, "
        yield f"{steps} steps would have been taken again ({report.total.redone_steps} were), and goodput would have "
        yield f"been {_share(report.total.share_without_planned_stops)} (it was {_share(report.total.share)}).</p>"


def _name(bucket: Bucket) -> str:
    return _NAMES.get(bucket, bucket.value.replace("_", " "))


def _named(bucket: Bucket) -> str:
    return f'<span class="dot {bucket.value}"></span>{_name(bucket)}'


def _bar(goodput: Goodput) -> Iterator[str]:
    whole = goodput.node_seconds or 1.0
    yield '<div class="bar" role="img" aria-label="node time by bucket">'
    for bucket, seconds in goodput.seconds.items():
        if seconds / whole >= 0.0005:
            title = f"{_name(bucket)}: {_duration(seconds)}"
            yield f'<span class="{bucket.value}" style="width:{100 * seconds / whole:.3f}%" title="{title}"></span>'
    yield "</div>"


def _timeline(report: Report) -> Iterator[str]:
    domains = {agent.node: agent.domain for agent in report.status.agents}
    nodes = sorted(
        {segment.node for segment in report.segments},
        key=lambda node: (natural_key(domains.get(node, "")), natural_key(node)),
    )
    row = _ROW if len(nodes) <= _MANY else _SMALL_ROW
    if nodes:
        yield from _picture(report, "Nodes", row * len(nodes), _node_rows(report, nodes, domains, row))


def _node_rows(report: Report, nodes: Sequence[str], domains: Mapping[str, str], row: int) -> Iterator[str]:
    every = 1 if row == _ROW else max(1, -(-14 // row))
    top = {node: index * row for index, node in enumerate(nodes)}
    for index, node in enumerate(nodes):
        domain = domains.get(node, "")
        if index % every == 0:
            title = f"<title>{escape(printable(domain))}</title>" if domain else ""
            yield f'<text x="0" y="{top[node] + min(row, 14) - 1}">{escape(printable(node, 14))}{title}</text>'
        if index and domain != domains.get(nodes[index - 1], ""):
            yield f'<line class="domain" x1="0" x2="{_WIDTH}" y1="{top[node]}" y2="{top[node]}"/>'
    for segment in report.segments:
        left, right = _x(segment.start, report), _x(segment.end, report)
        if right - left >= _SHORTEST:
            round_ = "" if segment.round is None else f", round {segment.round}"
            title = f"{escape(segment.node)}: {_name(segment.bucket)}{round_}, {_duration(segment.seconds)}"
            yield (
                f'<rect class="{segment.bucket.value}" x="{left:.1f}" y="{top[segment.node] + 1}" '
                f'width="{right - left:.1f}" height="{row - 2}"><title>{title}</title></rect>'
            )
    for view in report.rounds[:_MOST_ROUNDS]:
        if view.cause:
            x = _x(view.start, report)
            yield f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{row * len(nodes)}">'
            yield f"<title>round {view.round.number}: {escape(printable(view.cause))}</title></line>"


def _picture(report: Report, name: str, height: int, shapes: Iterable[str]) -> Iterator[str]:
    """Yield a picture with a title above it and the time below it."""
    yield f'<h2>{name}</h2><div class="wide"><svg viewBox="0 0 {_WIDTH} {height + 24}" role="img" aria-label="{name}">'
    yield from shapes
    yield f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH}" y1="{height}" y2="{height}"/>'
    for part, anchor in enumerate(("start", "middle", "middle", "middle", "end")):
        x, time = _LEFT + part * (_WIDTH - _LEFT) / 4, part * (report.end - report.start) / 4
        yield f'<text x="{x:.0f}" y="{height + 16}" text-anchor="{anchor}">{_duration(time)}</text>'
    yield "</svg></div>"


def _curve(report: Report, name: str, points: _Points, begins: Sequence[float] = ()) -> Iterator[str]:
    """Yield a picture of values by time: steps, or a line for each of the rounds that begin at these times."""
    if not points:
        return
    height = 120
    least, most = min(0.0, *(value for _, value in points)), max(value for _, value in points)
    shapes = [f'<text x="0" y="12">{most:.4g}</text><text x="0" y="{height}">{least:.4g}</text>']
    scale = (height - 4) / (most - least or 1.0)
    for _, of_round in itertools.groupby(points, key=lambda point: bisect.bisect(begins, point[0])):
        placed = [(_x(time, report), height - scale * (value - least)) for time, value in of_round]
        if not begins:
            corners = [(x, before) for (_, before), (x, _) in itertools.pairwise(placed)]
            placed = [placed[0], *itertools.chain.from_iterable(zip(corners, placed[1:], strict=True))]
        if len(placed) == 1:
            # A line of one point is not drawn.
            placed.append((placed[0][0] + 1, placed[0][1]))
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        shapes.append(f'<polyline class="curve" points="{line}"/>')
    yield from _picture(report, name, height, shapes)


def _world_sizes(rounds: Sequence[RoundReport]) -> list[tuple[float, float]]:
    points: list[tuple[float, float]] = []
    for round_, following in itertools.zip_longest(rounds, rounds[1:]):
        points.append((round_.start, float(round_.round.world_size)))
        if following is None or following.start > round_.end:
            points.append((round_.end, 0.0))
    return points


def _rounds(rounds: Sequence[RoundReport]) -> Iterator[str]:
    rows = []
    for round_ in rounds[-_MOST_ROUNDS:]:
        record, progress, worker = round_.round, round_.progress, round_.progress.worker
        steps = f"{worker.first_step} to {worker.step}" if worker.step is not None else str(worker.steps)
        speed = "" if worker.steps_per_second is None else f"{worker.steps_per_second:.3g}"
        least = "" if progress.complete else "at least "
        redone = "" if progress.redone is None else f"{least}{progress.redone}"
        nodes = f'<span title="{escape(printable(compress(record.nodes)))}">{len(record.nodes)}</span>'
        time = str(record.number), _date(round_.start), _duration(round_.end - round_.start)
        taken = steps if worker.reports else "unknown", speed, redone
        cause = escape(printable(round_.cause or record.reason.replace("_", " ")))
        rows.append([*time, nodes, str(record.world_size), *taken, cause])
    titles = ("round", "began", "lasted", "nodes", "workers", "steps", "per second", "taken again", "why it was formed")
    yield "<h2>Rounds</h2>"
    if len(rounds) > _MOST_ROUNDS:
        yield f'<p class="dim">the last {_MOST_ROUNDS} of {len(rounds)} rounds</p>'
    yield from _table(titles, ("", "", *[_NUMBER] * 6, _SENTENCE), rows)


def _slow(rounds: Sequence[RoundReport]) -> Iterator[str]:
    rows = []
    for number, slow in ((view.round.number, slow) for view in rounds[-_MOST_ROUNDS:] for slow in view.slow):
        until = "the end of the round" if slow.until is None else _date(slow.until)
        score = "" if slow.relative_score is None else f"{slow.relative_score:.2f}"
        place = str(number), str(slow.rank), escape(printable(slow.node))
        rows.append([*place, _date(slow.since), until, score, escape(printable(slow.text))])
    if rows:
        yield "<h2>Slow ranks</h2>"
        titles = ("round", "rank", "node", "named", "until", "score", "")
        yield from _table(titles, (*[""] * 5, _NUMBER, _SENTENCE), rows)


def _failure(report: Report) -> Iterator[str]:
    cause = report.status.root_cause
    if cause is not None:
        rank = "" if cause.rank is None else f"rank {cause.rank} on "
        name = "Root cause" if report.status.state is RunState.FAILED else "Last failure"
        text = "\n".join(printable(line) for line in cause.text.splitlines())
        yield f"<h2>{name}</h2><p>{rank}{escape(printable(cause.node))}</p><pre>{escape(text)}</pre>"


def _notes(report: Report) -> Iterator[str]:
    yield "<h2>What is not known</h2><ul>"
    for line in (*report.total.missing, *report.status.problems):
        yield f"<li>{escape(printable(line, 1000))}</li>"
    yield "</ul>"


def _x(time: float, report: Report) -> float:
    span = (report.end - report.start) or 1.0
    return _LEFT + (_WIDTH - _LEFT) * min(1.0, max(0.0, (time - report.start) / span))


def _share(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.1f} %"


def _date(seconds: float) -> str:
    return local_time(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.1f} min" if minutes < 120 else f"{hours:.1f} h"
