"""The report of a run, or of several, as one HTML page that needs no network and no script. Pure."""

from __future__ import annotations

import bisect
import itertools
import shlex
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from slurm_elastic.clock_times import local_time
from slurm_elastic.finding import Finding
from slurm_elastic.observe.goodput import Bucket, Goodput
from slurm_elastic.observe.report import Report, RoundReport
from slurm_elastic.observe.status import RunState
from slurm_elastic.slurm.hostlist import compress, natural_key
from slurm_elastic.text import printable

_WIDTH = 1000
_LEFT = 90
_ROW, _SMALL_ROW, _MANY = 18, 5, 64
"""Height of a node's row, and its height with more nodes than that."""
_SHORTEST = 0.4
"""Widths below this many units are not drawn: a run of weeks has segments of milliseconds."""
_MOST_ROUNDS = 500

_NAMES = {
    Bucket.PRODUCTIVE: "steps that counted",
    Bucket.COLLECTIVES: "of these: waiting in collectives",
    Bucket.DATA_LOADING: "data loading",
    Bucket.CHECKPOINT_SAVE: "checkpoint save",
    Bucket.CHECKPOINT_RESTORE: "checkpoint restore",
    Bucket.WASTED: "steps taken again",
    Bucket.INITIALIZATION: "initialization",
    Bucket.RECOVERY: "infrastructure recovery",
    Bucket.SPARE: "spare",
    Bucket.UNREPORTED: "workers without reports",
    Bucket.SHUTDOWN: "shutdown",
    Bucket.QUEUE: "queue",
}

_Points = Sequence[tuple[float, float]]
_STYLE = Path(__file__).with_name("page.css")
_CARDS = ("goodput", "node time", "rounds", "nodes at most", "last step", "steps taken again", "restarts charged")
"""Facts at the top of the page of one run."""


def html_page(given: Report, findings: Sequence[Finding] = ()) -> str:
    """Return the page, with the findings of a rehearsal if there are some."""
    title = f"run {escape(given.status.run)}"
    failed, begins = given.status.state is RunState.FAILED, [each.start for each in given.rounds]
    return _page(
        title,
        _head(given, title),
        _failure(given) if failed else iter(()),
        _cards(given),
        _findings(findings),
        _goodput(given),
        _timeline(given),
        _curve(given, "World size", _world_sizes(given.rounds)),
        _curve(given, "Steps per second", given.samples, begins),
        _curve(given, "Loss", given.losses, begins),
        _rounds(given.rounds),
        _slow(given.rounds),
        iter(()) if failed else _failure(given),
        _notes(given),
    )


def html_comparison(given: Sequence[Report]) -> str:
    """Return a page with several runs side by side."""
    title = f"{len(given)} runs"
    return _page(title, _side_by_side(given, title), *(_timeline_of(each) for each in given))


def _page(title: str, *parts: Iterator[str]) -> str:
    begin = [
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<link rel="icon" href="data:,"><title>{title}</title><style>\n{_STYLE.read_text()}',
        *(
            f".{bucket.value} {{ fill: var(--{bucket.value}); background: var(--{bucket.value}); }}\n"
            for bucket in Bucket
        ),
        "</style></head><body>",
    ]
    return "".join([*begin, *itertools.chain.from_iterable(parts), "</body></html>\n"])


def _side_by_side(given: Sequence[Report], title: str) -> Iterator[str]:
    yield f'<h1>{title}</h1><div class="wide"><table><tr><th></th>'
    for each in given:
        yield f'<th class="n">run {escape(each.status.run)}</th>'
    yield "</tr>"
    columns = [dict(_facts(each)) for each in given]
    for name in columns[0]:
        yield f"<tr><td>{name}</td>"
        for column in columns:
            yield f'<td class="n">{column[name]}</td>'
        yield "</tr>"
    for bucket in given[0].total.seconds:
        yield f'<tr><td><span class="dot {bucket.value}"></span>{_NAMES[bucket]}</td>'
        for each in given:
            share = 100 * each.total.seconds[bucket] / (each.total.node_seconds or 1.0)
            yield f'<td class="n" title="{_duration(each.total.seconds[bucket])}">{share:.1f} %</td>'
        yield "</tr>"
    yield "</table></div>"


