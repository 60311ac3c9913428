"""A journal: what was written is read again, a record that was changed is left out, and one of two keepers serves."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from vram.errors import ProtocolError
from vram.keeper.journal import CAPACITY, Journal

PAGE = mmap.PAGESIZE
BODIES = [b"head %d" % index + b"rest" * index for index in range(5)]
END_WORD = 2  # of the words at the beginning: where the journal ends


@pytest.fixture
def journal() -> Iterator[Journal]:
    with closing(Journal.new(1)) as made:
        for body in BODIES:
            made.append(body)
        yield made


def read(journal: Journal) -> list[bytes]:
    """Return what the next keeper finds."""
    with closing(Journal(os.dup(journal.fd))) as again:
        assert (again.end, again.capacity) == (journal.end, journal.capacity)
        return list(again.records())


def test_what_was_written_is_read_again(journal: Journal) -> None:
    assert read(journal) == BODIES
    assert journal.nbytes == sum(8 + len(body) for body in BODIES)
    with closing(Journal(os.dup(journal.fd))) as again:
        again.append(b"one more")
        assert read(again) == [*BODIES, b"one more"]


def test_its_descriptor_is_not_inherited_and_closed_once(journal: Journal) -> None:
    assert not os.get_inheritable(journal.fd)
    fd = journal.fd
    journal.close()
    journal.close()
    with pytest.raises(OSError, match=r"^\[Errno 9\]"):
        os.fstat(fd)


@pytest.mark.parametrize("nbytes", [0, CAPACITY // 2])
def test_there_is_room_up_to_the_end(nbytes: int) -> None:
    with closing(Journal.new(4, nbytes)) as journal:
        assert journal.generation == 4
        assert os.fstat(journal.fd).st_size == journal.capacity >= max(CAPACITY, 4 * nbytes)
        journal.end = journal.capacity - 7
        with pytest.raises((ValueError, IndexError)):
            journal.append(b"")


def test_a_record_that_was_not_finished_never_happened(journal: Journal) -> None:
    """The last one may have been written up to any byte: the end is moved after that, in one store."""
    end = journal.end
    journal.append(b"the last of all")
    journal.words[END_WORD] = end
    with closing(Journal(os.dup(journal.fd))) as again:
        assert list(again.records()) == BODIES


def test_a_record_that_was_changed_is_left_out_and_counted(journal: Journal) -> None:
    at = 4096
    for index, body in enumerate(BODIES):
        for place in (at + 4, at + 8, at + 8 + len(body) - 1):  # its check, its first byte, its last
            journal._memory[place] ^= 0x40
            with closing(Journal(os.dup(journal.fd))) as again:
                assert list(again.records()) == BODIES[:index] + BODIES[index + 1 :]
                assert again.bad == 1
            journal._memory[place] ^= 0x40
        at += 8 + len(body)
    journal._memory[4096 + 3] = 0x40  # the length of the first
    with closing(Journal(os.dup(journal.fd))) as again:
        assert (list(again.records()), again.bad) == ([], 1)


@pytest.mark.parametrize("nbytes", [0, 100, PAGE - 1, PAGE + 1])
def test_what_is_no_whole_journal_is_refused(nbytes: int) -> None:
    short = os.memfd_create("short")
    os.ftruncate(short, nbytes)
    with pytest.raises(ProtocolError, match=f"has {nbytes} bytes: it was cut"):
        Journal(short)
    with pytest.raises(OSError, match=rf"\[Errno {errno.EBADF}\]"):
        os.fstat(short)  # it was owned from then on


@pytest.mark.parametrize(
    ("word", "value", "why"),
    [(0, 1, "is none"), (1, 99, "another version"), (END_WORD, 0, "changed"), (END_WORD, CAPACITY + 1, "changed")],
)
def test_what_is_no_journal_or_ends_nowhere_is_refused(journal: Journal, word: int, value: int, why: str) -> None:
    journal.words[word] = value
    with pytest.raises(ProtocolError, match=why):
        Journal(os.dup(journal.fd))


def test_each_keeper_that_goes_on_has_the_next_number(journal: Journal) -> None:
    journal.inherit()
    assert journal.generation == 2
