"""Memory of cudaMalloc opened in another process by its 64 bytes: right bytes, opened once, closed at zero."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import pytest
from tests.support import transport_children as children
from tests.support.forked import end_of, refused
from tests.support.transports import answer, child

import standin
from vram import driver as drivers
from vram.arrays import Array
from vram.errors import DriverError, ProtocolError
from vram.sharing import IpcMemHandle, legacy_ipc
from vram.spec import Location

pytestmark = pytest.mark.standin
NBYTES = 1_000_003
KNOWN = (np.arange(NBYTES) % 251).astype("uint8")


@pytest.fixture(scope="module")
def owner() -> Iterator[Connection]:
    with child(children.owner, NBYTES, 0) as (_, pipe):
        assert answer(pipe) == "here"
        yield pipe


def handle_of(owner: Connection, inside: int = 0) -> tuple[IpcMemHandle, int]:
    """The handle as it arrives, and the bytes from there to the end."""
    owner.send(("handle", inside))
    data, offset, nbytes, _ = answer(owner)
    return IpcMemHandle.from_bytes(data, offset=offset), nbytes


def bytes_at(address: int, nbytes: int) -> bytes:
    """What the driver finds at an address."""
    out = bytearray(nbytes)
    with memoryview(out) as view:
        drivers.get(Location("cuda")).copy_out(view, address)
    return bytes(out)


def opened() -> tuple[int, int]:
    """Calls of the driver that open, since the last look, and what is open now."""
    control = standin.Standin()
    return control.calls("cuIpcOpenMemHandle"), control.live().get("ipc_opens", 0)


@pytest.fixture(autouse=True)
def clear() -> None:
    standin.Standin().clear()


@pytest.mark.parametrize("inside", [0, 1, 70_001, NBYTES - 1])
@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_the_bytes_at_an_interior_address(owner: Connection, inside: int, device: str) -> None:
    handle, nbytes = handle_of(owner, inside)
    assert nbytes == NBYTES - inside
    with handle.open(nbytes, device=device) as memory:
        assert (memory.nbytes, memory.address) == (nbytes, memory.region.address + inside)
        with Array(memory.region, "uint8", nbytes, offset=inside) as array:
            assert (array.to_host() == KNOWN[inside:]).all()
        assert str(memory.region.location) == device
        assert repr(memory).startswith(f"<OpenedMemory {device} 0x")
    assert memory.is_closed
    assert opened() == (1, 0)


def test_what_a_handle_says_of_itself_is_taken_and_checked(owner: Connection) -> None:
    handle, nbytes = handle_of(owner, 9)
    with IpcMemHandle(handle.data, 9, 100).open() as memory:
        assert memory.nbytes == 100
    with pytest.raises(ProtocolError, match=str(NBYTES)):
        IpcMemHandle(handle.data, 9, nbytes + 1).open()


def test_an_offset_beyond_the_end_is_refused(owner: Connection) -> None:
    handle, _ = handle_of(owner)
    for beyond in (NBYTES, 1 << 40):
        with pytest.raises(ProtocolError, match=f"nothing is at offset {beyond}: the allocation has {NBYTES} bytes"):
            IpcMemHandle.from_bytes(handle.data, offset=beyond).open()
    assert opened()[1] == 0


def test_opened_twice_is_opened_once_and_closed_at_zero(owner: Connection) -> None:
    handle, nbytes = handle_of(owner)
    inside, rest = handle_of(owner, 4097)
    assert handle.to_bytes() == inside.to_bytes()
    one, two = handle.open(nbytes), inside.open(rest)
    assert two.address == one.address + 4097
    assert opened() == (1, 1)
    one.close()
    one.close()
    assert opened() == (1, 1)
    with Array(two.region, "uint8", 3, offset=4097) as array:
        assert (array.to_host() == KNOWN[4097:4100]).all()
    two.close()
    assert opened() == (1, 0)
    with handle.open(nbytes):
        assert opened() == (2, 1)
    assert opened() == (2, 0)


def test_on_another_gpu_it_is_another_opening(owner: Connection) -> None:
    handle, nbytes = handle_of(owner)
    with handle.open(nbytes, device="cuda:0") as one, handle.open(nbytes, device="cuda:1") as two:
        assert one.region is not two.region
        assert opened() == (2, 2)
    assert opened() == (2, 0)


def test_i6_an_array_keeps_it_open_and_so_it_is_not_opened_again(owner: Connection) -> None:
    handle, nbytes = handle_of(owner)
    with handle.open(nbytes) as memory:
        array = Array(memory.region, "uint8", 100, offset=7)
    assert opened() == (1, 1)
    assert bytes_at(array.address, 100) == KNOWN[7:107].tobytes()
    with handle.open(nbytes) as memory:
        assert memory.address == array.address - 7
        assert opened() == (1, 1)
        array.close()
        assert opened() == (1, 1)
        with Array(memory.region, "uint8", nbytes) as whole:
            assert (whole.to_host() == KNOWN).all()
    assert opened() == (1, 0)


def test_more_of_it_than_the_first_time(owner: Connection) -> None:
    handle, nbytes = handle_of(owner)
    with handle.open(10) as little, handle.open(nbytes) as much:
        assert little.address == much.address
        with Array(much.region, "uint8", nbytes) as array:
            assert (array.to_host() == KNOWN).all()
        with handle.open(5) as least:
            assert least.address == much.address
            assert opened() == (1, 1)
        little.close()
        with Array(much.region, "uint8", 1, offset=nbytes - 1) as array:
            assert array.to_host()[0] == KNOWN[-1]
    assert opened()[1] == 0


def test_changed_bytes_are_refused_or_harmless(owner: Connection) -> None:
    """S7. Measured: nobody checks where in its block the allocation begins, so that may open what is not there."""
    handle, nbytes = handle_of(owner)
    for at in range(0, 64, 5):
        changed = bytearray(handle.to_bytes())
        changed[at] ^= 0x55
        try:
            memory = IpcMemHandle.from_bytes(changed).open(nbytes)
        except ProtocolError:
            continue
        with memory:
            try:
                assert bytes_at(memory.address, nbytes) == KNOWN.tobytes()  # a byte that means nothing
            except DriverError:
                assert 28 <= at < 32
    assert opened()[1] == 0


def test_i7_nothing_is_open_in_the_child_of_a_fork(owner: Connection) -> None:
    handle, nbytes = handle_of(owner)
    with handle.open(nbytes) as memory, legacy_ipc._openings.lock:

        def work() -> int:
            count = refused(lambda: memory.handle) + len(legacy_ipc._openings.known)
            memory.close()
            return count

        assert end_of(work) == 1
        assert opened()[1] == 1
