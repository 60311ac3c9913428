"""Tuples, lists and dicts with arrays in them, as a channel sends them: a tree of plain values, and the arrays.

In the tree each list says first what it is: ``[0, ...]`` is a list, ``[1, ...]`` a tuple, ``[2, n]`` the n-th array.
All else stands for itself. So msgpack is enough, and what comes back is what was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from ..errors import ProtocolError, UsageError
from .messages import MAX_ARRAYS, encode

MAX_DEPTH = 32  # containers in one another
_MAX_ITEMS = 1 << 16  # a message has no more bytes
_LIST, _TUPLE, _ARRAY = 0, 1, 2
SCALARS = frozenset((type(None), bool, int, float, str, bytes))
# How the value itself is had of an object of a class derived from one of these, whatever that class makes of `str()`.
_BARE: tuple[tuple[type, Callable[[Any], object]], ...] = (
    (int, int.__int__), (float, float.__float__), (str, str.__str__), (bytes, lambda value: b"".join((value, b""))),
)  # fmt: skip

_Path = tuple[object, ...]


class Packed:
    """A container that is ready to be sent: `tree` is its structure for msgpack, `arrays` each array in it once, with
    the path where it was first met. `is_plain` containers need no tree: msgpack says them as they are. Raises
    UsageError for what has no place in a message, with the path to it."""

    __slots__ = ("_indexes", "_is_array", "_items", "_tests", "arrays", "is_plain", "tree", "value")

    def __init__(self, value: object, is_array: Callable[[object], bool], tests: bool = False) -> None:
        self.value = value
        self.arrays: list[tuple[_Path, object]] = []
        self.is_plain = True
        self._is_array = is_array
        self._indexes: dict[int, int] = {}
        self._items = 0
        self._tests = tests
        self.tree = self._node(value, (), 0)

    def _node(self, value: Any, path: _Path, depth: int) -> object:
        self._items += 1
        if self._items > _MAX_ITEMS:
            raise _refused((), f"has more than {_MAX_ITEMS} items")
        if type(value) in SCALARS:
            if self._tests:
                _test(value, path)
            return value
        if isinstance(value, (tuple, list, dict)):
            if depth == MAX_DEPTH:
                raise _refused(path, f"is more than {MAX_DEPTH} containers deep")
            if isinstance(value, dict):
                return {_key(key, path): self._node(item, (*path, key), depth + 1) for key, item in value.items()}
            self.is_plain = self.is_plain and isinstance(value, list)
            if not self._tests and SCALARS.issuperset(map(type, value)):  # nothing to look into: as fast as it can be
                self._items += len(value)
                return [_LIST if isinstance(value, list) else _TUPLE, *value]
            items = [self._node(item, (*path, index), depth + 1) for index, item in enumerate(value)]
            return [_LIST if isinstance(value, list) else _TUPLE, *items]
        if self._is_array(value):
            self.is_plain = False
            index = self._indexes.get(id(value))
            if index is None:
                index = self._indexes[id(value)] = len(self.arrays)
                self.arrays.append((path, value))
                if index == MAX_ARRAYS:
                    raise _refused((), f"has more than {MAX_ARRAYS} arrays")
            return [_ARRAY, index]
        for kind, bare in _BARE:  # of a class of its own, such as numpy's float64 or an IntEnum
            if isinstance(value, kind):
                self.is_plain = self.is_plain and isinstance(value, Enum)  # others have no words in msgpack
                return self._node(bare(value), path, depth)
        raise _refused(path, f"is {_one(value)}")


def _refused(path: _Path, why: str) -> UsageError:
    """Return the error for what cannot be sent, with where in the value it is."""
    return UsageError(
        f"a channel carries vram arrays and plain values (None, bool, int, float, str, bytes), and tuples, lists "
        f"and dicts of them: {named(path) or 'it'} {why}"
    )


def refuse(value: object, is_array: Callable[[object], bool], error: Exception) -> UsageError:
    """Return what to raise for a value that could not be encoded for `error`."""
    try:
        Packed(value, is_array, tests=True)
    except UsageError as found:
        return found
    return _refused((), f"cannot be encoded: {error}")


def named(path: _Path) -> str:
    """Return a path as people write it: ``[1]['x']``."""
    return "".join(f"[{step!r:.40}]" for step in path)


def unpack(tree: object, arrays: Sequence[object], depth: int = 0) -> Any:
    """Put a container together again. Raises ProtocolError if the tree is not one that a :class:`Packed` has, or names
    arrays that did not come with it."""
    if type(tree) in SCALARS:
        return tree
    if depth < MAX_DEPTH and type(tree) is dict and all(type(key) in SCALARS for key in tree):
        return {key: unpack(item, arrays, depth + 1) for key, item in tree.items()}
    if type(tree) is list and tree and type(tree[0]) is int:
        kind = tree[0]
        if kind == _ARRAY and len(tree) == 2 and type(tree[1]) is int and 0 <= tree[1] < len(arrays):
            return arrays[tree[1]]
        if depth < MAX_DEPTH and kind in (_LIST, _TUPLE):
            items = [unpack(item, arrays, depth + 1) for item in tree[1:]]
            return items if kind == _LIST else tuple(items)
    raise ProtocolError("a container came that is not made as one, or names arrays that did not come with it")


def _one(value: object) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiouAEIO' else 'a'} {kind}"


def _key(key: object, path: _Path) -> object:
    if type(key) not in SCALARS:
        raise _refused(path, f"has a key that is {_one(key)}")
    if not (type(key) is str and key.isascii()):  # which nearly all are
        _test(key, path)
    return key


def _test(value: object, path: _Path) -> None:
    """Raise unless msgpack can say a plain value: integers have 64 bits, and text is Unicode."""
    try:
        encode(value)
    except (ValueError, OverflowError) as error:
        raise _refused(path, f"cannot be encoded: {error}") from None
