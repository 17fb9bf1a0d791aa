from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

pytest.importorskip("textual")

from textual.pilot import Pilot
from textual.widgets import DataTable, RichLog, Static

from slurm_elastic.cli._top_view import TopView
from tests.conftest import Cli
from tests.unit.observe.runs import WrittenRun

A, B = "n1/7.0/100", "n2/7.0/200"
Steps = Callable[["Pilot[None]", TopView], Awaitable[None]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WrittenRun:
    monkeypatch.setenv("PATH", "/nonexistent")
    run = WrittenRun(tmp_path)
    run.started(0, A)
    run.started(0, B)
    run.round(1, 0, [A, B])
    rank = run.path / "logs/round_0000/n2/rank_03"
    rank.mkdir(parents=True)
    (rank / "stdout.log").write_text("epoch 1\nloss [0.5]\n")
    return run


def view(run: WrittenRun, steps: Steps, size: tuple[int, int] = (80, 24)) -> None:
    """Run the view without a terminal, and these steps once it has looked at the run."""

    async def go() -> None:
        app = TopView(run.run_dir, 3600.0)
        async with app.run_test(size=size) as pilot:
            await settled(pilot, app)
            await steps(pilot, app)

    asyncio.run(go())


async def settled(pilot: Pilot[None], app: TopView) -> None:
    await app.workers.wait_for_complete()
    await pilot.pause()


def lower(app: TopView) -> str:
    return "\n".join(line.text for line in app.query_one(RichLog).lines)


def title(app: TopView) -> str:
    return str(app.query_one("#title", Static).content)


def test_nodes_and_events(run: WrittenRun) -> None:
    async def steps(pilot: Pilot[None], app: TopView) -> None:
        table = app.query_one(DataTable)
        assert [table.get_row_at(index)[:4] for index in range(2)] == [
            ["n1", "training", "0", "0-1"],
            ["n2", "training", "0", "2-3"],
        ]
        assert "no live answer: from the run directory" in str(app.query_one("#facts", Static).content)
        assert "round 0 formed" in lower(app)
        # The facts are seen whole at 80 columns.
        assert table.region.width == 80

    view(run, steps)


def test_it_stands_a_terminal_of_40_columns(run: WrittenRun) -> None:
    async def steps(pilot: Pilot[None], app: TopView) -> None:
        await pilot.press("l", "s", "e", "d", "n")
        await settled(pilot, app)
        assert app.query_one(DataTable).get_row_at(0)[:2] == ["n1", "training"]

    view(run, steps, (40, 10))


def test_nodes_of_a_failure_domain_are_beside_each_other(run: WrittenRun) -> None:
    async def steps(pilot: Pilot[None], app: TopView) -> None:
        table = app.query_one(DataTable)
        assert len(table.columns) == 11
        run.started(2, A, domain="s10")
        run.started(2, B, domain="s2")
        app._look()
        await settled(pilot, app)
        assert [table.get_row_at(index)[:2] for index in range(2)] == [["n2", "s2"], ["n1", "s10"]]

    view(run, steps)


def test_the_log_of_the_selected_rank(run: WrittenRun) -> None:
    async def steps(pilot: Pilot[None], app: TopView) -> None:
        await pilot.press("down", "l")
        await settled(pilot, app)
        assert (title(app), lower(app)) == ("log of rank 2 on n2", "nothing yet")
        await pilot.press("right_square_bracket")
        await settled(pilot, app)
        assert title(app) == "log of rank 3 on n2"
        assert lower(app) == "--- stdout\nepoch 1\nloss [0.5]"
        await pilot.press("e")
        await settled(pilot, app)
        assert "round 0 formed" in lower(app)

    view(run, steps)


def test_nothing_is_done_without_a_yes(run: WrittenRun) -> None:
    async def steps(pilot: Pilot[None], app: TopView) -> None:
        for key in ("n", "escape", "enter", "q"):
            await pilot.press("d", key)
            await settled(pilot, app)
        assert list(app._notifications) == []
        await pilot.press("down", "d")
        assert "Drain n2?" in str(app.screen.query_one(Static).content)
        await pilot.press("y")
        await settled(pilot, app)
        await pilot.press("r", "y")
        await settled(pilot, app)
        told = [each.message for each in app._notifications]
        assert told == ["run 7 is not running: no leader has published an endpoint"] * 2

    view(run, steps)


@pytest.mark.parametrize(
    ("target", "line"),
    [
        (None, "n1 has no health port"),
        ("127.0.0.1:9", "the health port of n1 listens on its loopback alone"),
        ("192.0.2.1:0", "the health port of n1 at 192.0.2.1:0 cannot be reached from here"),
    ],
)
def test_stacks_that_cannot_be_had_are_a_line(run: WrittenRun, target: str | None, line: str) -> None:
    if target is not None:
        run.run_dir.publish_health("n1", "7", f'[{{"targets": ["{target}"]}}]'.encode())

    async def steps(pilot: Pilot[None], app: TopView) -> None:
        await pilot.press("s")
        await settled(pilot, app)
        assert lower(app).startswith(line)

    view(run, steps, (200, 24))


def test_nodes_that_need_a_person_are_seen_first_among_500(run: WrittenRun) -> None:
    agents = [f"n{index}/7.0/{index}" for index in range(500)]
    run.round(5, 1, agents)
    run.event(6, "n0", "node_lost", "lost n321", nodes=["n321"], agents=[agents[321]], why="", silent_for=0.3)
    slow = {"round": 1, "rank": 246, "nodes": ["n123"], "relative_score": 0.5}
    run.event(7, "n0", "rank_slow", "rank 246 on n123 is slow", **slow)

    async def steps(pilot: Pilot[None], app: TopView) -> None:
        table = app.query_one(DataTable)
        assert [table.get_row_at(index)[:2] for index in range(4)] == [
            ["n123", "training"],
            ["n321", "lost"],
            ["n0", "training"],
            ["n1", "training"],
        ]
        assert "nodes: 499 training, 1 lost" in str(app.query_one("#facts", Static).content)
        await pilot.press("ctrl+end", "l")
        await settled(pilot, app)
        assert title(app) == "log of rank 998 on n499"

    view(run, steps)


def test_what_is_wrong_is_one_line(run: WrittenRun, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    words = ["top", "7", "--run-dir", str(run.base)]
    assert "--interval 0: give 1 to 3600 seconds" in cli(2, *words, "--interval", "0").err
    assert "top needs a terminal; for other programs there is slurm-elastic status --json" in cli(2, *words).err
    assert "no run 9" in cli(2, "top 9 --run-dir", str(run.base)).err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    complaint = "slurm-elastic: error: top needs the package textual; pip install 'slurm_elastic[top]'\n"
    assert cli(2, *words).err == complaint
