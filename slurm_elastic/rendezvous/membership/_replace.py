"""A frozen dataclass with some fields changed: several times after every event, so it has to be cheap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["replace"]

T = TypeVar("T")

if TYPE_CHECKING:
    # For its checks of names and types.
    from dataclasses import replace
else:

    def replace(instance: T, /, **changes: Any) -> T:
        """The same as :func:`dataclasses.replace`, which takes five times as long, for instances without slots.

        Raises:
            TypeError: there is no such field.
        """
        changed = object.__new__(type(instance))
        fields = changed.__dict__
        fields.update(instance.__dict__)
        fields.update(changes)
        if len(fields) != len(instance.__dict__):
            raise TypeError(f"{type(instance).__name__} has no field {', '.join(changes.keys() - instance.__dict__)}")
        return changed
