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
from vram.maps.drawing import KINDS, MOST_LANES, Lane, MemoryMap, Span, write_whole
from vram.maps.process import read_maps
from vram.markup import escape, table
from vram.memory import Region
from vram.spec import printable

MIB = 1 << 20


def lane(*spans: Span, row: str = "arrays", title: str = "l", used: int = MIB) -> Lane:
    return Lane(title, {row: list(spans)}, used=used)


def both(*lanes: Lane) -> tuple[str, str]:
    drawn = MemoryMap("t", ["fact"], lanes)
    check_svg(drawn.svg())
    check_html(drawn.html())
    return drawn.svg(), drawn.html()


# -- text of others ----------------------------------------------------------------------------------------------------
def test_text_of_others_is_text_in_every_place() -> None:
    """A name, a title, a fact, a label of a row: none of them becomes markup, or a control character."""
    spans = [Span(0, 60, "array", EVIL), Span(60, 100, "shared", EVIL)]
    drawn = MemoryMap(EVIL, [EVIL], [Lane(EVIL, {EVIL: spans}, [EVIL], used=100, address=4096)])
    check_svg(drawn.svg())
    assert "<script>alert(1)</script>" in check_html(drawn.html()).text  # as it was written, but nothing that is run


def test_a_small_table_escapes_its_title_its_head_its_cells_and_its_facts() -> None:
    text = table(EVIL, (EVIL,), [(EVIL,)] * 30, facts=[EVIL], count=30)
    check_html(text)
    assert "and 10 more" in text


def test_printable_replaces_what_no_xml_may_have_and_escape_leaves_no_quotes() -> None:
    assert printable("a\x00\x1b\x85\u202e\ud800\ufffe\nb") == "a???????b"
    assert printable("日本 é ✓") == "日本 é ✓"
    assert len(escape("x" * 10_000)) == 200
    assert not set("\"'") & set(escape("a\"b'"))


# -- to scale, and bounded ---------------------------------------------------------------------------------------------
def test_a_span_is_to_scale_with_its_name_and_its_size() -> None:
    for text in both(lane(Span(MIB, 3 * MIB, "array", "half"), used=4 * MIB)):
        assert 'x="25.0000%" width="50.0000%"' in text
        assert "half · 2 MiB" in text
        assert "half: 2 MiB (2,097,152 bytes) at offset 1,048,576" in text
        assert "prefers-color-scheme:dark" in text


def test_spans_of_each_kind_are_drawn_in_order_and_the_legend_names_these_kinds_alone() -> None:
    spans = [Span(at * 100, at * 100 + 100, kind, f"<{at}>") for at, kind in enumerate(KINDS)]
    root = check_svg(MemoryMap("t", [], [lane(*spans, used=1000)]).svg())
    labels = [one.text for one in root.iter(f"{SVG}text") if one.get("class") == "vm-label"]
    assert labels == [f"<{at}> · 100 B" for at in range(len(KINDS))]
    svg, _ = both(lane(Span(0, 4, "asleep", "a"), Span(4, 10, "reserved", "b")))
    assert [kind for kind, (meaning, _) in KINDS.items() if meaning in svg] == ["asleep", "reserved"]


def test_ten_thousand_arrays_are_a_bounded_drawing_that_says_so() -> None:
    svg, page = both(lane(*(Span(n * 100, n * 100 + 90, "array", f"layer.{n}") for n in range(10_000))))
    assert len(svg) < 20_000
    assert "10,000 arrays" in svg
    assert page.count("<tr>") == 1001
    assert "and 9,000 more" in page


def test_too_many_bars_or_facts_are_left_out_and_counted() -> None:
    few = MemoryMap("t", [f"f{n}" for n in range(50)], [lane(used=n) for n in range(1, 201)])
    assert [one.nbytes for one in few.lanes] == list(range(201 - MOST_LANES, 201))
    assert few.facts[-2:] == ["and 34 more", "136 smaller bars of 9.1 KiB together: left out of the drawing"]


# -- this process ------------------------------------------------------------------------------------------------------
@pytest.fixture
def array() -> Iterator[vram.Array]:
    with vram.zeros((3, MIB), "uint8", device="host", capacity=8) as made:
        yield made


def lane_at(drawn: MemoryMap, address: int) -> Lane:
    (found,) = [lane for lane in drawn.lanes if lane.address == address]
    return found


