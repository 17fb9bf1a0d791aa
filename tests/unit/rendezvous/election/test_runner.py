from __future__ import annotations

import pytest

from slurm_elastic.rendezvous.election.leader_location import Answer
from slurm_elastic.rendezvous.election.runner import _failed
from slurm_elastic.rendezvous.transport.session import (
    BusyError,
    ClosedError,
    ForeignError,
    SessionError,
    TwinError,
    VersionError,
)


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (VersionError("another version"), Answer.VERSION),
        (ConnectionRefusedError(), Answer.ENDED),
        (BusyError(3.0), Answer.SILENT),
        (ClosedError("led by nobody"), Answer.IDLE),
        (TwinError("a leader by another run directory"), Answer.TWIN),
        (ForeignError("another program"), Answer.SILENT),
        (SessionError("no answer"), Answer.SILENT),
        (TimeoutError(), Answer.SILENT),
    ],
)
def test_what_an_attempt_to_connect_says_about_the_other_side(error: Exception, answer: Answer) -> None:
    failed = _failed(1, ("n1", 29400), error)
    assert (failed.answer, failed.busy) == (answer, 3.0 if isinstance(error, BusyError) else 0.0)
