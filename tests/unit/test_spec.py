"""Places, rights and sizes, as people write them."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram.errors import UsageError
from vram.spec import (
    HOST,
    Access,
    AllocationFlags,
    AllocationSpec,
    HandleKind,
    Location,
    format_count,
    format_size,
    parse_size,
    round_up,
)

UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"


@pytest.mark.parametrize(
    ("text", "location"),
    [
        ("host", HOST),
        ("cuda:0", Location("cuda", 0)),
        ("cuda:15", Location("cuda", 15)),
        (f"cuda:{UUID}", Location("cuda", UUID)),
    ],
)
def test_places(text, location):
    assert Location.parse(text) == location
    assert Location.parse(location) is location
    assert str(location) == text
    assert hash(Location.parse(text)) == hash(location)


@pytest.mark.parametrize(
    "bad", ["", "cpu", "cuda", "cuda:", "cuda:-1", "cuda:\u0663", "cuda:x", "host:0", " host", "cuda:GPU-1", 0, None]
)
def test_no_places(bad):
    with pytest.raises(UsageError, match='is not one of "host", "cuda:0"'):
        Location.parse(bad)


def test_counts_are_written_as_people_do():
    assert [format_count(n, "name") for n in (0, 1, 2)] == ["0 names", "1 name", "2 names"]
    assert [format_count(n, "entry", "entries") for n in (1, 2)] == ["1 entry", "2 entries"]


@pytest.mark.parametrize(
    ("elsewhere", "here"),
    [
        ("cpu", "host"),
        ("CPU", "host"),
        ("cpu:0", "host"),
        ("cuda", "cuda:0"),
        ("gpu", "cuda:0"),
        ("gpu:3", "cuda:3"),
        ("cuda1", "cuda:1"),
    ],
)
def test_what_other_libraries_call_a_device_gets_a_hint(elsewhere, here):
    with pytest.raises(UsageError, match=f"for '{elsewhere}' write \"{here}\"$"):
        Location.parse(elsewhere)
    with pytest.raises(UsageError, match=r'"cuda:GPU-<uuid>"$'):
        Location.parse("xpu:0")


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        (0, 0),
        (2**63 - 1, 2**63 - 1),
        ("0", 0),
        ("123", 123),
        ("123B", 123),
        ("64MiB", 64 << 20),
        (" 64 mib ", 64 << 20),
        ("1.5GiB", 3 << 29),
        ("90MB", 90_000_000),
        ("0.5kB", 500),
        ("1.000001MB", 1_000_001),
        ("7PiB", 7 << 50),
        ("9007199254740993", 2**53 + 1),  # which no float can say
    ],
)
def test_sizes(written, nbytes):
    assert parse_size(written) == nbytes


@pytest.mark.parametrize(
    "bad", ["", "MiB", "1XB", "-1", "1e9", "1.5", "0.3KiB", "1 2", "1_000", "1" * 70, -1, 2**63, 1.0, None, True, b"1"]
)
def test_no_sizes(bad):
    with pytest.raises(UsageError, match="capacity"):
        parse_size(bad, what="capacity")


def test_integers_of_other_libraries_are_sizes():
    class Index:
        def __index__(self) -> int:
            return 42

    assert parse_size(Index()) == 42


@given(st.integers(0, 2**63 - 1))
def test_every_size_survives_being_written_out(nbytes):
    assert parse_size(str(nbytes)) == nbytes
    assert parse_size(f"{nbytes}B") == nbytes


@given(st.text(max_size=80))
def test_no_text_breaks_the_parsers(text):
    for parse in (parse_size, Location.parse):
        with contextlib.suppress(UsageError):
            parse(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (384, "384 B"), (1024, "1 KiB"), (6 << 20, "6 MiB"), (90_000_000, "85.8 MiB"), (5 << 40, "5 TiB")],
)
def test_sizes_for_people(nbytes, text):
    assert format_size(nbytes) == text


@given(st.integers(0, 2**62), st.integers(1, 2**40))
def test_round_up(value, multiple):
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert value <= rounded < value + multiple


def test_rights_and_kinds_have_the_values_of_the_cuda_driver():
    assert [(int(access), access.letters) for access in Access] == [(0, "-"), (1, "r"), (3, "rw")]
    assert [int(kind) for kind in (HandleKind.POSIX_FD, HandleKind.WIN32, HandleKind.WIN32_KMT, HandleKind.FABRIC)] == [
        1,
        2,
        4,
        8,
    ]
    assert AllocationSpec(5) == AllocationSpec(5, HOST, HandleKind.POSIX_FD, AllocationFlags.NONE)


def test_allocation_flags_are_the_bytes_that_the_driver_reads():
    assert [int(flag) for flag in AllocationFlags] == [1, 0x100, 0x10000, 0x20000]
    assert AllocationFlags.NONE == 0
