"""Owned pools, their memory here and in another process, on the stand-in."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.support.faulty_driver import FaultyDriver
from tests.support.other_process import OtherProcess
from tests.support.raw_cuda import Maker

import standin
import vram
from vram import driver as drivers
from vram import lifetime
from vram.arrays import Array
from vram.errors import (
    BusyError,
    ClosedError,
    ForkedError,
    LeakWarning,
    OutOfMemoryError,
    ProtocolError,
    ReadOnlyError,
    ReleaseWarning,
    UnsupportedError,
    UsageError,
)
from vram.lifetime import live, own
from vram.memory import Pool
from vram.spec import HOST, Access, HandleKind, Location

pytestmark = [pytest.mark.slow, pytest.mark.standin]  # goes with owned memory pools
HERE = Location("cuda", 0)
FD = HandleKind.POSIX_FD
SIZE = 1 << 20


@pytest.fixture
def driver() -> Any:
    return drivers.get(HERE)


@pytest.fixture
def pool(driver: Any) -> Iterator[Pool]:
    with Pool.create(driver, "cuda:0") as made:
        yield made


@pytest.fixture(scope="module")
def neighbour() -> Iterator[OtherProcess]:
    with OtherProcess(Maker) as other:
        yield other


class Theirs(NamedTuple):
    """A pool of the other process, and two allocations of it."""

    fd: int
    tokens: list[bytes]
    addresses: list[int]


@pytest.fixture
def theirs(neighbour: OtherProcess) -> Iterator[Theirs]:
    pool = neighbour.call("pool_create", HERE, FD)
    addresses = [neighbour.call("pool_allocate", pool, SIZE, 1) for _ in range(2)]
    number = neighbour.call("pool_export", pool, FD)
    fd = neighbour.take_fd(number)
    neighbour.close_fd(number)
    yield Theirs(fd, [neighbour.call("pool_export_pointer", address) for address in addresses], addresses)
    os.close(fd)
    for address in addresses:
        neighbour.call("pool_free", address, 1)
    neighbour.call("pool_destroy", pool)


@pytest.fixture
def imported(driver: Any, theirs: Theirs) -> Iterator[Pool]:
    with Pool.import_(driver, theirs.fd, HERE) as made:
        yield made


def seen(driver: Any, address: int, nbytes: int) -> bytes:
    found = bytearray(nbytes)
    driver.copy_out(memoryview(found), address)
    return bytes(found)


# -- of this process ------------------------------------------------------------------------------------------------
def test_arrays_lie_on_it(pool: Pool) -> None:
    region = pool.allocate("1MiB")
    assert (region.nbytes, region.made_by, region.kinds, region.location) == (SIZE, "pool", HandleKind.POOL, HERE)
    (info,) = region.infos
    assert info.pool == pool.driver_pool
    assert info.identity
    array = Array(region, "float32", (64, 64), offset=256)
    del region, info  # the array keeps it (I6)
    array[:] = np.arange(4096, dtype="float32").reshape(64, 64)
    assert array.to_host()[63, 63] == 4095
    part = array[3:5]
    array.close()
    assert part.to_host()[1, 0] == 256
    part.close()


def test_what_it_says_of_itself(driver: Any, pool: Pool) -> None:
    assert (pool.driver, pool.location, pool.handle_kinds, pool.is_imported) == (driver, HERE, FD, False)
    assert repr(pool) == "<Pool cuda:0, posix_fd>"
    with Pool.create(driver, HERE, handle_kinds=HandleKind.NONE) as private:
        assert repr(private) == "<Pool cuda:0, none>"
        with private.allocate(100) as region:
            assert region.kinds == HandleKind.NONE
        with pytest.raises(UsageError, match="at creation"):
            private.export()
    assert repr(private) == "<Pool cuda:0, none, closed>"
    for use in (lambda: private.allocate(1), private.export, lambda: private.driver_pool):
        with pytest.raises(ClosedError):
            use()
    private.close()


def test_mistakes_are_refused(driver: Any, pool: Pool) -> None:
    for nbytes in (0, -1, "much", None, 1.5):
        with pytest.raises(UsageError, match="nbytes"):
            pool.allocate(nbytes)
    for stream in (-1, "1", None):
        with pytest.raises(UsageError, match="stream"):
            pool.allocate(1, stream)
    with pytest.raises(UsageError, match="no stream"):
        pool.allocate(1, 12345)
    with pytest.raises(OutOfMemoryError):
        pool.allocate(1 << 50)
    with pytest.raises(UsageError, match="own"):
        pool.open(bytes(64), SIZE)
    for place in ("host", "cuda:99", "cuda:host"):
        with pytest.raises(UsageError):
            Pool.create(driver, place)
    with pytest.raises(UnsupportedError):
        Pool.create(driver, HERE, handle_kinds=HandleKind.WIN32)
    for fd, error in ((-1, UsageError), ("3", UsageError), (1 << 20, UsageError)):
        with pytest.raises(error):
            Pool.import_(driver, fd, HERE)
    with open(os.devnull) as null, pytest.raises(ProtocolError):
        Pool.import_(driver, null.fileno(), HERE)
    with pool.allocate(100) as region:
        for change in (lambda: region.grow(200), lambda: region.shrink(1), lambda: region.resize(5)):
            with pytest.raises(UsageError, match="belongs to others"):
                change()


def test_the_host_has_no_pools() -> None:
    host = drivers.get(HOST)
    for make in (lambda: Pool.create(host, HOST), lambda: Pool.import_(host, 0, HOST)):
        with pytest.raises(UnsupportedError, match="host driver"):
            make()


def test_the_descriptor_is_lent_and_made_once(pool: Pool) -> None:
    fd = pool.export()
    assert pool.export() == fd
    assert not os.get_inheritable(fd)
    assert "exported" in repr(pool)
    pool.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_what_a_stream_does_is_done_before_it_is_freed(driver: Any, pool: Pool) -> None:
    control = standin.Standin()
    control.clear()
    stream = driver.stream_create(HERE)
    control.defer()
    try:
        region = pool.allocate(SIZE, stream)
        driver.fill_async(region.address, 7, SIZE, stream)
        region.close()
    finally:
        control.defer(False)
    assert control.illegal() == 0
    driver.stream_destroy(stream)


def test_i1_memory_goes_before_its_pool(driver: Any) -> None:
    faulty = FaultyDriver(driver)
    pool = Pool.create(faulty, HERE)
    regions = [pool.allocate(1000) for _ in range(3)]
    fd = pool.export()
    with pytest.raises(BusyError, match="pool memory"):
        pool.close(strict=True)
    pool.close()
    os.fstat(fd)
    faulty.clear()
    array = Array(regions[1], "u1", (10,))
    for region in regions:
        region.close()
    assert faulty.count("pool_free") == 2
    array.close()
    undone = [call for call in faulty.calls if call in ("pool_free", "pool_destroy", "synchronize")]
    assert undone == ["synchronize", "pool_free"] * 3 + ["pool_destroy"]
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_i1_in_a_collected_cycle_too(driver: Any) -> None:
    faulty = FaultyDriver(driver)

    class Knot:
        def __init__(self) -> None:
            self.me = self
            self.pool = Pool.create(faulty, HERE)
            self.array = Array(self.pool.allocate(1000), "u1", (10,))

    def litter() -> None:
        Knot()
        gc.collect()

    with pytest.warns(LeakWarning, match="pool on cuda:0 was not closed"):
        litter()
    assert [call for call in faulty.calls if call in ("pool_free", "pool_destroy")] == ["pool_free", "pool_destroy"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_i7_in_a_forked_child_it_is_inert(pool: Pool) -> None:
    region = pool.allocate(1000)
    with pool._lock:  # as if another thread had been in it
        pid = os.fork()
        if not pid:
            code = 1
            try:
                for use in (lambda: pool.allocate(1), pool.export, lambda: region.pin(0, 1), lambda: pool.driver_pool):
                    with pytest.raises(ForkedError):
                        use()
                region.close()
                pool.close()
                code = 0
            finally:
                os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert pool.export() > 0
    region.close()


# -- of another process ---------------------------------------------------------------------------------------------
def test_what_another_process_allocated(driver: Any, neighbour: OtherProcess, theirs: Theirs, imported: Pool) -> None:
    assert repr(imported) == "<Pool cuda:0, none, imported>"
    neighbour.write(theirs.addresses[0], b"from there")
    region = imported.open(bytearray(theirs.tokens[0]), SIZE, access=Access.READ)
    assert (region.nbytes, region.made_by, region.kinds, region.access) == (SIZE, "opened", 0, Access.READ)
    array = Array(region, "u1", (16,))
    assert array.to_host().tobytes()[:10] == b"from there"
    with imported.open(theirs.tokens[1], SIZE) as second:
        driver.copy_in(second.address, memoryview(b"from here"))
    assert neighbour.read(theirs.addresses[1], 9) == b"from here"
    with pytest.raises(UsageError, match="only its maker"):
        imported.allocate(100)
    with pytest.raises(UsageError, match="which alone hands it on"):
        imported.export()
    del region
    imported.close()
    assert array.to_host().tobytes()[:10] == b"from there"
    array.close()


def test_an_allocation_is_never_opened_twice(driver: Any, theirs: Theirs, imported: Pool) -> None:
    """Each opening has a region object and a claim of its own; the last one out closes it."""
    first = imported.open(theirs.tokens[0], SIZE)
    second = imported.open(theirs.tokens[0], SIZE, access=Access.READ)
    third = imported.open(theirs.tokens[0], SIZE)
    assert first.address == second.address == third.address
    assert len({id(first), id(second), id(third)}) == 3
    assert len(driver._pointers) == 1
    assert (first.access, second.access) == (Access.READ_WRITE, Access.READ)
    first.close()
    array = Array(second, "u1", (4,))
    del second
    third.close()
    fourth = imported.open(theirs.tokens[0], SIZE)  # the array has it open
    with pytest.raises(ReadOnlyError, match="read-only"):  # one object's word is not the other's
        array.fill(5)
    driver.fill(fourth.address, 5, 4)
    assert array.to_host().tolist() == [5, 5, 5, 5]
    array.close()
    assert seen(driver, fourth.address, 4) == b"\5\5\5\5"
    fourth.close()
    assert not driver._pointers
    with imported.open(theirs.tokens[0], SIZE) as again:
        assert seen(driver, again.address, 4) == b"\5\5\5\5"
    assert not driver._pointers


def test_nothing_a_peer_says_is_believed(theirs: Theirs, imported: Pool) -> None:
    token = theirs.tokens[0]
    wrong = (b"", token[:-1], token + b"x", bytes(64), b"\xa5" * 64, token.hex(), None)
    for data in wrong:
        with pytest.raises(ProtocolError):
            imported.open(data, SIZE)
    for nbytes, error in ((2 * SIZE, ProtocolError), (0, ProtocolError), (-1, UsageError), ("x", UsageError)):
        with pytest.raises(error):
            imported.open(token, nbytes)
    with imported.open(token, SIZE) as region:
        with pytest.raises(ProtocolError, match="before that"):
            imported.open(token, SIZE - 1)
        with pytest.raises(UsageError, match="access"):
            imported.open(token, SIZE, access=3)
        assert region.nbytes == SIZE


def test_i11_what_would_crash_the_driver_is_refused_before_it(imported: Pool, theirs: Theirs) -> None:
    control = standin.Standin()
    control.clear()
    for nbytes in ((5 << 30) + 1, 8 << 30, 1 << 60):
        with pytest.raises(UnsupportedError, match="crashes whoever opens it"):
            imported.open(theirs.tokens[0], nbytes)
    assert (control.calls("cuMemPoolImportPointer"), control.would_crash()) == (0, 0)


def test_i11_memory_of_a_pool_that_would_crash_its_borrower_is_not_lent(driver: Any, tmp_path: Path) -> None:
    """Of a pool of ours as of another library's: before a peer is involved (S3)."""
    one, other = vram.ArrayChannel.pair()
    with Pool.create(driver, HERE) as pool, pool.allocate((5 << 30) + 1) as region, one, other:
        with Array(region, "uint8", (100,)) as array:
            assert "crashes whoever opens it" in str(vram.explain(array))
            for way in (lambda: vram.lend(array, at=tmp_path / "lent"), lambda: one.send(array)):
                with pytest.raises(UnsupportedError, match="crashes whoever opens it"):
                    way()
    assert not (tmp_path / "lent").exists()


