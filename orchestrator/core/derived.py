"""What is derived from an object once, and kept exactly as long as the object."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

Source = TypeVar("Source")
Derived = TypeVar("Derived")


def derived_once(derive: Callable[[Source], Derived]) -> Callable[[Source], Derived]:
    """Return a function that derives something from each object once; any thread may call.

    The object is told from others by identity. What is derived must not refer to it, or neither is ever freed.
    """
    known: WeakKeyDictionary[Source, Derived] = WeakKeyDictionary()

    @wraps(derive)
    def of(source: Source) -> Derived:
        found = known.get(source)
        if found is None:
            found = known[source] = derive(source)
        return found

    return of
