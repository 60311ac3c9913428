"""Readers follow growth: a lease goes on to a newer version that is its own one with more behind it."""

from __future__ import annotations

import itertools
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from tests.support.deadlines import SOON, until
from tests.support.faulty_driver import FaultyDriver
from tests.support.forked import end_of, refused
from tests.support.keeper_here import open_to_all
from tests.support.other_users import OTHER, as_user
from tests.support.own_keeper import own_keeper
from tests.support.samples import nths

import vram
from vram import driver as drivers
from vram.arrays import Array
from vram.driver.host import HostDriver
from vram.errors import (
    AsleepError,
    CapacityError,
    ClosedError,
    DriverError,
    MismatchError,
    NotFoundError,
    OutOfMemoryError,
    PeerGoneError,
    UsageError,
)
from vram.keeper.client import close_client
from vram.keeper.private import KeeperProcess

pytestmark = pytest.mark.usefixtures("kept")
MIB = 1 << 20
ROW = 256 << 10  # bytes of one: eight make a chunk of 2 MiB
LANES = ROW // 8


def made(rows: int = 8, *, capacity: int = 256, start: int = 0) -> Array:
    """An array whose rows say which one they are."""
    array = vram.empty((rows, LANES), "int64", device="host", capacity=capacity, chunk="2MiB")
    array.numpy()[:, 0] = np.arange(start, start + rows)
    return array


def grow(array: Array, rows: int) -> None:
    before = len(array)
    array.resize(rows)
    array.numpy()[before:, 0] = np.arange(before, rows)


def publish(**arrays: Array) -> vram.typing.Published:
    receipt = vram.publish("n", arrays, writable=True)
    assert receipt.zero_copy
    return receipt


def numbers(array: Array) -> list[int]:
    return list(map(int, array.numpy()[:, 0]))


def state(lease: vram.Lease) -> object:
    """What a refresh that fails must leave as it was."""
    rows = {name: (array.address, array.shape, numbers(array)) for name, array in lease.items()}
    mapped = [(region.nbytes, region.layout) for region in lease._regions]
    return lease.version, rows, mapped, drivers.get(vram.spec.HOST).live()


@pytest.fixture
def array() -> Iterator[Array]:
    with made() as array:
        publish(x=array)
        yield array


@pytest.fixture
def lease(array: Array) -> Iterator[vram.Lease]:
    with vram.attach("n", growing=True) as lease:
        yield lease


def test_what_is_pickled_after_a_refresh_names_the_version_that_there_is() -> None:
    """What had not grown named the older one, which the same step had given back."""
    with made() as grows, made() as fixed:
        publish(kv=grows, table=fixed)
        with vram.attach("n", growing=True) as lease:
            table, rows = lease["table"], lease["kv"]
            grow(grows, 20)
            newer = publish(kv=grows, table=fixed).version
            assert lease.refresh() == ("kv",)
            for array, count in ((table, 8), (rows, 8), (lease["table"], 8), (lease["kv"], 20)):
                again = pickle.loads(pickle.dumps(array))
                assert (len(again), numbers(again)) == (count, list(range(count)))
                assert again.provenance.version == newer
                again.close()


# -- following --------------------------------------------------------------------------------------------------------


def test_what_was_added_is_mapped_at_the_same_addresses_i5(array: Array, lease: vram.Lease) -> None:
    before, view = lease["x"], lease["x"].numpy()
    layout = lease._regions[0].layout
    grow(array, 20)
    newer = publish(x=array).version
    assert lease.refresh() == ("x",)
    after = lease["x"]
    assert (lease.version, after.address, after.shape) == (newer, before.address, (20, LANES))
    assert numbers(after) == list(range(20))
    assert (numbers(before), before.shape, view.shape) == (list(range(8)), (8, LANES), (8, LANES))
    assert lease._regions[0].layout[:1] == layout
    array.numpy()[3, 0] = 99  # the same memory
    assert (view[3, 0], int(after.numpy()[3, 0])) == (99, 99)
    assert lease.refresh() == ()
    assert not lease.is_stale()


def test_publishing_again_costs_what_was_added_and_the_version_before_goes(array: Array, lease: vram.Lease) -> None:
    assert (vram.statistics().nbytes, vram.statistics().descriptors) == (2 * MIB, 1)
    exported: list[int] = []
    (first, *_), _ = array.region.segments(0, 1)
    exported.append(first.export())
    for rows in range(16, 72, 8):
        grow(array, rows)
        publish(x=array)
        lease.refresh()
        (first, *_), _ = array.region.segments(0, 1)
        exported.append(first.export())
    assert len(set(exported)) == 1  # each is exported once, and lent again
    said = vram.statistics()
    assert (said.versions, said.nbytes, said.descriptors) == (1, 16 * MIB, 8)
    assert lease._regions[0].mapped == 16 * MIB


