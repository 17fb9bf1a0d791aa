"""What options of the agent mean, and numbers of seconds, as options have them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slurm_elastic.agent.option_values import (
    NotifySettings,
    ReplaceSettings,
    RequeuePolicy,
    notify_settings,
    positive_seconds,
    replace_settings,
    requeue_policy,
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
    ("parse", "texts", "meaning"),
    [
        (notify_settings, (None, None), None),
        (notify_settings, ("true", None), NotifySettings("true", 600.0)),
        (notify_settings, ("true", "90"), NotifySettings("true", 90.0)),
        (replace_settings, (None, None), None),
        (replace_settings, ("60", None), ReplaceSettings(60.0, 10)),
        (replace_settings, ("1.5", "0"), ReplaceSettings(1.5, 0)),
        (requeue_policy, (None, None, None), RequeuePolicy(10, SignalDefaults(30.0, 120.0))),
        (requeue_policy, ("0", "5", "7.5"), RequeuePolicy(0, SignalDefaults(5.0, 7.5, save=7.5))),
    ],
)
def test_what_options_mean(parse: Callable[..., object], texts: tuple[str | None, ...], meaning: object) -> None:
    assert parse(*texts) == meaning


@pytest.mark.parametrize(
    ("parse", "texts", "complaint"),
    [
        (notify_settings, (None, "90"), "--notify-after needs --notify"),
        (notify_settings, ("true", "0"), "--notify-after '0' is no number of seconds above 0"),
        (replace_settings, (None, "3"), "--replace-limit needs --replace-lost"),
        (replace_settings, ("0", None), "--replace-lost '0' is no number of seconds above 0"),
        (replace_settings, ("60", "-1"), "--replace-limit '-1' is no number"),
        (requeue_policy, ("x", None, None), "--max-requeues 'x' is no number"),
        (requeue_policy, (None, "-1", None), "--grace '-1' is no number of seconds"),
        (requeue_policy, (None, "", None), "--grace '' is no number of seconds"),
        (requeue_policy, (None, None, "nan"), "--warning 'nan' is no number of seconds"),
    ],
)
def test_options_that_mean_nothing_are_named(
    parse: Callable[..., object], texts: tuple[str | None, ...], complaint: str
) -> None:
    with pytest.raises(UsageError, match=complaint):
        parse(*texts)