def _timeline_of(given: Report) -> Iterator[str]:
    yield f"<h2>run {escape(given.status.run)}</h2>"
    yield from _bar(given.total)
    yield from _timeline(given)
    missing = "; ".join(dict.fromkeys((*given.total.missing, *given.status.problems)))
    if missing:
        yield f'<p class="dim">not known: {escape(printable(missing, 1000))}</p>'


def _facts(given: Report) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each fact that is compared."""
    status, redone, progress = given.status, given.total.redone_steps, [each.progress for each in given.rounds]
    speeds = sorted(value for _, value in given.samples)
    speeds = speeds or sorted(each.steps_per_second for each in progress if each.steps_per_second is not None)
    reached = max((each.last_step for each in progress if each.last_step is not None), default=None)
    last = status.step if status.step is not None else reached or sum(each.calls for each in progress) or None
    yield "state", status.state.value
    yield "began", _date(given.start)
    yield "lasted", _duration(given.end - given.start)
    yield "goodput", _share(given.total.share)
    yield "node time", _duration(given.total.node_seconds)
    yield "rounds", str(len(given.rounds))
    yield "nodes at most", str(max((len(each.nodes) for each in given.rounds), default=0))
    yield "workers at most", str(max((each.world_size for each in given.rounds), default=0))
    yield "last step", "unknown" if last is None else str(last)
    yield "steps per second, median", f"{speeds[len(speeds) // 2]:.3g}" if speeds else "unknown"
    yield "steps taken again", "unknown" if redone is None else str(redone)
    yield "goodput without planned stops", _share(given.total.share_without_planned_stops)
    yield "restarts charged", str(status.restarts)


def _findings(findings: Sequence[Finding]) -> Iterator[str]:
    if findings:
        yield '<h2>Findings</h2><div class="wide"><table><tr><th>check</th><th>found</th><th>why it matters</th>'
        yield "<th>mend</th></tr>"
        for each in findings:
            place = f"<br>{escape(printable(each.place))}" if each.place else ""
            yield f'<tr><td><b>{each.level.value}</b> {each.check}<span class="dim">{place}</span></td>'
            yield "".join(f'<td class="cause">{escape(text)}</td>' for text in (each.found, each.why, each.mend))
            yield "</tr>"
        yield "</table></div>"


def _head(given: Report, title: str) -> Iterator[str]:
    yield f"<h1>{title}: {given.status.state.value}</h1>"
    span = f"{_date(given.start)} to {_date(given.end)}"
    jobs = ", ".join(dict.fromkeys(agent.job for agent in given.status.agents if agent.job not in ("", "0")))
    whose = f", job {escape(printable(jobs))}" if jobs else ""
    command = f"<br>{escape(printable(shlex.join(given.status.command), 1000))}" if given.status.command else ""
    yield f'<p class="dim">{span}, {_duration(given.end - given.start)}{whose}{command}</p>'
    if given.status.state is RunState.STOPPED and given.events:
        yield f"<p>last: {escape(printable(given.events[-1].text))}</p>"


def _cards(given: Report) -> Iterator[str]:
    yield '<div class="cards">'
    for name, value in _facts(given):
        if name in _CARDS and value != "unknown":
            yield f'<div class="card"><span class="dim">{name}</span><b>{value}</b></div>'
    yield "</div>"


def _goodput(given: Report) -> Iterator[str]:
    yield "<h2>Where the node time went</h2>"
    yield from _bar(given.total)
    yield '<div class="wide"><table><tr><th>bucket</th><th class="n">total</th><th class="n">share</th>'
    starts = given.starts if len(given.starts) > 1 else {}
    for number in starts:
        yield f'<th class="n">start {number}</th>'
    yield "</tr>"
    whole = given.total.node_seconds or 1.0
    for bucket, seconds in ((bucket, seconds) for bucket, seconds in given.total.seconds.items() if seconds):
        yield f'<tr><td><span class="dot {bucket.value}"></span>{_NAMES[bucket]}</td>'
        yield f'<td class="n">{_duration(seconds)}</td><td class="n">{100 * seconds / whole:.1f} %</td>'
        for each in starts.values():
            yield f'<td class="n">{_duration(each.seconds[bucket])}</td>'
        yield "</tr>"
    yield f'<tr><th>node time</th><th class="n">{_duration(given.total.node_seconds)}</th><th class="n">100 %</th>'
    for each in starts.values():
        yield f'<th class="n">{_duration(each.node_seconds)}</th>'
    yield "</tr></table></div>"
    if given.total.without_planned_stops is not None:
        steps, _ = given.total.without_planned_stops
        yield "<p>Without planned stops, with a restart from the newest checkpoint at each change of the nodes, "
        yield f"{steps} steps would have been taken again ({given.total.redone_steps} were), and goodput would have "
        yield f"been {_share(given.total.share_without_planned_stops)} (it was {_share(given.total.share)}).</p>"


def _bar(given: Goodput) -> Iterator[str]:
    whole = given.node_seconds or 1.0
    yield '<div class="bar" role="img" aria-label="node time by bucket">'
    for bucket, seconds in given.seconds.items():
        if seconds / whole >= 0.0005:
            title = f"{_NAMES[bucket]}: {_duration(seconds)}"
            yield f'<span class="{bucket.value}" style="width:{100 * seconds / whole:.3f}%" title="{title}"></span>'
    yield "</div>"


def _timeline(given: Report) -> Iterator[str]:
    domains = {agent.node: agent.domain for agent in given.status.agents}
    nodes = sorted(
        {segment.node for segment in given.segments},
        key=lambda node: (natural_key(domains.get(node, "")), natural_key(node)),
    )
    if not nodes:
        return
    row = _ROW if len(nodes) <= _MANY else _SMALL_ROW
    height = row * len(nodes) + 24
    yield f'<h2>Nodes</h2><div class="wide"><svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="nodes by time">'
    every = 1 if row == _ROW else max(1, -(-14 // row))
    top = {node: index * row for index, node in enumerate(nodes)}
    for index, node in enumerate(nodes):
        domain = domains.get(node, "")
        if index % every == 0:
            title = f"<title>{escape(printable(domain))}</title>" if domain else ""
            yield f'<text x="0" y="{top[node] + min(row, 14) - 1}">{escape(printable(node, 14))}{title}</text>'
        if index and domain != domains.get(nodes[index - 1], ""):
            yield f'<line class="domain" x1="0" x2="{_WIDTH}" y1="{top[node]}" y2="{top[node]}"/>'
    for segment in given.segments:
        left, right = _x(segment.start, given), _x(segment.end, given)
        if right - left >= _SHORTEST:
            round_ = "" if segment.round is None else f", round {segment.round}"
            title = f"{escape(segment.node)}: {_NAMES[segment.bucket]}{round_}, {_duration(segment.seconds)}"
            yield (
                f'<rect class="{segment.bucket.value}" x="{left:.1f}" y="{top[segment.node] + 1}" '
                f'width="{right - left:.1f}" height="{row - 2}"><title>{title}</title></rect>'
            )
    for each in given.rounds[:_MOST_ROUNDS]:
        if each.cause:
            x = _x(each.start, given)
            yield f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{row * len(nodes)}">'
            yield f"<title>round {each.number}: {escape(printable(each.cause))}</title></line>"
    yield from _axis(given, row * len(nodes))
    yield "</svg></div>"


def _curve(given: Report, name: str, points: _Points, begins: Sequence[float] = ()) -> Iterator[str]:
    """Yield a picture of values by time: steps, or a line for each of the rounds that begin at these times."""
    if not points:
        return
    height = 120
    least, most = min(0.0, *(value for _, value in points)), max(value for _, value in points)
    yield f'<h2>{name}</h2><div class="wide"><svg viewBox="0 0 {_WIDTH} {height + 24}" role="img" aria-label="{name}">'
    yield f'<text x="0" y="12">{most:.4g}</text><text x="0" y="{height}">{least:.4g}</text>'
    scale = (height - 4) / (most - least or 1.0)
    for _, of_round in itertools.groupby(points, key=lambda point: bisect.bisect(begins, point[0])):
        placed = [(_x(time, given), height - scale * (value - least)) for time, value in of_round]
        line = [f"{placed[0][0]:.1f},{placed[0][1]:.1f}"]
        for (_, before), (x, y) in itertools.pairwise(placed):
            line += [] if begins else [f"{x:.1f},{before:.1f}"]
            line.append(f"{x:.1f},{y:.1f}")
        # A line of one point is not drawn.
        line += [f"{placed[0][0] + 1:.1f},{placed[0][1]:.1f}"] if len(line) == 1 else []
        yield f'<polyline class="curve" points="{" ".join(line)}"/>'
    yield from _axis(given, height)
    yield "</svg></div>"


def _axis(given: Report, y: int) -> Iterator[str]:
    yield f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH}" y1="{y}" y2="{y}"/>'
    span = given.end - given.start
    for part in range(5):
        x = _LEFT + part * (_WIDTH - _LEFT) / 4
        anchor = ("start", "middle", "middle", "middle", "end")[part]
        yield f'<text x="{x:.0f}" y="{y + 16}" text-anchor="{anchor}">{_duration(part * span / 4)}</text>'


def _world_sizes(rounds: Sequence[RoundReport]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for index, each in enumerate(rounds):
        found.append((each.start, float(each.world_size)))
        following = rounds[index + 1].start if index + 1 < len(rounds) else None
        if following is None or following > each.end:
            found.append((each.end, 0.0))
    return found


def _rounds(rounds: Sequence[RoundReport]) -> Iterator[str]:
    yield '<h2>Rounds</h2><div class="wide"><table><tr><th>round</th><th>began</th><th class="n">lasted</th>'
    yield '<th class="n">nodes</th><th class="n">workers</th><th class="n">steps</th><th class="n">per second</th>'
    yield '<th class="n">taken again</th><th>why it was formed</th></tr>'
    if len(rounds) > _MOST_ROUNDS:
        yield f'<tr><td colspan="9">the last {_MOST_ROUNDS} of {len(rounds)} rounds</td></tr>'
    for each in rounds[-_MOST_ROUNDS:]:
        progress = each.progress
        steps = (
            f"{progress.first_step} to {progress.last_step}" if progress.last_step is not None else str(progress.calls)
        )
        speed = progress.steps_per_second
        yield f"<tr><td>{each.number}</td><td>{_date(each.start)}</td>"
        yield f'<td class="n">{_duration(each.end - each.start)}</td>'
        nodes = escape(printable(compress(each.nodes)))
        yield f'<td class="n" title="{nodes}">{len(each.nodes)}</td><td class="n">{each.world_size}</td>'
        yield f'<td class="n">{steps if progress.reports else "unknown"}</td>'
        yield f'<td class="n">{"" if speed is None else f"{speed:.3g}"}</td>'
        least = "" if progress.complete else "at least "
        yield f'<td class="n">{"" if progress.redone is None else f"{least}{progress.redone}"}</td>'
        yield f'<td class="cause">{escape(printable(each.cause or each.reason.replace("_", " ")))}</td></tr>'
    yield "</table></div>"


def _slow(rounds: Sequence[RoundReport]) -> Iterator[str]:
    if not any(each.slow for each in rounds):
        return
    yield '<h2>Slow ranks</h2><div class="wide"><table><tr><th>round</th><th>rank</th><th>node</th><th>named</th>'
    yield '<th>until</th><th class="n">score</th><th></th></tr>'
    for each in rounds[-_MOST_ROUNDS:]:
        for slow in each.slow:
            until = "the end of the round" if slow.until is None else _date(slow.until)
            score = "" if slow.relative_score is None else f"{slow.relative_score:.2f}"
            yield f"<tr><td>{each.number}</td><td>{slow.rank}</td><td>{escape(printable(slow.node))}</td>"
            yield f'<td>{_date(slow.since)}</td><td>{until}</td><td class="n">{score}</td>'
            yield f'<td class="cause">{escape(printable(slow.text))}</td></tr>'
    yield "</table></div>"


def _failure(given: Report) -> Iterator[str]:
    cause = given.status.root_cause
    if cause is not None:
        rank = "" if cause.rank is None else f"rank {cause.rank} on "
        name = "Root cause" if given.status.state is RunState.FAILED else "Last failure"
        text = "\n".join(printable(line) for line in cause.text.splitlines())
        yield f"<h2>{name}</h2><p>{rank}{escape(printable(cause.node))}</p><pre>{escape(text)}</pre>"


def _notes(given: Report) -> Iterator[str]:
    yield "<h2>What is not known</h2><ul>"
    for line in (*given.total.missing, *given.status.problems):
        yield f"<li>{escape(printable(line, 1000))}</li>"
    yield "</ul>"


def _x(time: float, given: Report) -> float:
    span = (given.end - given.start) or 1.0
    return _LEFT + (_WIDTH - _LEFT) * min(1.0, max(0.0, (time - given.start) / span))


def _share(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.1f} %"


def _date(seconds: float) -> str:
    return local_time(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.1f} min" if minutes < 120 else f"{hours:.1f} h"
