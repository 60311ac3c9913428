"""A log of records: what was decided is read again, what was changed or cut is refused, who ends keepers is found."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from vram.errors import ProtocolError
from vram.keeper.record_log import DIGEST, GIVEN, HAND, SPARE, TAKEN, RecordLog

PAGE = mmap.PAGESIZE
CAPACITY = 1 << 30
KIND = 7
BASE = b"the books"
BODIES = [b"head %d" % index + b"rest" * index for index in range(5)]
END_WORD = 2  # of the words at the beginning: where the log ends


@pytest.fixture
def log() -> Iterator[RecordLog]:
    with closing(RecordLog.new(BASE, 1)) as made:
        for body in BODIES:
            made.append(KIND, body)
        yield made


def read(log: RecordLog) -> list[tuple[int, bytes]]:
    """Return what the next keeper finds."""
    with closing(RecordLog(os.dup(log.fd))) as again:
        assert (again.base, again.begin, again.end, again.capacity) == (log.base, log.begin, log.end, log.capacity)
        return list(again.records())


def ends(log: RecordLog) -> list[int]:
    """Return where each record ends."""
    found, at = [], log.begin
    for body in BODIES:
        at += 12 + len(body)
        found.append(at)
    return found


def test_what_was_written_is_read_again(log: RecordLog) -> None:
    assert read(log) == [(KIND, body) for body in BODIES]
    assert (log.base, log.begin, log.end) == (BASE, 4096 + len(BASE), ends(log)[-1])
    assert log.nbytes == sum(12 + len(body) for body in BODIES)
    assert read(log) == list(log.records())


def test_what_is_written_after_reading_is_read_again(log: RecordLog) -> None:
    with closing(RecordLog(os.dup(log.fd))) as again:
        assert len(list(again.records())) == 5
        again.append(KIND + 1, b"one more")
        expected = [*((KIND, body) for body in BODIES), (KIND + 1, b"one more")]
        assert list(again.records()) == expected
        assert read(again) == expected


def test_an_empty_log_has_no_record() -> None:
    with closing(RecordLog.new(b"", 4)) as log:
        assert (read(log), log.base, log.nbytes, log.generation) == ([], b"", 0, 4)


def test_its_descriptor_is_not_inherited_and_closed_once(log: RecordLog) -> None:
    assert not os.get_inheritable(log.fd)
    assert "vram-log" in os.readlink(f"/proc/self/fd/{log.fd}")
    fd = log.fd
    log.close()
    log.close()
    assert log.fd == -1
    with pytest.raises(OSError, match=r"^\[Errno 9\]"):
        os.fstat(fd)


def test_there_is_room_until_the_spare_part() -> None:
    with closing(RecordLog.new(b"", 1)) as log:
        assert os.fstat(log.fd).st_size == log.capacity == CAPACITY
        log.end = log.capacity - SPARE - 1
        assert log.has_room
        log.end += 1
        assert not log.has_room


@pytest.mark.parametrize("nbytes", [4 * PAGE, 4 * PAGE - 1])
def test_a_large_base_has_a_larger_log(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr("vram.keeper.record_log.CAPACITY", PAGE)  # that of the module takes a base of 250 MB
    with closing(RecordLog.new(bytes(nbytes), 1)) as log:
        least = 4 * nbytes + 2 * SPARE
        assert least <= log.capacity < least + PAGE
        assert log.capacity % PAGE == 0
        assert log.has_room


def test_a_record_without_room_is_not_written(log: RecordLog) -> None:
    before = log.end
    log.end = log.capacity - 11
    with pytest.raises((ValueError, IndexError)):
        log.append(KIND, b"")
    assert log.end == log.capacity - 11
    log.end = before
    log.append(KIND, b"goes on")
    assert read(log)[-1] == (KIND, b"goes on")


def test_a_record_that_was_not_finished_was_never_decided(log: RecordLog) -> None:
    """The last one may have been written up to any byte: the end is moved after that, in one store."""
    whole, end = read(log), log.end
    log.append(KIND, b"the last of all")
    stop = log.end
    torn = bytes(log._memory[end:stop])
    for count in range(len(torn)):
        log._memory[end:stop] = torn[:count] + bytes(len(torn) - count)
        log.end = log.words[END_WORD] = end
        assert read(log) == whole
    log._memory[end:stop] = torn
    log.end = log.words[END_WORD] = stop
    assert read(log) == [*whole, (KIND, b"the last of all")]


def test_a_log_that_was_changed_anywhere_is_refused(log: RecordLog) -> None:
    for at in range(log.begin, log.end):
        log._memory[at] ^= 0x40
        with pytest.raises(ProtocolError, match=r"changed|cut"):
            read(log)
        log._memory[at] ^= 0x40
    for at in range(4096, log.begin):
        log._memory[at] ^= 0x40
        with pytest.raises(ProtocolError, match=r"the books at the beginning .* changed"):
            RecordLog(os.dup(log.fd))
        log._memory[at] ^= 0x40
    assert len(read(log)) == 5


def test_records_that_changed_places_are_refused() -> None:
    with closing(RecordLog.new(BASE, 1)) as log:
        first = log.end
        log.append(KIND, b"one")
        middle = log.end
        log.append(KIND, b"two")
        one, two = bytes(log._memory[first:middle]), bytes(log._memory[middle : log.end])
        log._memory[first : log.end] = two + one
        with pytest.raises(ProtocolError, match=f"a record at {first} of the log is not as it was written"):
            read(log)


def test_a_log_that_was_cut_is_refused(log: RecordLog) -> None:
    whole = ends(log)
    for end in range(log.begin + 1, log.end):
        log.words[END_WORD] = end
        with closing(RecordLog(os.dup(log.fd))) as again:
            if end in whole:
                assert len(list(again.records())) == whole.index(end) + 1
            else:
                begin = max([log.begin, *(one for one in whole if one < end)])
                with pytest.raises(ProtocolError, match=f"cut at {begin}, in the middle of a record"):
                    list(again.records())


@pytest.mark.parametrize("nbytes", [0, 100, PAGE - 1, PAGE + 1])
def test_what_is_no_whole_log_is_refused(nbytes: int) -> None:
    short = os.memfd_create("short")
    os.ftruncate(short, nbytes)
    with pytest.raises(ProtocolError, match=f"has {nbytes} bytes: it was cut"):
        RecordLog(short)
    with pytest.raises(OSError, match=rf"\[Errno {errno.EBADF}\]"):
        os.fstat(short)  # it was owned from then on


@pytest.mark.parametrize("word", [0, 1])
def test_what_is_no_log_or_one_of_another_version_is_refused(log: RecordLog, word: int) -> None:
    log.words[word] += 1
    with pytest.raises(ProtocolError, match="is none, or one of another version"):
        RecordLog(os.dup(log.fd))


@pytest.mark.parametrize(
    ("word", "value"),
    [(END_WORD, 4096 + len(BASE) - 1), (END_WORD, 0), (END_WORD, CAPACITY + 1), (3, CAPACITY), (3, 1 << 40)],
)
def test_a_log_that_ends_nowhere_is_refused(log: RecordLog, word: int, value: int) -> None:
    log.words[word] = value
    with pytest.raises(ProtocolError, match="before it begins: it was changed"):
        RecordLog(os.dup(log.fd))


def test_a_log_that_ends_where_it_begins_or_at_its_very_end_is_opened() -> None:
    with closing(RecordLog.new(BASE, 1)) as log:
        with closing(RecordLog(os.dup(log.fd))) as again:
            assert again.end == again.begin == log.begin
        log.words[END_WORD] = log.capacity
        with closing(RecordLog(os.dup(log.fd))) as again:
            assert again.end == log.capacity


def test_the_request_in_hand_and_a_takeover_are_there_for_the_next_keeper(log: RecordLog) -> None:
    log.take_in_hand(9, b"payload")
    for state in (GIVEN, TAKEN, 0):
        log.takeover = state
        with closing(RecordLog(os.dup(log.fd))) as again:
            assert (again.words[HAND], again.takeover, again.generation) == (9, state, 1)
            assert again.words[DIGEST] != 0
    log.done()
    with closing(RecordLog(os.dup(log.fd))) as again:
        assert again.words[HAND] == 0
        assert again.inherit(1) == (0, False)  # nobody's request ended the keeper


def test_the_same_request_in_hand_at_each_end_is_found() -> None:
    with closing(RecordLog.new(b"", 1)) as log:
        log.take_in_hand(7, b"one")
        assert log.inherit(3) == (7, False)
        log.take_in_hand(7, b"one")
        assert log.inherit(3) == (7, False)
        assert log.inherit(3) == (0, False)  # nothing was in hand: an end like any other
        for _ in range(2):
            log.take_in_hand(7, b"one")
            assert log.inherit(3) == (7, False)
        log.take_in_hand(7, b"one")
        assert log.inherit(3) == (7, True)
        assert log.generation == 7


@pytest.mark.parametrize("other", [(8, b"one"), (7, b"two")], ids=["sender", "request"])
def test_another_request_in_hand_begins_the_count_again(other: tuple[int, bytes]) -> None:
    with closing(RecordLog.new(b"", 1)) as log:
        for number, payload in [(7, b"one"), other, (7, b"one"), (7, b"one")]:
            log.take_in_hand(number, payload)
            assert log.inherit(3) == (number, False)
        log.take_in_hand(7, b"one")
        assert log.inherit(3) == (7, True)
