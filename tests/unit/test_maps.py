"""Maps: to scale, bounded, whatever there is; what anybody chose is text in them, and a file is written whole."""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.drawn_maps import EVIL, SVG, check_html, check_svg

import vram
from vram.errors import AccessDeniedError, ClosedError, NotFoundError, UsageError
from vram.maps.drawing import MemoryMap, write_whole
from vram.maps.of_process import read_maps
from vram.maps.page import draw_page
from vram.maps.picture import KINDS, MOST_LANES, Lane, Picture, Row, Span, bounded, merged
from vram.maps.svg import draw_svg
from vram.markup import escape, printable, table
from vram.memory import Region

MIB = 1 << 20


def picture(*lanes: Lane, title: str = "t") -> Picture:
    return Picture(title, ("fact",), lanes)


# -- text of others ----------------------------------------------------------------------------------------------------
def test_text_of_others_is_text_in_every_place() -> None:
    """A name, a title, a fact, a note, a label of a row: none of them becomes markup, or a control character."""
    lane = Lane(EVIL, 100, (Row(EVIL, (Span(0, 60, "array", EVIL), Span(60, 100, "shared", EVIL))),), (EVIL,), 4096)
    all_evil = Picture(EVIL, (EVIL,), (lane,), (EVIL,))
    check_svg(draw_svg(all_evil))
    seen = check_html(draw_page(all_evil))
    assert "<script>alert(1)</script>" in seen.text  # as it was written, but nothing that a browser runs
    assert "<script" not in draw_page(all_evil).lower().replace("&lt;script", "")


def test_a_small_table_escapes_its_title_its_head_its_cells_and_its_facts() -> None:
    text = table(EVIL, (EVIL,), [(EVIL,)] * 30, facts=[EVIL], count=30)
    check_html(text)
    assert "and 10 more" in text


def test_an_attribute_cannot_be_left() -> None:
    for quote in "\"'":
        assert quote not in escape(f"a{quote}b")


def test_what_no_xml_may_have_is_a_question_mark() -> None:
    assert printable("a\x00\x1b\x85\u202e\ud800\ufffe\nb") == "a???????b"
    assert printable("日本 é ✓") == "日本 é ✓"
    assert len(printable("x" * 10_000)) == 200


# -- to scale, and bounded ---------------------------------------------------------------------------------------------
def test_a_bar_is_to_scale() -> None:
    lane = Lane("l", 4 * MIB, (Row("r", (Span(MIB, 3 * MIB, "array", "half"),)),))
    rectangles = {one.get("class"): one for one in check_svg(draw_svg(picture(lane))).iter(f"{SVG}rect")}
    bar, half = rectangles["vm-bar"], rectangles["vm-span vm-array"]
    whole = float(bar.get("width", 0))
    assert float(half.get("width", 0)) == pytest.approx(whole / 2, abs=0.02)
    assert float(half.get("x", 0)) - float(bar.get("x", 0)) == pytest.approx(whole / 4, abs=0.02)
    assert "left:25.0000%;width:50.0000%" in draw_page(picture(lane))


def test_many_views_in_one_place_are_called_that() -> None:
    many = tuple(Span(n * 100, n * 100 + 90, "view", "numpy view") for n in range(10_000))
    lane = Lane("l", MIB, (Row("used by", many),))
    for drawn in (draw_svg(picture(lane)), draw_page(picture(lane))):
        assert "10,000 arrays and views, 878.9 KiB together" in drawn


def test_ten_thousand_arrays_are_a_bounded_drawing_that_says_so() -> None:
    many = tuple(Span(n * 100, n * 100 + 90, "array", f"layer.{n}") for n in range(10_000))
    lane = Lane("l", MIB, (Row("arrays", many),))
    drawn, page = draw_svg(picture(lane)), draw_page(picture(lane))
    assert len(drawn) < 20_000
    assert "10,000 arrays, 878.9 KiB together" in drawn
    assert "10,000 arrays, 878.9 KiB together" in page
    assert page.count("<tr>") == 1001
    assert "and 9,000 more" in page


def test_what_is_wide_enough_is_drawn_alone_and_its_small_neighbours_together() -> None:
    small = [Span(n, n + 1, "array", f"s{n}") for n in range(100)]
    spans = [*small, Span(100, 500_000, "array", "large"), Span(500_000, 500_001, "array", "alone")]
    found = merged(spans, MIB, "arrays")
    assert [one.label for one in found] == ["100 arrays, 100 B together", "large", "alone"]
    assert [(one.start, one.stop, one.count) for one in found] == [
        (0, 100, 100),
        (100, 500_000, 1),
        (500_000, 500_001, 1),
    ]


