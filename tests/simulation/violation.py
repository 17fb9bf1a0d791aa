"""A promise that is broken."""

from __future__ import annotations

from collections.abc import Callable


class Violation(AssertionError):  # noqa: N818
    """A promise is broken. `promise` names it, for the search for a smaller schedule that breaks the same one."""

    def __init__(self, promise: str, detail: str) -> None:
        super().__init__(f"{promise}: {detail}")
        self.promise = promise


def require(condition: object, promise: str, detail: object = "") -> None:
    """Raise if a promise does not hold."""
    if not condition:
        raise Violation(promise, str(detail))


def violation_of(play: Callable[[], object]) -> Violation | None:
    """Play a schedule; the promise that it breaks, or None."""
    try:
        play()
    except Violation as violation:
        return violation
    except Exception as error:  # the machine itself broke: as bad as any broken promise
        return Violation(f"nothing crashes ({type(error).__name__})", repr(error))
    return None
