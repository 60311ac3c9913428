"""What two measurements of a keeper say together, and what is drawn of that, without a keeper or a terminal."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from vram.cli.top import Looks, draw, keys_in
from vram.keeper.messages import DeviceRow, EntryRow, Measurements, RequestRow, UserRow
from vram.keeper.reports import HolderInfo, StatisticsInfo
from vram.metrics.rates import History, rates, shape
from vram.metrics.watch import KEYS, View, Wanted

BOUNDS = [1e-3, 2e-3, 4e-3]


def done(uptime: float, **kinds: list[int]) -> Measurements:
    rows = [RequestRow(kind, sum(buckets), 0.0, buckets, {}) for kind, buckets in kinds.items()]
    return Measurements(1, uptime, 0.0, 0, BOUNDS, rows, [], [])


def test_rates_are_differences_over_the_time_between() -> None:
    before, after = done(10.0, attach=[100, 0, 0, 0]), done(12.0, attach=[100, 8, 0, 0], publish=[2, 0, 0, 0])
    found = rates(before, after, 2.0)
    assert (found["attach"].per_second, found["publish"].per_second, found[""].per_second) == (4.0, 1.0, 5.0)


def test_quantiles_lie_within_their_bucket_in_proportion() -> None:
    found = rates(done(1.0, attach=[7, 0, 0, 0]), done(2.0, attach=[7, 50, 50, 0]), 1.0)["attach"]
    assert found.median == pytest.approx(2e-3)  # all of the second bucket is half of them
    assert found.high == pytest.approx(2e-3 + 2e-3 * 49 / 50)
    quarter = rates(None, done(1.0, attach=[4, 0, 0, 0]), 1.0)["attach"]
    assert quarter.median == pytest.approx(0.5e-3)


def test_what_took_longer_than_the_last_bound_is_beyond_all() -> None:
    found = rates(None, done(1.0, attach=[1, 0, 0, 1]), 1.0)["attach"]
    assert (found.median, found.high) == (1e-3, math.inf)


def test_without_requests_there_is_no_latency() -> None:
    found = rates(done(1.0, attach=[5, 0, 0, 0]), done(2.0, attach=[5, 0, 0, 0]), 1.0)["attach"]
    assert (found.per_second, found.median, found.high) == (0.0, None, None)


@pytest.mark.parametrize(
    "after",
    [
        done(2.0, attach=[4, 0, 0, 0]),  # it began a moment ago
        done(90.0, attach=[4, 0, 0, 0]),  # it has done less
        done(90.0, publish=[4, 0, 0, 0]),  # it has never done what the other did
    ],
)
def test_another_keeper_counts_from_its_own_start(after: Measurements) -> None:
    found = rates(done(50.0, attach=[100, 0, 0, 0]), after, 1.0)
    assert found[""].per_second == pytest.approx(4 / after.uptime)
    assert all(rate.per_second >= 0 for rate in found.values())


def test_errors_are_counted_by_second() -> None:
    row = RequestRow("attach", 10, 0.0, [10, 0, 0, 0], {"NotFoundError": 4, "QuotaError": 2})
    after = Measurements(1, 3.0, 0.0, 0, BOUNDS, [row], [], [])
    found = rates(done(1.0, attach=[4, 0, 0, 0]), after, 2.0)
    assert found["attach"].errors == found[""].errors == 3.0


def test_a_history_keeps_the_last_values_of_what_is_still_there() -> None:
    history = History(3)
    for number in range(5):
        history.add({"a": number, "b": 1.0} if number < 4 else {"a": number})
    assert history.of("a") == (2, 3, 4)
    assert history.of("b") == ()


def test_shapes_reach_from_nothing_to_the_largest() -> None:
    assert shape([0, 1, 50, 100], 10) == "▁▂▅█"
    assert shape([0, 1, 50, 100], 2) == "▅█"
    assert shape([0, 0], 5) == "▁▁"
    assert shape([], 5) == shape([1], 0) == ""
    assert shape([0, 100], 2, plain=True).isascii()


# -- the screen -------------------------------------------------------------------------------------------------------
NASTY = "a\x1b[2J\n[red]b[/red]\x07\u202e名"


def row(name: str = "weights/a", **changes: object) -> EntryRow:
    fields: dict[str, object] = {
        "name": name, "version": 3, "owner": 1000, "nbytes": 5 << 30, "segments": 1, "writable": False, "readers": 1,
        "retired": 0, "age": 90.0,
        "ttl_left": None, "meta": {}, "leases": 2, "held_bytes": 5 << 30, "devices": ["GPU-01234567-89ab"],
    }  # fmt: skip
    return EntryRow(**(fields | changes))  # type: ignore[arg-type]


HELD = StatisticsInfo(
    pid=7, uptime=10.0, entries=1, versions=1, leases=2, connections=3, waiting=0, nbytes=5 << 30, descriptors=1,
    max_bytes=None, max_entries=None, max_descriptors=100, stuck=0,
)  # fmt: skip


def view(*rows: EntryRow, **changes: object) -> View:
    history = History(9)
    history.add({"attach": 1.0})
    fields: dict[str, object] = {
        "wanted": Wanted(), "rows": rows, "known": len(rows), "is_whole": True, "held": HELD, "history": history,
        "users": [UserRow(1000, 5 << 30, 1, 1, 2, 1), UserRow(None, 1, 1, 1, 1, 1)],
        "devices": [DeviceRow("GPU-01234567-89ab", 5 << 30, 1), DeviceRow("host", 0, 1)],
    }  # fmt: skip
    return View(**(fields | changes))  # type: ignore[arg-type]


def drawn(seen: View, looks: Looks, width: int, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        console.print(draw(seen, looks, width, height, path="/run/k.sock"), end="")
    text = capture.get()
    assert all(c.isprintable() or c == "\n" for c in text)
    return text.removesuffix("\n").split("\n")


@pytest.mark.parametrize("mode", ["", "help", "filter", "revoke"])
@pytest.mark.parametrize("width", [1, 8, 40, 59, 80, 99, 100, 250])
@pytest.mark.parametrize("height", [1, 2, 5, 12, 24, 60])
def test_every_size_and_mode_is_filled_and_not_overflowed(width: int, height: int, mode: str) -> None:
    from rich.cells import cell_len

    looks = Looks(selected=NASTY, mode=mode, doomed=NASTY, typed=NASTY)
    holder = HolderInfo(1, 2, 3, NASTY, "read", 1.0, NASTY, 1, 1)
    for opened in ("", NASTY):
        seen = view(row(NASTY), row(), wanted=Wanted(opened=opened), holders=[holder] * 9, trouble="")
        lines = drawn(seen, looks, width, height)
        assert len(lines) == height
        assert max(map(cell_len, lines)) <= width


def test_words_of_others_are_words() -> None:
    text = "\n".join(drawn(view(row(NASTY, devices=[NASTY])), Looks(), 120, 30))
    assert "[red]b[/red]" in text


def test_columns_go_where_there_is_room_and_all_are_keys() -> None:
    def titles(width: int) -> str:
        return next(line for line in drawn(view(row()), Looks(), width, 30) if line.startswith("name"))

    assert all(key in titles(120) for key in KEYS)
    assert all(key in titles(80) for key in ("name", "version", "size", "leases", "device", "age", "state"))
    assert all(key in titles(40) for key in ("name", "size", "leases"))
    assert "device" not in titles(40)


def test_states_of_entries_are_told() -> None:
    text = "\n".join(drawn(view(row(parked=True), row(updatable=True), row(writable=True), row()), Looks(), 120, 40))
    assert [text.count(word) for word in ("parked", "updatable", "rw")] == [1, 1, 1]
    for width in (80, 100, 116):
        assert "updatable" in "\n".join(drawn(view(row(updatable=True)), Looks(selected="weights/a"), width, 40))


def test_trouble_is_said_above_what_was_seen_last() -> None:
    lines = drawn(view(row(), trouble="no keeper at /run/k.sock"), Looks(), 120, 30)
    assert "(as it was seen last) no keeper at /run/k.sock" in lines[0]
    assert any("weights/a" in line for line in lines)


def test_a_question_is_about_the_entry_that_was_selected_then() -> None:
    assert "revoke b? y: yes" in drawn(view(row("a")), Looks(selected="a", mode="revoke", doomed="b"), 80, 24)[-1]


@pytest.mark.parametrize(
    ("read", "keys"),
    [
        (b"q", ["q"]),
        (b"\x1b[A\x1b[Bj", ["up", "down", "j"]),
        (b"\x1bOA\x1b[5~\x1b[6~", ["up", "page up", "page down"]),
        (b"\x1b[H\x1b[F\x1b[1~\x1b[4~", ["home", "end", "home", "end"]),
        (b"\r\x7f", ["enter", "back"]),
        (b"\x1b", ["escape"]),
        (b"\x1b[15~q", ["q"]),
        (b"\x1b[1;5Ay", ["y"]),
        (b"\xff", ["\xff"]),
        (b"\x1b[", []),
    ],
)
def test_keys_are_told_from_what_a_terminal_sends(read: bytes, keys: list[str]) -> None:
    assert list(keys_in(read)) == keys
