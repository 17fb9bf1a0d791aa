"""Changed copies of what is never changed itself: frozen dataclasses and maps. Every event makes several."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from typing import TYPE_CHECKING, Any, TypeVar, cast

__all__ = ["NamedMap", "replace"]

T = TypeVar("T")

if TYPE_CHECKING:
    # For its checks of names and types.
    from dataclasses import replace
else:

    def replace(instance: T, /, **changes: Any) -> T:
        """The same as :func:`dataclasses.replace`, which takes several times as long, for instances without slots.

        Raises:
            TypeError: there is no such field.
        """
        fields = instance.__dict__ | changes
        if len(fields) != len(instance.__dict__):
            raise TypeError(f"{type(instance).__name__} has no field {', '.join(changes.keys() - instance.__dict__)}")
        changed = object.__new__(type(instance))
        # Past the class's own __setattr__, which refuses.
        object.__setattr__(changed, "__dict__", fields)
        return changed


# Maps that are never changed, of which a copy with one difference is cheap also where they are large.
#
# A state of the machine shares nearly everything with the one before it. A dict that is copied for each of n events
# costs n times n steps; these keep their entries in buckets, as many as there are entries in one of them, and copy
# one bucket. Order depends on the keys and on how they came alone, never on the process: simulations repeat what they
# did.
_V = TypeVar("_V")

_SMALL = 64
"""Entries that one bucket holds before there are more."""


def _number(name: str, buckets: int) -> int:
    return 0 if buckets == 1 else zlib.crc32(name.encode(errors="surrogatepass")) % buckets


class NamedMap(Mapping[str, _V]):
    """Values by name."""

    __slots__ = ("_buckets", "_size")

    def __init__(self, content: Mapping[str, _V] | Iterable[tuple[str, _V]] = ()) -> None:
        entries = dict(content)
        self._size = len(entries)
        # Room to grow, or nearly every entry would have them laid out anew.
        count = 1 if self._size <= _SMALL else 2 * math.isqrt(self._size)
        self._buckets: tuple[dict[str, _V], ...] = tuple({} for _ in range(count))
        for name, value in entries.items():
            self._bucket(name)[name] = value

    def _bucket(self, name: str) -> dict[str, _V]:
        return self._buckets[_number(name, len(self._buckets))]

    def __getitem__(self, name: str) -> _V:
        return self._bucket(name)[name]

    def __contains__(self, name: object) -> bool:
        return name in self._bucket(cast(str, name))

    def get(self, name: str, default: Any = None) -> Any:
        """See Mapping."""
        return self._bucket(name).get(name, default)

    def __iter__(self) -> Iterator[str]:
        return itertools.chain.from_iterable(self._buckets)

    def values(self) -> ValuesView[_V]:
        """See Mapping."""
        return self._together().values()

    def items(self) -> ItemsView[str, _V]:
        """See Mapping."""
        return self._together().items()

    def _together(self) -> dict[str, _V]:
        """All entries, to walk over them: a lookup of each would take longer than the copy where they are many."""
        buckets = self._buckets
        return buckets[0] if len(buckets) == 1 else dict(itertools.chain.from_iterable(b.items() for b in buckets))

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return repr(self._together())

    def set(self, name: str, value: _V) -> NamedMap[_V]:
        """This map with one value more, or another one."""
        return self.update({name: value})

    def update(self, changes: Mapping[str, _V]) -> NamedMap[_V]:
        """This map with other values for some names."""
        buckets, count, size = list(self._buckets), len(self._buckets), self._size
        for name, value in changes.items():
            number = _number(name, count)
            if buckets[number] is self._buckets[number]:
                buckets[number] = dict(buckets[number])
            size += name not in buckets[number]
            buckets[number][name] = value
        if size > _SMALL and size > 4 * count**2:
            return NamedMap({**self._together(), **changes})
        return self._with(buckets, size)

    def without(self, *names: str) -> NamedMap[_V]:
        """This map without these names, as far as they are in it."""
        buckets, size = list(self._buckets), self._size
        for name in names:
            number = _number(name, len(buckets))
            if name in buckets[number]:
                if buckets[number] is self._buckets[number]:
                    buckets[number] = dict(buckets[number])
                del buckets[number][name]
                size -= 1
        return self if size == self._size else self._with(buckets, size)

    def _with(self, buckets: list[dict[str, _V]], size: int) -> NamedMap[_V]:
        changed: NamedMap[_V] = object.__new__(NamedMap)
        changed._size, changed._buckets = size, tuple(buckets)
        return changed
