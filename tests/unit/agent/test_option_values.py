"""Numbers of seconds, as options have them."""

from __future__ import annotations

import pytest

from slurm_elastic.agent.option_values import positive_seconds, seconds_or_zero
from slurm_elastic.errors import UsageError


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