def test_rows_that_found_room_in_what_is_mapped_map_nothing(array: Array, lease: vram.Lease) -> None:
    array.resize(3)
    with made(3) as small:
        publish(x=small)
        with vram.attach("n") as narrow:  # no addresses beyond what there is
            mapped = narrow._regions[0].layout
            grow(small, 7)
            publish(x=small)
            assert narrow.refresh() == ("x",)
            assert numbers(narrow["x"]) == list(range(7))
            assert narrow._regions[0].layout == mapped


def test_several_arrays_in_another_order_and_one_that_stayed() -> None:
    with made() as keys, made(start=100) as values, made(4) as flat:
        publish(keys=keys, values=values, flat=flat)
        with vram.attach("n", access="rw", growing=True) as lease:
            addresses = {name: found.address for name, found in lease.items()}
            same = lease["flat"]
            grow(keys, 30)
            grow(values, 12)
            publish(flat=flat, values=values, keys=keys)
            assert lease.refresh() == ("keys", "values")
            assert {name: found.address for name, found in lease.items()} == addresses
            assert lease["flat"] is same
            assert numbers(lease["keys"]) == list(range(30))
            assert numbers(lease["values"]) == [*range(100, 108), *range(8, 12)]
            lease["values"].numpy()[11, 1] = 7
            assert values.numpy()[11, 1] == 7
            grow(values, 60)
            publish(keys=keys, values=values, flat=flat)
            assert lease.refresh() == ("values",)
            assert (numbers(lease["flat"]), len(lease["values"])) == ([0, 1, 2, 3], 60)
            assert {name: tensor.shape[0] for name, tensor in lease.numpy().items()} == {
                "keys": 30, "values": 60, "flat": 4,
            }  # fmt: skip


def test_a_private_copy_keeps_what_was_written_to_it(array: Array) -> None:
    with vram.attach("n", access="cow", growing=True) as lease:
        lease["x"].numpy()[0, 0] = -1
        grow(array, 16)
        publish(x=array)
        assert lease.refresh() == ("x",)
        lease["x"].numpy()[15, 0] = -2
        assert numbers(lease["x"]) == [-1, *range(1, 15), -2]
        assert numbers(array) == list(range(16))


def test_a_newer_version_that_is_no_longer_is_gone_on_to_all_the_same(array: Array, lease: vram.Lease) -> None:
    kept = lease["x"]
    newer = vram.publish("n", {"x": array}, writable=True, meta={"step": "2"}).version
    assert lease.refresh() == ()
    assert (lease.version, lease.meta, lease["x"]) == (newer, {"step": "2"}, kept)
    assert vram.statistics().versions == 1


# -- what it refuses --------------------------------------------------------------------------------------------------


def replaced(array: Array, how: str) -> None:
    """Publish something else under the name."""
    if how == "shrunk":
        array.resize(5)
        vram.publish("n", {"x": array}, writable=True, whole=True)
    elif how == "shrunk and grown anew":
        array.resize(0)
        grow(array, 24)
        publish(x=array)
    elif how == "copied":
        vram.publish("n", {"x": array.numpy()[:, :5].copy()}, writable=True)
    elif how == "read-only":
        grow(array, 24)
        vram.publish("n", {"x": array})
    elif how == "another array":
        with made(24) as other:
            publish(x=other)
    elif how == "another name":
        grow(array, 24)
        publish(y=array)
    elif how == "a further memory":
        grow(array, 24)
        with made() as other:
            publish(x=array, y=other)
    elif how == "another shape":
        grow(array, 24)
        vram.publish("n", {"x": Array(array.region, "int64", (12, LANES * 2))}, writable=True, whole=True)
    elif how == "another dtype":
        grow(array, 24)
        vram.publish("n", {"x": Array(array.region, "uint64", (24, LANES))}, writable=True, whole=True)
    elif how == "lies elsewhere":
        grow(array, 24)
        vram.publish("n", {"x": Array(array.region, "int64", (8, LANES), offset=ROW)}, writable=True, whole=True)
    else:
        vram.remove("n")


REPLACED = [
    *("shrunk", "shrunk and grown anew", "copied", "read-only", "another array", "another name", "a further memory"),
    *("another shape", "another dtype", "lies elsewhere", "removed"),
]


