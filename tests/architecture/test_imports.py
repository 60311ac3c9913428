"""What an import loads, asked of a fresh interpreter: the linter sees what is written, this sees what happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.places import private_socket
from tests.support.samples import some

import vram
from vram.keeper.client import close_client

HEAVY = (
    "asyncio",
    "ctypes",
    "ml_dtypes",
    "mmap",
    "msgspec",
    "multiprocessing",
    "numpy",
    "rich",
    "safetensors",
    "socket",
    "torch",
    "typer",
    "vram.driver",
)


def loaded_by(statement: str, **environment: str) -> set[str]:
    """Return the modules that a statement loads in an interpreter of its own, packages above them included."""
    code = (
        f"import json, sys; before = set(sys.modules); {statement}; print(json.dumps(list(set(sys.modules) - before)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return set(json.loads(done.stdout))


@pytest.fixture
def keeper() -> Iterator[str]:
    with private_socket() as path:
        yield path
        close_client(path)


def test_import_vram_loads_next_to_nothing() -> None:
    loaded = loaded_by("import vram")
    assert not loaded & set(HEAVY)
    assert {name for name in loaded if name.startswith("vram")} == {"vram"}


def test_errors_are_had_without_the_rest() -> None:
    loaded = loaded_by("import vram; vram.errors.VramError")
    assert not loaded & set(HEAVY)
    assert {name for name in loaded if name.startswith("vram.")} == {"vram.errors"}


@pytest.mark.parametrize("module", ["vram.keeper.server", "vram.keeper.client"])
def test_the_keeper_loads_neither_numpy_nor_a_driver(module: str) -> None:
    loaded = loaded_by(f"import {module}")
    forbidden = {"numpy", "ctypes", "ml_dtypes", "safetensors", "torch", "typer", "rich"}
    assert not {name for name in loaded if name.split(".")[0] in forbidden}
    assert not {name for name in loaded if name.startswith(("vram.driver", "vram.memory", "vram.arrays"))}


def test_the_command_line_brings_no_numpy_to_the_keeper() -> None:
    loaded = loaded_by("import vram.cli")
    assert not loaded & {"numpy", "ctypes", "ml_dtypes", "safetensors", "torch"}
    assert not {name for name in loaded if name.startswith("vram.driver.")}


# What takes long to load, and no verb needs in order to be there; what some need all the same is named with them.
SLOW = (
    "asyncio", "concurrent", "ctypes", "difflib", "hypothesis", "importlib.metadata", "ml_dtypes", "multiprocessing",
    "numpy", "pickle", "rich", "safetensors", "secrets", "subprocess", "tempfile", "torch", "typer", "vram.bench",
    "vram.cli", "vram.driver.cuda", "vram.driver.host", "vram.keeper.server", "vram.testing", "vram.transports",
)  # fmt: skip
VERBS = (
    "attach", "attach_or_publish", "publish", "lend", "borrow", "share", "explain", "copy", "ArrayChannel", "empty",
    "zeros", "asarray", "publish_file", "list_entries", "entry",
    "holders", "statistics", "remove", "revoke", "Array", "Lease", "memory.Region", "typing.Lending",
)  # fmt: skip


def slow_among(loaded: set[str], allowed: tuple[str, ...] = ()) -> str:
    """Return what is slow of what was loaded: the words of SLOW."""
    return " ".join(
        one for one in SLOW if one not in allowed and any(name == one or name.startswith(f"{one}.") for name in loaded)
    )


@pytest.mark.parametrize("verb", some(VERBS, 7))
def test_a_verb_loads_what_it_needs_and_not_the_whole_house(verb: str) -> None:
    loaded = loaded_by(f"import vram; vram.{verb}")
    ours = {name for name in loaded if name.split(".")[0] == "vram"}
    print(f"vram.{verb} loads {len(loaded)} modules, {len(ours)} of them vram's")
    assert slow_among(loaded) == ""


# The driver of the host speaks to libc, and the elements of an array have a type of numpy's.
USED = {
    "attach": ("lease = vram.attach('x'); lease['a'].numpy()[0]; lease.close()", ()),
    "publish": ("vram.publish('y', {'a': vram.zeros(4, 'uint8', device='host')})", ()),
    "attach_or_publish": ("vram.attach_or_publish('x', dict).close()", ()),
    "borrow": ("vram.borrow(PLACE + '/lent').array.numpy()[0]", ()),
    # A lender is a small keeper, in a thread; of its own memory only.
    "lend": (
        "vram.lend(vram.zeros(4, 'uint8', device='host'), at=PLACE + '/mine').close()",
        ("asyncio", "concurrent", "secrets", "subprocess", "tempfile", "vram.keeper.server"),
    ),
    "share": ("vram.share(vram.zeros(4, 'uint8', device='host'))", ()),
    "ArrayChannel": ("a, b = vram.ArrayChannel.pair(); a.send(7); b.recv(); a.close(); b.close()", ()),
    "empty": ("vram.empty(4, 'uint8', device='host').close()", ()),
    "list_entries": ("vram.list_entries(); vram.holders(); vram.entry('x')", ()),
}


@pytest.mark.parametrize("verb", some([*USED], 4))
def test_the_first_use_of_a_verb_loads_what_it_needs_and_not_the_whole_house(
    verb: str, keeper: str, tmp_path: Path
) -> None:
    code, allowed = USED[verb]
    with vram.zeros(4, "uint8", device="host") as array, vram.zeros(4, "uint8", device="host") as other:
        vram.publish("x", {"a": array}, keeper=keeper)
        with vram.lend(other, at=tmp_path / "lent"):
            loaded = loaded_by(f"import vram; PLACE = {str(tmp_path)!r}; {code}", VRAM_KEEPER=keeper)
    ours = {name for name in loaded if name.split(".")[0] == "vram"}
    print(f"{code} loads {len(loaded)} modules, {len(ours)} of them vram's")
    assert slow_among(loaded, (*allowed, "ctypes", "numpy", "pickle", "vram.driver.host")) == ""


@pytest.mark.parametrize("module", ["vram.arrays", "vram.handover"])
def test_torch_is_never_loaded_unasked(module: str) -> None:
    assert "torch" not in loaded_by(f"import {module}")


def test_the_suites_are_loaded_by_nobody() -> None:
    everything = "import vram; [getattr(vram, name) for name in vram.__all__]; import vram.cli"
    assert not {name for name in loaded_by(everything) if name.startswith("vram.testing")}


# Whoever loads multiprocessing, and whenever: what is pickled for it goes without a copy.
PICKLED = """
import importlib, subprocess, sys
class Asks:
    def find_spec(self, name, path=None, target=None):
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        return next((spec for finder in others if (spec := finder.find_spec(name, path, target))), None)
class Old:
    def find_module(self, name, path=None):
        return None
