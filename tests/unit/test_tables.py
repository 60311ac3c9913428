"""What the tables print of strangers' words, from whoever listens at the path: words, whatever they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from vram.cli import tables
from vram.info import ArrayInfo, EntryInfo, HolderInfo, LimitInfo, StatisticsInfo, VersionInfo
from vram.keeper.reports import UserInfo

if TYPE_CHECKING:
    from rich.table import Table

# A colour, the title of a window (up to BEL), C1, a line, a change of direction, markup, an emoji's name.
EVIL = "\x1b[2J\x1b]0;t\x07\x9b31m\r\n\u202e[red]x[/red][/]:smile:"
META = {EVIL: EVIL}  # reports make labels harmless
HOLDER = HolderInfo(1, None, 5, "me", "r", 1.0, EVIL, 1, 9, EVIL)
VERSION = VersionInfo(1, 5, True, False, 9, (9,), ("host",), 1, 1.0, None, None, "me", META, (HOLDER,), False, EVIL)
ARRAY = ArrayInfo(EVIL, EVIL, (1,), 9)
ENTRY = EntryInfo(EVIL, 1, 5, 9, 1, False, 1, 0, 1.0, None, META, (VERSION,), (ARRAY,))
HELD = StatisticsInfo(1, 1.0, 1, 1, 1, 1, 0, 9, 1, 0, (LimitInfo("bytes", 9, None, 8, "--x"),))


def all_tables(times: int) -> list[Table]:
    return [
        tables.entry_table([ENTRY] * times),
        tables.holder_table([HOLDER] * times),
        *tables.detail_tables(ENTRY),
        tables.user_table([UserInfo(5, 9, 1, 1, 1, 0), UserInfo(None, 9, 1, 1, 1, 0)], HELD),
    ]


@pytest.mark.parametrize("times", [1, 501], ids=["few", "many"])
def test_no_table_prints_what_a_terminal_would_obey(times: int, capsys: pytest.CaptureFixture[str]) -> None:
    for table in all_tables(times):
        tables.show_table(table)
        said = capsys.readouterr().out
        assert all(c.isprintable() for c in said.replace("\n", "")), table.columns[0].header
        assert said.isascii()


def test_markup_of_strangers_is_words(capsys: pytest.CaptureFixture[str]) -> None:
    tables.show_table(tables.entry_table([ENTRY]))
    said = capsys.readouterr().out
    assert "[red]x[/red][/]:smile:" in said
    assert "?[2J?]0;t??31m" in said


def test_the_table_of_users_says_what_each_may_have(capsys: pytest.CaptureFixture[str]) -> None:
    tables.show_table(tables.user_table([UserInfo(5, 9, 1, 1, 1, 0), UserInfo(6, 7, 1, 1, 1, 0)], HELD))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["uid", "bytes"]
    assert rows[1:] == [
        ["all", "may", "have", "-"], ["each", "may", "have", "8", "B"], ["all", "have", "9", "B"],
        ["5", "9", "B"], ["6", "7", "B"],
    ]  # fmt: skip
