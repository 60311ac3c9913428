"""The rules of the house that can be read off the source."""

from __future__ import annotations

import tomllib

from . import house
from .house import ROOT

# A module over 700 lines needs a reason that a newcomer would accept.
LONG = {
    "vram/lifetime.py": "one protocol of counts, queue and undo, whose correctness is only seen when read in one place",
    "vram/collectives/group.py": "every call that a rank may make, in the order that all ranks rely on",
}

# Modules that import each other, by the room, and why. There are none.
CIRCLES: dict[str, str] = {}

# Where errors of a driver are raised outside of a driver.
RAISED = {
    "vram/keeper/bind.py": "this process has no descriptor left to listen with",
    "vram/keeper/paths.py": "the kernel refuses a directory",
    "vram/keeper/rpc_connection.py": "this process has no descriptor left for what the keeper sends",
    "vram/sharing/channel.py": "the kernel refuses descriptors on a socket",
}

# Where members of HandleKind are named, besides the rows of memory/kinds.py, the drivers, and the form on the wire.
KINDS_NAMED = {
    "vram/spec.py": "the value itself, and the kind that an AllocationSpec has where none is given",
    "vram/memory/allocation.py": "the kind of a public call where none is given",
    "vram/memory/checks.py": "an error shows how to write a kind",
    "vram/memory/multicast.py": "a multicast object is made with a kind and opened by one: each is a call of a driver",
    "vram/memory/region.py": "the kind of a public call where none is given",
    "vram/keeper/admission.py": "a keeper takes descriptors alone, and sees neither memory nor drivers",
    "vram/keeper/client.py": "a keeper takes descriptors alone, and sees neither memory nor drivers",
    "vram/entries/manifests.py": "memory that is made for a manifest",
    "vram/entries/packing.py": "memory that is made for copies",
    "vram/entries/placement.py": "what goes by descriptor, and what a keeper can hold",
    "vram/testing/driver.py": "the contract of drivers",
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


def test_what_finalizers_change_is_listed_in_one_step() -> None:
    """I3."""
    assert house.unsafe_listings(ROOT) == []


def test_modules_of_a_room_do_not_import_each_other_in_a_circle() -> None:
    found = house.circles(ROOT)
    assert [line for line in found if line.partition(":")[0] not in CIRCLES] == []
    assert {line.partition(":")[0] for line in found} == set(CIRCLES), "a circle that is gone needs no reason"


def test_errors_of_a_driver_are_made_by_drivers() -> None:
    assert house.driver_errors(ROOT, RAISED) == []


def test_every_invariant_is_written_down_kept_and_cited() -> None:
    assert house.unkept(ROOT) == []


def test_documents_point_to_what_is_there() -> None:
    assert house.broken_links(ROOT) == []
    assert house.unknown_verbs(ROOT) == []


def test_the_page_draws_the_rooms_in_the_order_that_is_enforced() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    page = (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    drawn = next(line for line in page if line.startswith("cli >")).replace("{", "").replace("}", "")
    assert drawn.split(" > ") == [layer.replace("vram.", "") for layer in contracts[0]["layers"]]


def test_the_map_names_places_that_exist() -> None:
    assert house.unmapped(ROOT) == []


def test_a_handle_kind_is_named_in_its_row_in_drivers_and_on_the_wire_only() -> None:
    assert house.kinds_named(ROOT, KINDS_NAMED) == []
