"""Every public verb with something odd in the place of each of its arguments: only typed errors come out of it."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.places import short_directory
from tests.support.samples import some

import vram
from vram import driver as drivers
from vram.spec import HOST

G = 2 << 20


class TooLarge:
    """What says that it is an integer, and is none that fits anywhere."""

    def __index__(self) -> int:
        return 2**80


class NoMapping:
    def __len__(self) -> int:
        return 3


ODD: list[Any] = [
    *(None, True, -1, 0, 1, 1.5, math.nan, math.inf, 1j, 2**31, 2**62, 2**63, 2**64, 2**100, -(2**63), 10**400),
    *(
        "",
        "x",
        "\0",
        "\ud800",
        "x" * 5000,
        "/" + "x" * 200,
        "/a\0b",
        b"x",
        b"\xff",
        memoryview(b"ab"),
        ...,
        slice(None),
    ),
    *((), (1,), (-1,), (2**63,), ("a",), (None,), [], [1], [[1]], {}, {"a": 1}, {1: "a"}, {"x": None}, set(), range(3)),
    *(object(), int, len, np.zeros(2), np.float64("nan"), np.int64(-1), np.array("x"), TooLarge(), NoMapping()),
]
# What waits is given no time to; a ceiling keeps the machine its memory.
_WAITS = ("timeout", "close_timeout")
_TYPED = (vram.errors.VramError, TypeError)


@pytest.fixture(scope="module")
def published() -> Iterator[None]:
    with vram.private_keeper():
        vram.publish("a", {"x": np.ones(2)})
        yield


def array(*_: object) -> vram.Array:
    return vram.zeros((2, 2), "int32", device="host")


def on_region(verb: str) -> Callable[..., Any]:
    def act(*given: Any) -> Any:
        with vram.memory.Region.create(HOST, capacity=G, nbytes=10) as region:
            return getattr(region, verb)(*given)

    return act


def mapped_for(*, users: Any = ()) -> Any:
    return vram.memory.Region.from_allocations(drivers.get(HOST), (), location=HOST, users=users)


def on_lease(do: Callable[[vram.Lease], Any]) -> Any:
    with vram.attach("a") as lease:
        return do(lease)


def upgrade(*, timeout: Any = 0.01) -> Any:
    return on_lease(lambda lease: lease.upgrade(timeout=timeout))


def sleep_and_wake(
    *, release: Any = False, newest: Any = False, timeout: Any = 0.01, wait_for_memory: Any = 0.0
) -> Any:
    def act(lease: vram.Lease) -> int:
        lease.sleep(release=release)
        return lease.wake(newest=newest, timeout=timeout, wait_for_memory=wait_for_memory)

    return on_lease(act)


def changed(name: Any, value: Any) -> Any:
    """A Keeper's attributes are anybody's to set: what is odd in them is found when it is used."""
    kept = vram.Keeper(os.environ["VRAM_KEEPER"])
    if isinstance(name, str) and name == "label":
        kept.label = value
    else:
        kept.path = name
    return vram.list_entries(keeper=kept)


def connect(path: Any, *, timeout: Any = 0.01) -> vram.ArrayChannel:
    return vram.ArrayChannel.connect(path, timeout)


def send(value: Any, *, timeout: Any = 0.01, stream: Any = None) -> None:
    one, other = vram.ArrayChannel.pair()
    with one, other:
        one.send(value, timeout=timeout, stream=stream)


def recv(*, timeout: Any = 0.01, stream: Any = None) -> Any:
    one, other = vram.ArrayChannel.pair()
    with one, other:
        one.send(1)
        return other.recv(timeout=timeout, stream=stream)


VERBS: dict[str, tuple[Callable[..., Any], Callable[[str], tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    "empty": (vram.empty, lambda d: (((2,), "int32"), {"device": "host"})),
    "zeros": (vram.zeros, lambda d: (((2,), "int32"), {"device": "host"})),
    "asarray": (vram.asarray, lambda d: ((np.zeros(2),), {"device": "host"})),
    "copy": (vram.copy, lambda d: ((np.zeros(2),), {"device": "host"})),
    "share": (vram.share, lambda d: ((np.zeros(2),), {})),
    "explain": (vram.explain, lambda d: ((np.zeros(2),), {})),
    "publish": (vram.publish, lambda d: (("b", {"x": np.ones(1)}), {})),
    "attach": (vram.attach, lambda d: (("a",), {"timeout": 0.01})),
    "attach_or_publish": (vram.attach_or_publish, lambda d: (("c", lambda: {"x": np.ones(1)}), {"timeout": 0.01})),
    "lend": (vram.lend, lambda d: ((np.ones(1),), {"at": f"{d}/s", "close_timeout": 0.01})),
    "borrow": (vram.borrow, lambda d: ((f"{d}/none",), {"timeout": 0.01})),
    "remove": (vram.remove, lambda d: (("none",), {})),
    "revoke": (vram.revoke, lambda d: (("none",), {"timeout": 0.01})),
    "list_entries": (vram.list_entries, lambda d: (("",), {})),
    "holders": (vram.holders, lambda d: (("",), {})),
    "entry": (vram.entry, lambda d: (("a",), {})),
    "statistics": (vram.statistics, lambda d: ((), {})),
    "save": (vram.save, lambda d: (("a", f"{d}/m.safetensors"), {"timeout": 0.01})),
    "publish_file": (vram.publish_file, lambda d: (("p", f"{d}/none"), {})),
    "Location": (vram.memory.Location, lambda d: (("cuda", 0), {})),
    "Location.parse": (vram.memory.Location.parse, lambda d: (("cuda:0",), {})),
    "Region.create": (vram.memory.Region.create, lambda d: ((HOST,), {"capacity": G, "nbytes": G})),
    "Region.from_allocations": (mapped_for, lambda d: ((), {})),
    "AddressReservation.reserve": (vram.memory.AddressReservation.reserve, lambda d: ((drivers.get(HOST), G), {})),
    "PhysicalAllocation.create": (vram.memory.PhysicalAllocation.create, lambda d: ((drivers.get(HOST), G, HOST), {})),
    "PhysicalAllocation.import_": (
        vram.memory.PhysicalAllocation.import_,
        lambda d: ((drivers.get(HOST), 10**6, G), {}),
    ),
    "Event.create": (vram.memory.Event.create, lambda d: ((drivers.get(HOST), HOST), {})),
    "Array.fill": (lambda value: array().fill(value), lambda d: ((1,), {})),
    "Array.resize": (lambda rows: array().resize(rows), lambda d: ((1,), {})),
    "Array.__getitem__": (lambda key: array()[key], lambda d: ((0,), {})),
    "Array.create": (vram.Array.create, lambda d: ((drivers.get(HOST), HOST, (2,), "int32"), {})),
    "Array": (vram.Array, lambda d: ((array().region, "int32", (2,)), {})),
    "Region.grow": (on_region("grow"), lambda d: ((G,), {})),
    "Region.shrink": (on_region("shrink"), lambda d: ((0,), {})),
    "Region.pin": (on_region("pin"), lambda d: ((0, 1), {})),
    "Region.extend": (on_region("extend"), lambda d: (((), G), {})),
    "AllocationSpec": (vram.memory.AllocationSpec, lambda d: ((HOST, G), {})),
    "IpcMemHandle": (vram.sharing.IpcMemHandle, lambda d: ((bytes(64),), {})),
    "IpcMemHandle.from_bytes": (vram.sharing.IpcMemHandle.from_bytes, lambda d: ((bytes(64),), {"offset": 0})),
    "IpcMemHandle.of": (vram.sharing.IpcMemHandle.of, lambda d: ((4096,), {})),
    "IpcMemHandle.open": (vram.sharing.IpcMemHandle(bytes(64)).open, lambda d: ((10,), {})),
    "MulticastObject.create": (vram.memory.MulticastObject.create, lambda d: ((drivers.get(HOST), 2, G), {})),
    "Lease.__getitem__": (lambda key: on_lease(lambda lease: lease[key]), lambda d: (("x",), {})),
    "Lease.get": (lambda key: on_lease(lambda lease: lease.get(key)), lambda d: (("x",), {})),
    "Lease.array": (lambda name: on_lease(lambda lease: lease.array(name)), lambda d: (("x",), {})),
    "Lease.keep_only": (lambda name: on_lease(lambda lease: lease.keep_only(name)), lambda d: (("x",), {})),
    "Lease.on_revoke": (lambda do: on_lease(lambda lease: lease.on_revoke(do)), lambda d: ((len,), {})),
    "Lease.upgrade": (upgrade, lambda d: ((), {})),
    "Lease.sleep": (sleep_and_wake, lambda d: ((), {})),
    "reattach_all": (vram.reattach_all, lambda d: ((), {})),
    "Keeper": (
        lambda label: vram.list_entries(keeper=vram.Keeper(os.environ["VRAM_KEEPER"], label=label)),
        lambda d: (("",), {}),
    ),
    "Keeper of a path": (lambda path: vram.list_entries(keeper=vram.Keeper(path)), lambda d: ((f"{d}/none",), {})),
    "a path of a keeper": (lambda path: vram.attach("a", keeper=path), lambda d: ((f"{d}/none",), {})),
    "a Keeper whose words were changed": (changed, lambda d: (("label", ""), {})),
    "ArrayChannel": (vram.ArrayChannel, lambda d: ((None,), {})),
    "ArrayChannel.connect": (connect, lambda d: ((f"{d}/none",), {})),
    "ArrayChannel.send": (send, lambda d: ((1,), {})),
    "ArrayChannel.recv": (recv, lambda d: ((), {})),
}


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("verb", VERBS)
def test_something_odd_in_the_place_of_any_argument_is_a_typed_error(verb: str) -> None:
    act, usual = VERBS[verb]
    wrong: list[str] = []
    with short_directory() as place, contextlib.chdir(place):  # an odd path may be one to write to
        given, options = usual(place)
        keywords = [
            one.name for one in inspect.signature(act).parameters.values() if one.kind is inspect.Parameter.KEYWORD_ONLY
        ]
        for odd in some(ODD, 8):
            calls = [((*given[:at], odd, *given[at + 1 :]), options) for at in range(len(given))]
            for name in keywords:
                if name in _WAITS and (odd is None or (isinstance(odd, (int, float)) and odd > 1)):
                    continue
                calls.append((given, {**options, name: odd}))
            for arguments, named in calls:
                try:
                    made = act(*arguments, **named)
                except _TYPED:
                    continue
                except Exception as error:
                    changed = next((name for name in named if named[name] is odd), "an argument")
                    wrong.append(f"{verb} with {odd!r:.30} as {changed}: {type(error).__name__}: {error}")
                    continue
                if hasattr(made, "close") and not isinstance(made, type):
                    with contextlib.suppress(vram.errors.VramError):
                        made.close()
    assert wrong == []
    if verb not in ("statistics",):
        with vram.attach("a") as lease:  # the connection serves on
            assert lease["x"].numpy().tolist() == [1, 1]
