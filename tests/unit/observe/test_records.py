from __future__ import annotations

import shutil

from tests.unit.observe.runs import START, WrittenRun

A, B = "n1/7.0/100", "n2/7.0/200"


def test_events_of_all_nodes_are_in_the_order_of_their_times(run: WrittenRun) -> None:
    run.event(2, "n2", "node_lost", "second", nodes=["n1"])
    run.event(1, "n1", "leader_changed", "first")
    records = run.records()
    assert [(event.time - START, event.text) for event in records.events] == [(1, "first"), (2, "second")]
    assert records.events[1].nodes == ("n1",)
    assert records.problems == ()


def test_a_file_cut_short_is_one_line_and_the_rest_is_read(run: WrittenRun) -> None:
    run.event(1, "n1", "leader_changed", "whole")
    with (run.path / "events" / "n1.jsonl").open("a") as file:
        file.write('{"time": "2026-11-22T14:')
    records = run.records()
    assert [event.text for event in records.events] == ["whole"]
    assert records.problems == ("events/n1.jsonl is cut short: its last line is left out",)


def test_damaged_lines_are_counted_in_one_line(run: WrittenRun) -> None:
    for line in ("[]", "nonsense", '{"time": 3, "event": "x", "node": "n1"}', "\x00"):
        run.run_dir.append_event("n1", line)
    run.event(1, "n1", "leader_changed", "whole")
    records = run.records()
    assert [event.text for event in records.events] == ["whole"]
    assert records.problems == ("events/n1.jsonl: lines 1, 2, 3, 4 are damaged and left out",)


def test_events_of_a_newer_version_are_one_line_and_read_as_far_as_known(run: WrittenRun) -> None:
    run.event(1, "n1", "leader_changed", "known")
    for at in (2, 3):
        run.event(at, "n1", "node_teleported", "new", schema=2, nodes={"from": "n1"})
    records = run.records()
    assert [event.text for event in records.events] == ["known", "new", "new"]
    assert records.events[1].nodes == ()
    (problem,) = records.problems
    assert problem.startswith("events/n1.jsonl is of a newer release (schema 2; this one knows 1)")


def test_a_half_deleted_directory_is_read(run: WrittenRun) -> None:
    run.started(0, A)
    run.round(1, 0, [A])
    run.round(2, 1, [A, B])
    run.round(3, 2, [A])
    (run.path / "rounds" / "000001.json").unlink()
    (run.path / "rounds" / "000002.json").write_text('{"round": 2, "pla')
    shutil.rmtree(run.path / "progress")
    shutil.rmtree(run.path / "logs")
    records = run.records()
    assert [each.number for each in records.rounds] == [0]
    assert records.problems == ("rounds/000002.json is cut short or damaged; it is left out",)


def test_a_directory_without_anything_is_no_error(run: WrittenRun) -> None:
    shutil.rmtree(run.path)
    run.path.mkdir()
    records = run.records()
    assert (records.rounds, records.events, records.progress, records.done) == ((), (), (), None)


def test_a_file_that_cannot_be_read_is_one_line(run: WrittenRun) -> None:
    run.event(1, "n1", "leader_changed", "there")
    (run.path / "events" / "n2.jsonl").symlink_to("/dev/zero")
    (problem,) = run.records().problems
    assert "n2.jsonl" in problem


def test_forged_records_are_left_out_and_named(run: WrittenRun) -> None:
    run.round(1, 0, [A])
    record = (run.path / "rounds" / "000000.json").read_text()
    # Without a signature, with that of another round, and a file in the place of DONE.
    (run.path / "rounds" / "000001.json").write_text('{"round": 1, "places": [], "world_size": 8}')
    (run.path / "rounds" / "000002.json").write_text(record)
    (run.path / "done.json").write_text('{"outcome": "succeeded"}')
    records = run.records()
    assert [each.number for each in records.rounds] == [0]
    assert records.done is None
    assert records.problems == (
        "done.json was not written by this run; it is left out",
        "rounds/000001.json was not written by this run; it is left out",
        "rounds/000002.json was not written by this run; it is left out",
    )


def test_a_record_of_done_that_was_cut_short_counts(run: WrittenRun) -> None:
    run.run_dir.mark_done({"outcome": "succeeded"})
    (run.path / "done.json").write_text('{"outc')
    records = run.records()
    assert records.done == {}
    assert records.problems == ("done.json is cut short or damaged; it is left out",)


def test_values_of_wrong_types_are_taken_for_missing(run: WrittenRun) -> None:
    record = {"round": True, "places": [{"node": 3}, "x"], "world_size": "many", "reason": None}
    run.run_dir.claim_record(record, "rounds", 0)
    run.progress(1, A, "workers_ended", round="0", workers=[{"rank": "x", "steps": None}, 5])
    (round_,) = run.records().rounds
    assert (round_.nodes, round_.world_size, round_.reason) == (("",), 0, "")
    (ended,) = run.records().progress
    assert ended.round is None
    assert [worker.steps for worker in ended.workers] == [0]
