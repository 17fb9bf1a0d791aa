"""What options of the agent mean, and numbers of seconds, as options have them."""

from __future__ import annotations

import pytest

from slurm_elastic.agent.option_values import (
    OptionValues,
    positive_seconds,
    read_options,
    seconds_or_zero,
)
from slurm_elastic.errors import UsageError
from slurm_elastic.slurm import SignalDefaults


@pytest.mark.parametrize("text", ["", "-1", "nan", "inf", "1e3", "soon", " 5", "5s", "1_0", "٣"])
def test_a_text_that_is_no_number_of_seconds_is_named(text: str) -> None:
    with pytest.raises(UsageError, match="no number of seconds above 0; write it as in 600"):
        positive_seconds("--replace-lost", text)
    with pytest.raises(UsageError, match="no number of seconds; give 0 or more"):
        seconds_or_zero("--grace", text)


def test_zero_is_for_those_that_may_be_zero() -> None:
    assert [seconds_or_zero("--grace", text) for text in ("0", "0.5", "90")] == [0, 0.5, 90]
    assert [positive_seconds("--stacks-after", text) for text in ("0.5", "90")] == [0.5, 90]
    with pytest.raises(UsageError, match="--hang-timeout '0' is neither seconds, above 0, nor auto or off"):
        positive_seconds("--hang-timeout", "0", "nor auto or off")


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        ({}, OptionValues()),
        ({"notify": "true", "snapshot_slots": "2"}, OptionValues(notify="true", snapshot_slots=2)),
        ({"notify": "true", "notify_after": "90"}, OptionValues(notify="true", notify_after=90.0)),
        ({"replace_lost": "1.5", "replace_limit": "0"}, OptionValues(replace_lost=1.5, replace_limit=0)),
        ({"max_requeues": "0", "grace": "5"}, OptionValues(max_requeues=0, grace=5.0)),
        ({"grace": "", "console": "full"}, OptionValues(console="full")),
    ],
)
def test_what_options_mean(texts: dict[str, str], values: OptionValues) -> None:
    assert read_options(texts.get) == values


def test_what_signals_mean() -> None:
    assert OptionValues().meaning == SignalDefaults(30.0, 120.0)
    assert OptionValues(grace=5.0, warning=7.5).meaning == SignalDefaults(5.0, 7.5, save=7.5)


@pytest.mark.parametrize(
    ("texts", "complaint"),
    [
        ({"notify_after": "90"}, "--notify-after needs --notify"),
        ({"notify": "true", "notify_after": "0"}, "--notify-after '0' is no number of seconds above 0"),
        ({"replace_limit": "3"}, "--replace-limit needs --replace-lost"),
        ({"replace_lost": "0"}, "--replace-lost '0' is no number of seconds above 0"),
        ({"replace_lost": "60", "replace_limit": "-1"}, "--replace-limit '-1' is no number"),
        ({"max_requeues": "x"}, "--max-requeues 'x' is no number"),
        ({"grace": "-1"}, "--grace '-1' is no number of seconds"),
        ({"warning": "nan"}, "--warning 'nan' is no number of seconds"),
    ],
)
def test_options_that_mean_nothing_are_named(texts: dict[str, str], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        read_options(texts.get)
