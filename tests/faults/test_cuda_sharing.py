"""Publishing and attaching arrays on a GPU with every call of NVIDIA's driver failing in turn, on the stand-in (I4)."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.support.deadlines import until
from tests.support.places import private_socket
from tests.support.samples import least, nths
from tests.support.stuck import take_back_what_is_stuck

import standin
import vram
from vram import driver as drivers
from vram import lifetime
from vram.arrays.upload import ring_of
from vram.errors import ReleaseWarning, VramError
from vram.keeper.client import KeeperClient, close_client
from vram.spec import Location

pytestmark = pytest.mark.standin
GPU = Location("cuda", 0)


@pytest.fixture(scope="module")
def socket() -> Iterator[str]:
    with private_socket() as path:
        yield path


@pytest.fixture
def keeper(socket: str) -> Iterator[vram.Keeper]:
    yield vram.Keeper(socket)
    gc.collect()
    close_client(socket)
    with KeeperClient.connect(socket, label="cleaner") as cleaner:
        until(lambda: not cleaner.statistics().leases, what="the return of every lease")
        for entry in cleaner.list():
            cleaner.remove(entry.name)
        until(lambda: not cleaner.statistics().nbytes, what="the end of every entry")


def counts() -> object:
    now = standin.Standin().live()
    # Memory that a descriptor keeps, wherever that is, stays as long as the keeper has it.
    return drivers.get(GPU).live(), {k: n for k, n in now.items() if not k.startswith(("context", "pinned"))}


def each_failure(act: Callable[[], object], code: int) -> Iterator[bool]:
    """Run something with the first call failing, then the second and so on; yield whether it raised, until none did."""
    from cuda.bindings import driver as api

    for nth in nths():
        before = counts()
        raised: VramError | None = None
        with warnings.catch_warnings(record=True) as warned, standin.Standin().failing("*", nth, code) as control:
            warnings.simplefilter("always")
            try:
                act()
            except VramError as error:
                raised = error.with_traceback(None)
                raised.__context__ = None
            played = control.faults_played()
            gc.collect()
        assert {warning.category for warning in warned} <= {ReleaseWarning}
        assert len(warned) == len(lifetime.stuck())  # a close never raises
        take_back_what_is_stuck()
        while int(api.cuCtxGetCurrent()[1]):  # a pop that failed leaves a context current; nobody can help that
            api.cuCtxPopCurrent()
        yield raised is not None
        if raised is not None:
            assert played
            assert counts() == before, f"call {nth}: {raised}"
        if not played:
            return


@pytest.mark.parametrize("code", [1, 2, 999])
def test_publishing(keeper: vram.Keeper, code: int) -> None:
    with vram.zeros((64, 64), dtype="int32", device="cuda:0") as array:
        array[0] = 5
        array.region.segments(0, 1)  # from now on the memory has a handle of its own, until it is unmapped
        names = (f"name{n}" for n in itertools.count())
        failed = 0
        for raised in each_failure(lambda: vram.publish(next(names), {"a": array}, keeper=keeper), code):
            failed += raised
            if raised:
                assert not keeper_names(keeper), "an entry that was not published"
        assert failed
        (name,) = keeper_names(keeper)
        with vram.attach(name, keeper=keeper) as lease:
            assert (lease["a"][0].to_host() == 5).all()


@pytest.mark.parametrize("code", [1, 2, 999])
@pytest.mark.parametrize("device", [None, "cuda:1"])
def test_attaching(keeper: vram.Keeper, code: int, device: str | None) -> None:
    with vram.zeros((64, 64), dtype="int32", device="cuda:0") as array:
        array[0] = 5
        vram.publish("there", {"a": array, "b": np.arange(5)}, keeper=keeper)

    def attach() -> None:
        with vram.attach("there", keeper=keeper, device=device) as lease:
            seen.append(lease["a"].to_host()[0, 0])

    seen: list[int] = []
    failed = sum(each_failure(attach, code))
    assert failed >= least(4)
    assert set(seen) == {5}


@pytest.mark.parametrize("code", [1, 2, 999])
@pytest.mark.parametrize("verb", ["park", "wake"])
def test_parking_and_waking_change_all_or_nothing_i13(keeper: vram.Keeper, verb: str, code: int) -> None:
    with vram.zeros((2, 1 << 19), "int32", device="cuda:0", chunk="2MiB") as array:
        array[:] = np.arange(2, dtype="int32")[:, None] + 5
        vram.publish("there", {"a": array[0], "b": array[1]}, keeper=keeper)
    ring_of(drivers.get(GPU), GPU)  # it is kept: what fails where it is made is tried with it
    if verb == "wake":
        vram.park("there", keeper=keeper)

    def act() -> None:
        if verb == "park":
            vram.park("there", keeper=keeper, timeout=0)
        else:
            vram.attach("there", keeper=keeper, wake=True).close()

    def state() -> tuple[bool, int, int, int]:
        (entry,) = vram.list_entries(keeper=keeper)
        return entry.parked, entry.readers, entry.nbytes, vram.statistics(keeper=keeper).nbytes

    size, failed = 4 << 20, 0
    for raised in each_failure(act, code):
        parked = state()[0]
        assert state() == (parked, 0, size, size)
        # A wake that came about may be followed by an attach that does not.
        assert raised or parked is (verb == "park")
        failed += raised
        with vram.attach("there", keeper=keeper, wake=True) as lease:
            assert (lease["a"].to_host() == 5).all()
            assert (lease["b"].to_host() == 6).all()
        del lease
        gc.collect()
        if raised and verb == "wake":
            vram.park("there", keeper=keeper)
    assert failed >= least(4)


@pytest.mark.parametrize("code", [2, 999])
@pytest.mark.parametrize("verb", ["sleep", "wake", "wake parked"])
def test_a_lease_sleeps_or_wakes_all_or_nothing_i13(keeper: vram.Keeper, verb: str, code: int) -> None:
    with vram.zeros((2, 1 << 19), "int32", device="cuda:0", chunk="2MiB") as array:
        array[:] = np.arange(2, dtype="int32")[:, None] + 5
        vram.publish("there", {"a": array[0], "b": array[1]}, keeper=keeper)
    ring_of(drivers.get(GPU), GPU)
    failed = 0
    with vram.attach("there", keeper=keeper) as lease:
        addresses = [one.address for one in lease.values()]

        def prepare() -> None:
            lease.wake()
            if verb != "sleep":
                lease.sleep()
            if verb == "wake parked":
                vram.park("there", keeper=keeper, timeout=0)

        prepare()
        for raised in each_failure(lambda: lease.sleep() if verb == "sleep" else lease.wake(), code):
            (holder,) = vram.holders(keeper=keeper)
            assert holder.is_asleep is (lease.nbytes == 0)
            # Memory that is brought back and cannot be mapped here stays where it was brought.
            assert raised or holder.is_asleep is (verb == "sleep")
            failed += raised
            lease.wake()
            assert [one.address for one in lease.values()] == addresses
            assert [int(one.to_host().flat[0]) for one in lease.values()] == [5, 6]
            if raised:
                prepare()
    assert failed >= least(2)


def keeper_names(keeper: vram.Keeper) -> list[str]:
    with KeeperClient.connect(keeper.path, label="looker") as client:
        return [entry.name for entry in client.list()]