def test_narrow_spans_of_alternating_kinds_are_bounded_as_well() -> None:
    spans = [Span(n, n + 1, ("mapped", "shared")[n % 2], str(n)) for n in range(50_000)]
    found = merged(spans, 50_000_000, "chunks")
    assert len(found) < 1000
    assert sum(one.count for one in found) == 50_000


def test_empty_spans_and_empty_lanes_are_no_mistake() -> None:
    lane = Lane("l", 0, (Row("r", (Span(0, 0, "array", "nothing"),)),))
    check_svg(draw_svg(picture(lane)))
    check_html(draw_page(picture(lane)))


def test_too_many_bars_are_left_out_and_counted() -> None:
    lanes = [Lane(f"l{n}", n, ()) for n in range(1, 201)]
    few = bounded(picture(*lanes))
    assert [lane.nbytes for lane in few.lanes] == list(range(201 - MOST_LANES, 201))
    assert few.notes[0].startswith("136 smaller bars")
    assert bounded(few) is few


def test_the_legend_has_what_is_drawn_and_nothing_else() -> None:
    lane = Lane("l", 10, (Row("r", (Span(0, 4, "asleep", "a"), Span(4, 10, "reserved", "b"))),))
    seen = check_html(draw_page(picture(lane))).text
    assert KINDS["asleep"] in seen
    assert KINDS["reserved"] in seen
    assert KINDS["array"] not in seen


def test_sizes_are_said_in_bytes_and_in_units() -> None:
    lane = Lane("l", 3 * MIB, (Row("r", (Span(0, 3 * MIB, "array", "w"),)),), (), 0x7F0000000000)
    for text in (draw_svg(picture(lane)), draw_page(picture(lane))):
        assert "3 MiB (3,145,728 bytes) at 0x7f0000000000" in text
        assert "prefers-color-scheme: dark" in text


# -- this process ------------------------------------------------------------------------------------------------------
@pytest.fixture
def array() -> Iterator[vram.Array]:
    with vram.zeros((3, MIB), "uint8", device="host", capacity=8) as made:
        yield made


def lane_at(drawn: MemoryMap, address: int) -> Lane:
    (found,) = [lane for lane in drawn._picture.lanes if lane.address == address]
    return found


def test_this_process_is_drawn_with_what_is_mapped_and_what_is_room(array: vram.Array) -> None:
    lane = lane_at(vram.memory_map(), array.address)
    (chunks,) = [row for row in lane.rows if row.label == "chunks"]
    assert [(one.start, one.stop, one.kind) for one in chunks.spans] == [
        (0, 4 * MIB, "mapped"),
        (4 * MIB, 8 * MIB, "reserved"),
    ]
    assert lane.nbytes == 8 * MIB


def test_a_view_is_drawn_where_it_looks(array: vram.Array) -> None:
    view = array[1].numpy()
    (used,) = [row for row in lane_at(vram.memory_map(array), array.address).rows if row.label == "used by"]
    assert (MIB, 2 * MIB, "view", "numpy view") in [(one.start, one.stop, one.kind, one.label) for one in used.spans]
    del view


def test_what_has_left_the_process_is_shared(array: vram.Array) -> None:
    pieces, _ = array.region.segments(0, MIB)
    with pieces[0]:
        assert pieces[0].export() >= 0  # lent
        (chunks,) = [row for row in lane_at(vram.memory_map(array), array.address).rows if row.label == "chunks"]
        assert chunks.spans[0].kind == "shared"


def test_what_is_asleep_is_drawn_as_that_and_its_array_says_so(array: vram.Array) -> None:
    array[0] = 7
    address = array.address
    vram.sleep(array, to=None)
    lane = lane_at(vram.memory_map(), address)
    assert lane.rows[0].spans[0] == Span(0, 3 * MIB, "asleep", "asleep, its bytes nowhere")
    assert "asleep, its bytes nowhere" in repr(array)
    assert "asleep, its bytes nowhere" in array._repr_html_()
    vram.wake(array)
    assert lane_at(vram.memory_map(array), address).rows[1].spans[0].kind == "mapped"


