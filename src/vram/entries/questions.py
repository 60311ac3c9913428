"""Methods that are questions: their names, without parentheses, are no answer."""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..errors import UsageError


class asked:
    """Make a method a question: who tests it without calling it gets a UsageError, where any method would be true."""

    def __init__(self, function: Callable[..., bool]) -> None:
        self._function = function

    def __get__(self, instance: object, owner: type) -> Callable[..., bool]:
        return self._function if instance is None else _Question(self._function, instance)


class _Question(functools.partial[bool]):
    __slots__ = ()

    def __bool__(self) -> bool:
        name = self.func.__name__
        raise UsageError(f"{name} is asked by a call: write {name}()")
