import time

import pytest

from slurm_elastic.text import local_time, parse_time


@pytest.mark.parametrize("zone", ["UTC", "UTC-14", "UTC+12"])
def test_a_time_that_some_clock_cannot_show_is_none(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        for foreign in ("0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00", "x", 3, None):
            assert parse_time(foreign) is None
        for number in (-1, -1e300, 1e300, 10**400, float("inf"), float("nan"), 253402300800):
            assert 1969 <= local_time(number).year < 10000
        for text in ("1970-01-01T00:00:00+00:00", "2026-11-22T14:00:00Z", "9998-12-31T23:00:00+00:00"):
            assert (seconds := parse_time(text)) is not None
            assert local_time(seconds).timestamp() == seconds
    finally:
        monkeypatch.undo()
        time.tzset()