def test_much_room_is_said_and_not_drawn() -> None:
    with vram.zeros(4, "uint8", device="host", capacity=1 << 30) as large:
        lane = lane_at(vram.memory_map(large), large.address)
    assert lane.nbytes == max(span.stop for row in lane.rows for span in row.spans)
    assert any("not drawn: room to grow" in fact for fact in lane.facts)


def test_memory_without_arrays_is_drawn_too() -> None:
    with Region.create("host", capacity="8MiB", nbytes="2MiB") as region:
        lane = lane_at(vram.memory_map(), region.address)
        assert [(one.start, one.stop, one.kind) for one in lane.rows[0].spans] == [
            (0, 2 * MIB, "mapped"),
            (2 * MIB, 8 * MIB, "reserved"),
        ]
        assert lane_at(vram.memory_map(region), region.address).title == "region on host"


def test_what_is_closed_is_refused(array: vram.Array) -> None:
    array.close()
    with pytest.raises(ClosedError):
        vram.memory_map(array)


@pytest.mark.parametrize("what", [True, 1.5, b"x", [], 0, -1, 2**31])
def test_what_cannot_be_drawn_is_named(what: object) -> None:
    with pytest.raises(UsageError, match=r"process|of an entry"):
        vram.memory_map(what)  # type: ignore[arg-type]


@pytest.mark.standin
def test_memory_on_a_gpu_is_drawn_and_its_elements_are_not_looked_at() -> None:
    with (
        vram.zeros((4, MIB), "uint8", device="cuda:0", capacity=8) as awake,
        vram.zeros(6 * MIB, "uint8", device="cuda:0") as asleep,
    ):
        vram.sleep(asleep, to=None)
        drawn = vram.memory_map()
        (chunks,) = lane_at(drawn, awake.address).rows
        assert [one.kind for one in chunks.spans] == ["mapped", "reserved"]
        assert [one.kind for one in lane_at(drawn, asleep.address).rows[0].spans] == ["asleep"]
        assert repr(awake).endswith(" 4 MiB rw>")
        assert "not for the CPU to see" in awake._repr_html_()
        vram.wake(asleep)


# -- another process ---------------------------------------------------------------------------------------------------
MAPS = b"""\
7f0000000000-7f0000400000 rw-s 00000000 00:01 77 /memfd:vram (deleted)
7f0000400000-7f0000800000 r--s 00000000 00:01 78 /memfd:vram (deleted)
7f0000800000-7f0001000000 ---p 00000000 00:00 0
7f0001000000-7f0001001000 rw-p 00000000 00:00 0
7f0002000000-7f0002200000 rw-p 00000000 00:01 79 /memfd:vram (deleted)
7f0003000000-7f0003200000 rw-s 00000000 00:01 80 /memfd:other (deleted)
7f0003200000-7f0003400000 ---p 00000000 00:00 0
7f0004000000-7f0004200000 r-xp 00000000 08:01 9 /usr/lib/a b.so
nonsense
"""


def test_the_memory_of_another_process_is_read_off_its_maps() -> None:
    first, second = read_maps(MAPS)
    assert [(one.start, one.stop, one.rights) for one in first.mapped] == [
        (0x7F0000000000, 0x7F0000400000, "rw-s"),
        (0x7F0000400000, 0x7F0000800000, "r--s"),
    ]
    assert first.stop == 0x7F0001000000
    assert (second.mapped[0].identity, second.stop) == ((b"00:01", 79), 0x7F0002200000)


@pytest.mark.parametrize("text", [b"", b"\xff\xfe\n", b"1-2 rw-s 0 0 7 /memfd:vram (deleted)\n" * 3, MAPS[:90]])
def test_maps_that_are_none_are_no_mistake(text: bytes) -> None:
    assert len(read_maps(text)) <= 3


def test_a_process_that_is_not_there_or_has_nothing_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VRAM_KEEPER", str(tmp_path / "none.sock"))
    with pytest.raises(NotFoundError, match="no process 4194305"):
        vram.memory_map(4194305)
    # Who is not allowed to look is told that.
    with pytest.raises((NotFoundError, AccessDeniedError), match=r"has no host memory of vram|belongs to another user"):
        vram.memory_map(1)