def kinds(spans: list[Span]) -> list[tuple[int, int, str]]:
    return [(one.start // MIB, one.stop // MIB, one.kind) for one in spans]


def test_this_process_is_drawn_with_what_is_mapped_and_what_is_room(array: vram.Array) -> None:
    with Region.create("host", capacity="8MiB", nbytes="2MiB") as region:  # without arrays
        drawn = vram.memory_map()
        assert kinds(lane_at(drawn, array.address).rows["chunks"]) == [(0, 4, "mapped"), (4, 8, "reserved")]
        assert kinds(lane_at(drawn, region.address).rows["mappings"]) == [(0, 2, "mapped"), (2, 8, "reserved")]
        assert lane_at(vram.memory_map(region), region.address).title == "region on host"


def test_memory_that_has_left_the_process_is_shared(array: vram.Array) -> None:
    pieces, _ = array.region.segments(0, MIB)
    with pieces[0]:
        assert pieces[0].export() >= 0  # lent
        assert lane_at(vram.memory_map(array), array.address).rows["chunks"][0].kind == "shared"


def test_memory_asleep_is_drawn_as_that_and_its_array_says_so(array: vram.Array) -> None:
    array[0] = 7
    address = array.address
    vram.sleep(array, to=None)
    chunks = lane_at(vram.memory_map(), address).rows["chunks"]
    assert chunks[0] == Span(0, 3 * MIB, "asleep", "asleep, its bytes nowhere")
    assert "asleep, its bytes nowhere" in repr(array)
    assert "asleep, its bytes nowhere" in array._repr_html_()
    vram.wake(array)
    assert lane_at(vram.memory_map(array), address).rows["chunks"][0].kind == "mapped"


def test_a_closed_array_and_other_objects_are_refused(array: vram.Array) -> None:
    array.close()
    with pytest.raises(ClosedError):
        vram.memory_map(array)
    for what in (True, 1.5, b"x", [], 0, -1, 2**31):
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
        assert [one.kind for one in lane_at(drawn, awake.address).rows["chunks"]] == ["mapped", "reserved"]
        assert [one.kind for one in lane_at(drawn, asleep.address).rows["chunks"]] == ["asleep"]
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


def test_memory_of_this_library_and_the_room_behind_it_are_read_off_proc_maps() -> None:
    assert read_maps(MAPS) == [
        [
            (0x7F0000000000, 0x7F0000400000, "rw-s", b"00:01 77"),
            (0x7F0000400000, 0x7F0000800000, "r--s", b"00:01 78"),
            (0x7F0000800000, 0x7F0001000000, "---p", None),
        ],
        [(0x7F0002000000, 0x7F0002200000, "rw-p", b"00:01 79")],
    ]


@pytest.mark.parametrize("text", [b"", b"\xff\xfe\n", b"1-2 rw-s 0 0 7 /memfd:vram (deleted)\n" * 3, MAPS[:90]])
def test_maps_that_are_none_are_no_mistake(text: bytes) -> None:
    assert len(read_maps(text)) <= 3


def test_a_process_that_is_not_there_or_has_nothing_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VRAM_KEEPER", str(tmp_path / "none.sock"))
    with pytest.raises(NotFoundError, match="no process 4194305"):
        vram.memory_map(4194305)
    # Without leave to look, the error says that.
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
    assert repr(drawn) == "<MemoryMap of array uint8 (3, 1048576), 1 bar, 8 MiB>"
    with pytest.raises(UsageError, match=r"\.svg or \.html"):
        drawn.save(tmp_path / "a.png")


def test_a_file_is_replaced_whole_with_the_rights_of_a_new_one(tmp_path: Path) -> None:
    file = tmp_path / "m.svg"
    file.write_text("old" * 1000)
    write_whole(str(file), "new")
    assert file.read_text() == "new"
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask
    with pytest.raises(UnicodeEncodeError):  # in the middle
        write_whole(str(file), "newer" * 100_000 + "\ud800")
    assert file.read_text() == "new"
    assert os.listdir(tmp_path) == ["m.svg"]


@pytest.mark.parametrize("name", ["missing/m.svg", "directory", "pipe", "link"])
def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path, name: str) -> None:
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("directory/target")  # of this user or another one: a link is not followed
    with pytest.raises((FileNotFoundError, UsageError)):
        write_whole(str(tmp_path / name), "new")
    assert sorted(os.listdir(tmp_path)) == ["directory", "link", "pipe"]
    assert os.listdir(tmp_path / "directory") == []


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
        Region.create("host", capacity="2MiB", nbytes="2MiB", access=vram.memory.Access.NONE) as region,
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