@pytest.mark.parametrize("how", REPLACED)
def test_what_does_not_extend_it_is_refused_and_nothing_changes_i4(array: Array, how: str) -> None:
    with vram.attach("n", access="cow", growing=True) as lease:
        heard: list[object] = []
        lease.on_grow(heard.append)
        replaced(array, how)
        before = state(lease)
        for _ in range(2):
            with pytest.raises(NotFoundError if how == "removed" else MismatchError) as caught:
                lease.refresh()
            assert state(lease) == before
        if how != "removed":
            assert "upgrade" in str(caught.value)
            until(lambda: vram.statistics().leases == 1, what="the return of what was looked at")
            with lease.upgrade() as anew:
                assert anew.version == lease.version + 1
        assert heard == []


def test_without_addresses_it_is_refused_and_says_what_to_do(array: Array) -> None:
    with vram.attach("n") as lease:
        grow(array, 24)
        publish(x=array)
        before = state(lease)
        with pytest.raises(CapacityError, match="growing=True"):
            lease.refresh()
        assert state(lease) == before
        with lease.upgrade() as anew, pytest.raises(UsageError):
            vram.attach("n", growing="yes")  # type: ignore[arg-type]
        assert anew.is_closed


def test_asleep_it_is_refused_and_awake_it_goes_on(array: Array, lease: vram.Lease) -> None:
    one = lease["x"]
    vram.sleep([one], to=None, shared="unmap")
    grow(array, 24)
    publish(x=array)
    with pytest.raises(AsleepError):
        lease.refresh()
    assert vram.statistics().leases == 1
    vram.wake([one])
    assert lease.refresh() == ("x",)
    assert numbers(lease["x"]) == list(range(24))


def test_after_a_revoke_there_is_nothing_to_go_on_to(array: Array, lease: vram.Lease) -> None:
    told: list[vram.Lease] = []
    lease.on_revoke(told.append)
    vram.revoke("n", timeout=0)
    until(lambda: told == [lease], what="the revoke")
    with pytest.raises(NotFoundError):
        lease.refresh()
    assert lease.is_revoked()
    assert numbers(lease["x"]) == list(range(8))
    grow(array, 24)
    publish(x=array)
    assert lease.refresh() == ("x",)
    assert not lease.is_revoked()
    vram.revoke("n", timeout=0)
    until(lambda: told == [lease, lease], what="the revoke of the newer version")


def test_another_user_s_entry_is_none_to_go_on_to() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to be two users")
    with open_to_all() as path, made() as array:

        def theirs() -> int:
            with vram.empty((8, LANES), "int64", device="host") as other:
                return vram.publish("n", {"x": other}, writable=True, keeper=path).version

        vram.publish("n", {"x": array}, writable=True, keeper=path)
        with vram.attach("n", growing=True, keeper=path) as lease:
            vram.remove("n", keeper=path)
            as_user(OTHER, theirs)
            before = state(lease)
            with pytest.raises(MismatchError, match=f"belongs to uid {OTHER}"):
                lease.refresh()
            assert state(lease) == before
        close_client(path)


def test_i7_a_forked_child_has_no_lease_to_refresh(array: Array, lease: vram.Lease) -> None:
    grow(array, 24)
    publish(x=array)
    assert end_of(lambda: refused(lease.refresh)) == 1
    assert lease.refresh() == ("x",)


# -- bad days ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forever", [False, True])
@pytest.mark.parametrize("error", [None, OutOfMemoryError("no more", 12, "ENOMEM"), KeyboardInterrupt()])
def test_each_driver_call_fails_and_nothing_changes_i4(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None, forever: bool
) -> None:
    driver = FaultyDriver(HostDriver())
    monkeypatch.setitem(drivers._drivers, "host", driver)
    with made() as one, made() as two:
        publish(one=one, two=two)
        with vram.attach("n", growing=True) as lease:
            for array in (one, two):
                grow(array, 24)
            publish(one=one, two=two)
            before = state(lease)
            for nth in nths():
                with driver.inject({"mem_map_import", "mem_set_access"}, nth, error, forever=forever) as fault:
                    if not nth <= 4:
                        break
                    with pytest.raises(DriverError if error is None else type(error)):
                        lease.refresh()
                assert fault.fired
                assert state(lease) == before
                assert vram.statistics().leases == 1
            assert lease.refresh() == ("one", "two")
            assert driver.live().mappings == 12
            assert numbers(lease["two"]) == list(range(24))


