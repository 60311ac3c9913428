"""One record from another that has fields of the same names, which are written down where they are declared only."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

_T = TypeVar("_T")


def record_from(kind: Callable[..., _T], source: object, /, **others: Any) -> _T:
    """Return a record of `kind`, a dataclass or Struct, with the fields that `source` has by the same names.
    Properties of `source` count as fields; `others` override."""
    other: Any = type(source)
    for name in _shared(kind, other):
        if name not in others:
            others[name] = getattr(source, name)
    return kind(**others)


@cache
def _shared(kind: Any, source: Any) -> tuple[str, ...]:
    """The names of the fields of one kind that the other has too."""
    return tuple(name for name in kind.__match_args__ if hasattr(source, name))