def anew():
    for name in [name for name in sys.modules if name.partition(".")[0] == "vram"]:
        del sys.modules[name]
{first}
from multiprocessing.reduction import ForkingPickler
a = vram.zeros(4, "uint8", device="host")
assert ForkingPickler.loads(ForkingPickler.dumps(a)) is a
ours, theirs = vram.ArrayChannel.pair()
there = ForkingPickler.loads(ForkingPickler.dumps(theirs))
there.send(7)
assert ours.recv() == 7
import multiprocessing.reduction as reduction
assert type(reduction.__loader__) is type(reduction.__spec__.loader) is type(subprocess.__loader__)
finders = len([finder for finder in sys.meta_path if type(finder).__module__.startswith("vram")])
importlib.reload(reduction)
assert reduction.ForkingPickler.loads(reduction.ForkingPickler.dumps(a)) is a, "a reload makes a new table"
assert type(reduction.__loader__) is type(reduction.__spec__.loader) is type(subprocess.__loader__)
assert len([finder for finder in sys.meta_path if type(finder).__module__.startswith("vram")]) == finders
print("passed")
"""


@pytest.mark.parametrize(
    "first",
    [
        "import multiprocessing, vram",
        "import vram; vram.empty; import multiprocessing",
        "import vram; vram.list_entries; vram.attach; import multiprocessing.pool",
        # somebody only looks whether it is there
        "import importlib.util as u, vram; vram.list_entries; u.find_spec('multiprocessing.reduction').has_location",
        # a finder that asks all others in its turn
        "import vram; vram.list_entries; sys.meta_path.insert(0, Asks()); import multiprocessing",
        # one of old, which Python passes over
        "import vram; vram.list_entries; sys.meta_path.insert(1, Old()); import multiprocessing",
        # vram once more, as a test runner or a notebook that begins anew has it
        "import vram; vram.list_entries; anew(); import vram; vram.list_entries; import multiprocessing",
    ],
)
def test_multiprocessing_is_taught_whenever_it_is_loaded(first: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PICKLED.format(first=first)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "passed\n"), done.stderr[-3000:]