PUBLISHER = """
import sys
import numpy as np
import vram
array = vram.empty((8, 32768), "int64", device="host", capacity=4096, chunk="2MiB")
array.numpy()[:, 0] = np.arange(8)
while True:
    vram.publish("n", {"x": array}, writable=True)
    before = len(array)
    print(before, flush=True)
    if before >= 4000:
        array.resize(8)
        before = 8
    array.resize(before + 8)
    array.numpy()[before:, 0] = np.arange(before, before + 8)
"""


def test_sigkill_of_the_publisher_while_a_reader_goes_on_with_it(kept: vram.Keeper) -> None:
    for round_ in range(5):
        publisher = subprocess.Popen([sys.executable, "-c", PUBLISHER], stdout=subprocess.PIPE)
        try:
            assert publisher.stdout is not None
            assert publisher.stdout.readline() == b"8\n"
            with vram.attach("n", growing=True) as lease:
                address = lease["x"].address
                for look in itertools.count():
                    if look == 3 * round_ + 2:
                        publisher.send_signal(signal.SIGKILL)
                        publisher.wait(SOON)
                        lease.refresh()  # to what it published last
                    lease.refresh()
                    assert numbers(lease["x"]) == list(range(len(lease["x"])))
                    if publisher.returncode is not None:
                        break
                assert lease["x"].address == address
                assert lease.refresh() == ()
                assert not lease.is_stale()
        finally:
            publisher.kill()
            publisher.communicate(timeout=SOON)
        vram.remove("n")


def test_the_next_keeper_may_have_the_same_memory_with_more_behind_it() -> None:
    with own_keeper() as keeper, made() as array:
        publish(x=array)
        with vram.attach("n", growing=True) as lease:
            address = lease["x"].address
            keeper.kill()
            with pytest.raises(PeerGoneError):
                lease.refresh()
            successor = KeeperProcess(keeper.path, [])
            try:
                with pytest.raises(NotFoundError):
                    lease.refresh()
                grow(array, 24)
                publish(x=array)
                assert lease.refresh() == ("x",)
                assert (lease["x"].address, numbers(lease["x"])) == (address, list(range(24)))
                assert vram.statistics().leases == 1
                lease.close()
                until(lambda: vram.statistics().leases == 0, what="the return of the lease")
            finally:
                close_client(keeper.path)
                successor.kill()


# -- being told -------------------------------------------------------------------------------------------------------


def test_a_reader_is_told_of_growth_and_may_go_on_in_the_callback(array: Array, lease: vram.Lease) -> None:
    heard: list[tuple[str, tuple[str, ...], int]] = []

    def grown(which: vram.Lease) -> None:
        assert which is lease
        heard.append((threading.current_thread().name, which.refresh(), len(which["x"])))

    lease.on_grow(grown)
    wanted = []
    for rows in (16, 24, 100):
        grow(array, rows)
        publish(x=array)
        wanted.append(("vram: revoked leases", ("x",), rows))
        until(lambda: len(heard) == len(wanted), what="the callback")
        assert heard == wanted
    assert numbers(lease["x"]) == list(range(100))
    assert vram.statistics().leases == 1


def test_a_reader_is_told_once_until_it_goes_on(array: Array, lease: vram.Lease) -> None:
    heard: list[int] = []
    lease.on_grow(lambda which: heard.append(which.version))
    first = lease.version
    for rows in (16, 24):
        grow(array, rows)
        publish(x=array)
    until(lambda: heard == [first], what="the callback")
    assert lease.refresh() == ("x",)
    grow(array, 32)
    publish(x=array)
    until(lambda: heard == [first, first + 2], what="the callback for the version that it went on to")
    late: list[vram.Lease] = []
    lease.on_grow(late.append)  # there is one already
    until(lambda: late == [lease], what="the callback of who came late")
    assert heard == [first, first + 2]


def test_who_is_told_is_refused_as_on_revoke(lease: vram.Lease) -> None:
    with pytest.raises(UsageError, match="callback"):
        lease.on_grow(3)  # type: ignore[arg-type]
    lease.close()
    with pytest.raises(ClosedError):
        lease.on_grow(print)


def test_the_descriptor_to_wait_on_is_a_new_one_after_going_on(array: Array, lease: vram.Lease) -> None:
    assert select.select([lease], [], [], 0)[0] == []
    grow(array, 16)
    publish(x=array)
    assert select.select([lease], [], [], SOON)[0] == [lease]
    lease.refresh()
    assert select.select([lease], [], [], 0)[0] == []
    publish(x=array)
    assert select.select([lease], [], [], SOON)[0] == [lease]
