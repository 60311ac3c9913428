"""A dict in the order of its keys, which can be read from any key on."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, MutableMapping
from itertools import chain
from operator import itemgetter
from typing import TypeVar

K = TypeVar("K", int, str)
V = TypeVar("V")
_first = itemgetter(0)
_MOST = 512  # keys of a block: moving so many costs no more than finding the block


class Ordered(MutableMapping[K, V]):
    """A mapping in the order of its keys, which can be read from any key on.
    The keys lie in blocks, of which none is empty: a place is found in the logarithm of their number."""

    __slots__ = ("_blocks", "_things")

    def __init__(self) -> None:
        self._things: dict[K, V] = {}
        self._blocks: list[list[K]] = []

    def __getitem__(self, key: K) -> V:
        return self._things[key]

    def __setitem__(self, key: K, thing: V) -> None:
        if key not in self._things:
            self._add(key)
        self._things[key] = thing

    def __delitem__(self, key: K) -> None:
        del self._things[key]
        at = self._block(key)
        block = self._blocks[at]
        del block[bisect_left(block, key)]
        if not block:
            del self._blocks[at]

    def __len__(self) -> int:
        return len(self._things)

    def __iter__(self) -> Iterator[K]:
        return chain.from_iterable(self._blocks)

    def beginning(self, key: K) -> Iterator[V]:
        """Yield what is there from `key` on, in the order of the keys. Nothing may be added or taken out meanwhile."""
        if not self._blocks:
            return
        at = self._block(key)
        start = bisect_left(self._blocks[at], key)
        for block in self._blocks[at:]:
            for index in range(start, len(block)):
                yield self._things[block[index]]
            start = 0

    def _block(self, key: K) -> int:
        """Where a key is, or would be."""
        return max(0, bisect_right(self._blocks, key, key=_first) - 1)

    def _add(self, key: K) -> None:
        blocks = self._blocks
        if not blocks or key > blocks[-1][-1]:  # the common case, numbers that grow, leaves full blocks behind
            if blocks and len(blocks[-1]) < _MOST:
                blocks[-1].append(key)
            else:
                blocks.append([key])
            return
        at = self._block(key)
        block = blocks[at]
        block.insert(bisect_left(block, key), key)
        if len(block) > _MOST:
            half = len(block) // 2
            blocks[at : at + 1] = [block[:half], block[half:]]
