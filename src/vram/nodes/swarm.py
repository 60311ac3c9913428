"""The assignment of pieces to the readers of one version. Pure: no socket, no clock, no lock.

A piece that no reader has comes from the source, each time another one, and a few at a time if there are several
readers. Other pieces come from readers: the piece that fewest have, from the least busy reader. A reader that fails is
asked no more, and a piece that no living reader has or gets comes from the source again, so the source alone suffices.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

SENDS = 8  # pieces that the source sends at a time
UPLOADS = 4  # pieces that a reader sends at a time
_LOOK = 16  # pieces, and holders of each, that are compared
TRIES = 3  # failures after which a reader is asked for nothing any more


class Assignment(NamedTuple):
    """Get this piece from this address; from the source if that is empty."""

    number: int
    peer: str


@dataclass(slots=True)
class _Reader:
    """One that pulls: what it lacks, what it is getting from whom, and what it sends."""

    lacks: dict[int, None]  # in an order of its own, so that not all want the same
    serves: str
    has: set[int] = field(default_factory=set)
    getting: dict[int, str] = field(default_factory=dict)
    uploads: int = 0
    failures: int = 0


class Swarm:
    """The readers of one version of `count` pieces. The source sends `sends` pieces at a time; `sent` counts them."""

    def __init__(self, count: int, sends: float = SENDS) -> None:
        self._count, self._sends = count, sends
        self._readers: dict[bytes, _Reader] = {}
        self._serving: dict[str, _Reader] = {}  # by the address that others get pieces from
        self._holders: list[dict[str, None]] = [{} for _ in range(count)]  # piece: who serves it; asked last, last
        self._coming = [0] * count  # piece: how many are getting it that will serve it
        self._rare = set(range(count))  # pieces that nobody serves, or will
        self._sending = 0
        self.sent = 0

    def join(self, reader: bytes, serves: str, has: Iterable[int] = ()) -> None:
        """Have a reader with what it has; one that is known is left, and joins anew."""
        self.leave(reader)
        there = {number for number in has if 0 <= number < self._count}
        lacks = [number for number in range(self._count) if number not in there]
        random.Random(reader).shuffle(lacks)
        new = _Reader(dict.fromkeys(lacks), serves if serves not in self._serving else "", there)
        self._readers[reader] = new
        if new.serves:
            self._serving[new.serves] = new
            for number in there:
                self._holders[number][new.serves] = None
                self._rare.discard(number)

    def leave(self, reader: bytes) -> None:
        """Forget a reader."""
        gone = self._readers.pop(reader, None)
        if gone is None:
            return
        for number in list(gone.getting):
            self._end(gone, number)
        self._silence(gone)

    def _silence(self, reader: _Reader) -> None:
        """Have nobody get anything from a reader any more."""
        if not reader.serves:
            return
        for number in reader.has:
            self._holders[number].pop(reader.serves, None)
            self._look(number)
        for number in reader.getting:
            self._coming[number] -= 1
            self._look(number)
        del self._serving[reader.serves]
        reader.serves = ""

    def _look(self, number: int) -> None:
        """Note whether anybody serves a piece, or will."""
        if self._holders[number] or self._coming[number]:
            self._rare.discard(number)
        else:
            self._rare.add(number)

    def next(self, reader: bytes, *, insist: bool = False) -> Assignment | None:
        """Return the next piece for a reader and its sender; None if it has to wait for others (see :meth:`is_done`).
        `insist` is for a reader that has waited long: a piece that no reader can give comes from the source."""
        me = self._readers[reader]
        if self._sending < self._sends or len(self._readers) == 1:
            for number in self._rare if len(self._rare) < len(me.lacks) else me.lacks:
                if number in me.lacks and number in self._rare:
                    return self._begin(me, Assignment(number, ""))
        best: Assignment | None = None
        fewest = UPLOADS, 0
        looked = list(islice(me.lacks, _LOOK))
        for number in looked:
            del me.lacks[number]  # and behind the others, which are looked at next time
            me.lacks[number] = None
            holders = self._holders[number]
            for address in islice(holders, _LOOK):
                rank = self._serving[address].uploads, len(holders)
                if rank < fewest:
                    best, fewest = Assignment(number, address), rank
        if best is None and insist and me.lacks:
            best = Assignment(next(iter(me.lacks)), "")
        return None if best is None else self._begin(me, best)

    def is_done(self, reader: bytes) -> bool:
        """Whether there is nothing that a reader lacks and is not getting."""
        return not self._readers[reader].lacks

    @property
    def are_done(self) -> bool:
        """Whether nobody lacks anything."""
        return all(not one.lacks and not one.getting for one in self._readers.values())

    def _begin(self, me: _Reader, given: Assignment) -> Assignment:
        del me.lacks[given.number]
        me.getting[given.number] = given.peer
        if me.serves:
            self._coming[given.number] += 1
            self._rare.discard(given.number)
        if given.peer:
            self._serving[given.peer].uploads += 1
            holders = self._holders[given.number]
            del holders[given.peer]
            holders[given.peer] = None
        else:
            self._sending += 1
            self.sent += 1
        return given

    def _end(self, me: _Reader, number: int) -> str | None:
        """End the getting of a piece, one way or the other; return from whom, None if it was not being got."""
        peer = me.getting.pop(number, None)
        if peer is None:
            return None
        if me.serves:
            self._coming[number] -= 1
            self._look(number)
        if not peer:
            self._sending -= 1
        elif (sender := self._serving.get(peer)) is not None:
            sender.uploads -= 1
        return peer

    def got(self, reader: bytes, number: int) -> None:
        """Note that a piece has arrived, and is right."""
        me = self._readers[reader]
        if self._end(me, number) is None:
            return  # nobody told it to: what a reader claims to have by itself is given to nobody
        me.has.add(number)
        if me.serves:
            self._holders[number][me.serves] = None
            self._rare.discard(number)

    def failed(self, reader: bytes, number: int) -> None:
        """Note that a piece could not be had from where it was to come."""
        me = self._readers[reader]
        peer = self._end(me, number)
        if peer is None:
            return
        me.lacks[number] = None
        if peer and (sender := self._serving.get(peer)) is not None:
            sender.failures += 1
            if sender.failures >= TRIES:
                self._silence(sender)
