"""A catalogue's rows, as a journal has them, and the catalogue that they make."""

from __future__ import annotations

from typing import Any

from vram.keeper.catalogue import Catalogue
from vram.keeper.rows import Replayed, changes, encode, everything


class Rows:
    """The records that were written so far. Tokens may be anything: they are numbered, and found again."""

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self._tokens: list[Any] = []

    def _number(self, token: Any) -> int:
        self._tokens.append(token)
        return len(self._tokens)

    def write(self, books: Catalogue) -> None:
        """Write what changed since the last time."""
        self.records.append(encode(changes(books, self._number)))

    def write_all(self, books: Catalogue) -> None:
        """Write all that there is."""
        self.records.append(encode(everything(books, self._number)))

    def restore(self, *arguments: Any, **options: Any) -> Catalogue:
        """Return the catalogue that the rows make; the arguments are those of :class:`Catalogue`."""
        made = Catalogue(*arguments, **options)
        replayed = Replayed(self.records)
        replayed.restore(made, lambda first, *_: self._tokens[first - 1])
        assert replayed.bad == 0
        return made


def restored(books: Catalogue) -> Catalogue:
    """Return the catalogue that the rows of another one make."""
    rows = Rows()
    rows.write_all(books)
    accounts = books.accounts
    return rows.restore(accounts.quotas, keeper_uid=accounts.keeper_uid)