def test_what_must_outlive_it_does(theirs: Theirs, imported: Pool) -> None:
    log: list[str] = []
    leases = [own(f"lease {n}", lambda n=n: log.append(f"lease {n}")) for n in (1, 2)]
    regions = [imported.open(theirs.tokens[0], SIZE, depends=(lease.handle,)) for lease in leases]
    for lease in leases:
        lease.release()
    assert log == []
    regions[1].close()
    assert log == ["lease 2"]
    regions[0].close()
    assert log == ["lease 2", "lease 1"]
    with imported.open(theirs.tokens[0], SIZE), pytest.raises(ClosedError, match="lease 1"):
        imported.open(theirs.tokens[0], SIZE, depends=(leases[0].handle,))
    with pytest.raises(ClosedError, match="lease 1"):
        imported.open(theirs.tokens[0], SIZE, depends=(leases[0].handle,))


def test_opened_while_another_thread_closes_it(driver: Any, theirs: Theirs) -> None:
    """It waits until it is closed, and opens it anew; the driver never has it twice."""
    faulty = FaultyDriver(driver)
    entered, leave = threading.Event(), threading.Event()
    with Pool.import_(faulty, theirs.fd, HERE) as imported:
        region = imported.open(theirs.tokens[0], SIZE)

        def slowly(*_: object) -> None:
            entered.set()
            leave.wait(120)

        real = faulty.inner
        faulty.inner = _With(real, synchronize=slowly)
        closer = threading.Thread(target=region.close)
        closer.start()
        assert entered.wait(120)
        faulty.inner = real
        found: list[Any] = []
        opener = threading.Thread(target=lambda: found.append(imported.open(theirs.tokens[0], SIZE)))
        opener.start()
        deadline = time.monotonic() + 30
        while not _waits(imported) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not found
        leave.set()
        closer.join(120)
        opener.join(120)
        assert len(found) == len(driver._pointers) == 1
        seen(driver, found[0].address, 1)
        found[0].close()