# -- files -------------------------------------------------------------------------------------------------------------
def test_a_map_is_saved_by_the_name_of_its_file(array: vram.Array, tmp_path: Path) -> None:
    drawn = vram.memory_map(array)
    for name in ("a.svg", "a.html"):
        drawn.save(tmp_path / name)
    check_svg((tmp_path / "a.svg").read_text())
    check_html((tmp_path / "a.html").read_text())
    assert sorted(os.listdir(tmp_path)) == ["a.html", "a.svg"]
    assert drawn._repr_html_() == drawn.svg()
    assert re.fullmatch(r"<MemoryMap of array uint8 \(3, 1048576\), 1 bar, 8 MiB>", repr(drawn))
    with pytest.raises(UsageError, match=r"\.svg or \.html"):
        drawn.save(tmp_path / "a.png")


def test_a_file_is_replaced_whole_with_the_rights_of_a_new_one(tmp_path: Path) -> None:
    file = tmp_path / "m.svg"
    file.write_text("old" * 1000)
    (tmp_path / "link.svg").symlink_to(file)
    write_whole(str(tmp_path / "link.svg"), "new")
    assert file.read_text() == "new"
    assert (tmp_path / "link.svg").is_symlink()
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("name", ["missing/m.svg", "directory", "pipe"])
def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path, name: str) -> None:
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises((OSError, UsageError)):
        write_whole(str(tmp_path / name), "new")
    assert sorted(os.listdir(tmp_path)) == ["directory", "pipe"]


def test_what_fails_in_the_middle_leaves_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "m.svg"
    file.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(str(file), "new" * 100_000 + "\ud800")
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["m.svg"]


# -- what is shown of an array -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (np.arange(3, dtype="int16"), "[0 1 2]"),
        (np.arange(6), "[0 1 2 3 4 5]"),
        (np.arange(100).reshape(10, 10), "[0 1 2 ... 97 98 99]"),
        (np.float32(2.5), "[2.5]"),
        (np.array(["<b>", "&"]), "['<b>' '&']"),
        (np.array([b"<b>\0"]), "[b'<b>']"),
        (np.array([True, False]), "[True False]"),
        (np.array([1 + 2j, 1e-9]), "[1+2j 1e-09+0j]"),
        (np.array(["2026-11-24"], "datetime64[D]"), "[2026-11-24]"),
        (np.array([(1, 2.5)], [("a", "i4"), ("b", "f4")]), "[(1, 2.5)]"),
        (np.zeros((0, 4)), "[]"),
    ],
)
def test_an_array_shows_its_first_and_last_elements(values: np.ndarray, shown: str) -> None:
    with vram.asarray(values, device="host") as array:
        assert repr(array).endswith(f" rw {shown}>")
        seen = check_html(array._repr_html_())
        assert shown in seen.text
        assert not [pin for pin in array.region.pinned_by() if "repr" in pin]


@pytest.mark.parametrize("byte", [0, 0x7F, 0xFF])
def test_any_bytes_of_any_type_are_shown_without_an_error(byte: int) -> None:
    names = "bool int8 float16 complex128 longdouble datetime64[s] timedelta64[D] S5 U3 V6 bfloat16 float8_e4m3fn int4"
    for name in names.split():
        with vram.empty(9, name, device="host") as array:
            array.region.driver.fill(array.address, byte, array.nbytes)
            assert repr(array).startswith("<Array ")
            check_html(array._repr_html_())


def test_a_closed_array_says_so(array: vram.Array) -> None:
    array.close()
    assert "closed" in array._repr_html_()
    check_html(array._repr_html_())


def test_an_array_without_access_shows_no_elements() -> None:
    with (
        Region.create("host", capacity="2MiB", nbytes="2MiB", access=vram.Access.NONE) as region,
        vram.Array(region, "uint8", 4) as array,
    ):
        assert repr(array).endswith(" 4 B ->")


def test_to_print_an_array_while_it_is_put_to_sleep_touches_nothing_that_is_not_there() -> None:
    """A view would be touched after its memory is gone, which ends the process."""
    with vram.zeros(2 * MIB, "uint8", device="host") as array:
        ends = threading.Event()
        seen: set[str] = set()

        def look() -> None:
            while not ends.is_set():
                seen.add(repr(array).partition(" rw")[2])

        thread = threading.Thread(target=look)
        thread.start()
        try:
            for _ in range(100):
                vram.sleep(array, to=None)
                vram.wake(array)
        finally:
            ends.set()
            thread.join()
    shown = re.compile(r" \[0 0 0 \.\.\. 0 0 0\]>|>|, (falling asleep|asleep, its bytes nowhere|waking)>")
    assert [one for one in seen if not shown.fullmatch(one)] == []
