"""The rules of the house that can be read off the source."""

from __future__ import annotations

from . import house
from .house import ROOT

# A module over 400 lines needs a reason that a newcomer would accept.
LONG = {
    "vram/arrays/array.py": "one class: its memory, its size and its parts, each checked against the other two",
    "vram/cli/demo.py": "one story, act by act, with the children that play it and the props",
    "vram/memory/foreign.py": "whose memory a pointer is, of every kind: each is told from the others by what it lacks",
    "vram/exchange/array_channel.py": "both directions of one connection: which lock guards what is seen in one place",
    "vram/driver/books.py": "one set of books for both drivers; why each step needs no lock is only seen in one place",
    "vram/driver/cuda/memory.py": "the other driver's: what each call leaves when it is refused or interrupted",
    "vram/driver/host.py": "the whole contract on one kernel: each call's order of books and system call, side by side",
    "vram/driver/protocol.py": "the contract between house and drivers, more than half of it what each call promises",
    "vram/exchange/endpoint.py": "one thread and all that it is asked: who is told what, in which order, in one place",
    "vram/exchange/lease.py": "one lease from its mapping to its end; half of it is what each question promises",
    "vram/keeper/catalogue.py": "one state machine: each transition relies on what all others leave behind",
    "vram/keeper/client.py": "everything that can be said to a keeper; half of it is what each call promises",
    "vram/keeper/conversation.py": "how threads share one connection: who reads, who waits, who was interrupted",
    "vram/keeper/lender.py": "its thread and what others ask of it: who owns what and who ends it, in one place",
    "vram/keeper/listener.py": "how a path comes to be ours and goes: each call is safe by what the one before it left",
    "vram/keeper/messages.py": "the whole protocol on one page, with what each message means",
    "vram/keeper/server.py": "one loop and all that it owns: which of it is bounded by what is seen in one place",
    "vram/keeper/service.py": "one answer for each request, and what of the books' effects goes to whom",
    "vram/keeper/takeover.py": "both sides of one protocol and its diagram: each step answers one of the other",
    "vram/memory/allocation.py": "one allocation by each way in: made, opened, retained; one undo for all of them",
    "vram/memory/multicast.py": "one object from its team to its end: what each call needs of those before it",
    "vram/memory/reservation.py": "addresses, and memory put behind them: one undo for both, and who waits for it",
    "vram/memory/region.py": "everything that changes a size: each way in, and what it takes back when it fails",
    "vram/sharing/channel.py": "the two places where descriptors meet a socket, and the class that both sides use",
    "vram/lifetime.py": "one protocol of counts, queue and undo, whose correctness is only seen when read in one place",
}


def test_no_room_has_a_vague_name() -> None:
    assert house.vague_names(ROOT) == []


def test_long_modules_have_a_reason() -> None:
    assert house.too_long(ROOT, LONG) == []


def test_everything_public_has_a_docstring() -> None:
    assert house.undocumented(ROOT) == []


def test_nothing_ends_the_process() -> None:
    """I11."""
    assert house.endings(ROOT) == []


def test_every_invariant_is_written_down_kept_and_cited() -> None:
    assert house.unkept(ROOT) == []


def test_documents_point_to_what_is_there() -> None:
    assert house.broken_links(ROOT) == []
    assert house.unknown_verbs(ROOT) == []