def test_what_could_not_be_closed_is_not_opened_again(
    driver: Any, theirs: Theirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vram.memory.pool._PATIENCE", 0.05)
    faulty = FaultyDriver(driver)
    with Pool.import_(faulty, theirs.fd, HERE) as imported:
        region = imported.open(theirs.tokens[0], SIZE)
        with faulty.inject("pool_close_pointer"), pytest.warns(ReleaseWarning, match="could not take back"):
            region.close()
        with pytest.raises(BusyError, match="does not come to an end"):
            imported.open(theirs.tokens[0], SIZE)
        (handle,) = lifetime.stuck()
        lifetime._stuck.clear()
        handle._undo()  # type: ignore[misc]
        lifetime._released.extend((other, serial) for serial, other in reversed(handle._depends.items()))
        lifetime._settle()
        imported.open(theirs.tokens[0], SIZE).close()


def _waits(pool: Pool) -> bool:
    """Whether a thread is in open()."""
    if pool._lock.acquire(blocking=False):
        pool._lock.release()
        return False
    return True


class _With:
    """A driver with some of its methods done in another way."""

    def __init__(self, inner: Any, **methods: Any) -> None:
        self.__dict__.update(methods, inner=inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_threads_open_and_close_the_same_allocation(driver: Any, theirs: Theirs, imported: Pool) -> None:
    wrong: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(40):
                with imported.open(theirs.tokens[0], SIZE) as region:
                    seen(driver, region.address, 1)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong
    assert not driver._pointers


def test_i2_forgotten_regions_give_everything_back(driver: Any, theirs: Theirs, imported: Pool) -> None:
    before = {handle.label for handle in live()}
    Array(imported.open(theirs.tokens[0], SIZE), "u1", (9,))
    imported.open(theirs.tokens[0], SIZE)
    gc.collect()
    assert not driver._pointers
    assert {handle.label for handle in live()} == before


def test_the_names_people_type() -> None:
    assert vram.memory.Pool is Pool
    assert vram.memory.Event is vram.memory.Event
