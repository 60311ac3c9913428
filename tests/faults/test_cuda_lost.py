"""A GPU that is lost, forks, and the end of the interpreter, on the stand-in.

Each in a process of its own, since nothing of the driver works there any more afterwards.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import standin

pytestmark = pytest.mark.standin

BEGIN = """
import gc, os, sys, warnings
warnings.simplefilter("error")
sys.path.insert(0, {tests!r})
import standin, numpy as np
from vram import driver as drivers, lifetime
from vram.arrays import Array
from vram.errors import *
from vram.memory import *
from vram.spec import Access, HandleKind, Location
G = 2 << 20
GPU, OTHER = Location("cuda", 0), Location("cuda", 1)
cuda = drivers.get(GPU)
control = standin.Standin()
def refused(kind, call, *arguments, **options):
    try:
        call(*arguments, **options)
    except kind as error:
        return error
    raise SystemExit(f"{{call}} did not raise {{kind.__name__}}")
"""


def child(script: str, **settings: object) -> str:
    """Run a script in a process of its own, which must end well and say nothing on its error stream."""
    begin = BEGIN.format(tests=str(Path(standin.__file__).parents[1]))
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", begin + textwrap.dedent(script)],
        capture_output=True, text=True, timeout=300, check=False, env=standin.child_environment(**settings),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr + done.stdout
    return done.stdout


EVERYTHING = """
    allocation = PhysicalAllocation.create(cuda, G, GPU)
    reservation = AddressReservation.reserve(cuda, 4 * G)
    mapping = MemoryMapping.map(reservation, 0, allocation)
    region = Region.create(GPU, driver=cuda, capacity=8 * G, nbytes=2 * G, chunk=G, users=[GPU, OTHER])
    array = Array.create(cuda, GPU, (64, 4), "int32")
    capsule = array.__dlpack__(stream=-1)
    stream, event = cuda.stream_create(GPU), cuda.event_create(GPU)
    page = np.zeros(8192, "uint8")
    cuda.host_register(page.ctypes.data, 8192, GPU)
    fd = allocation.export()
"""


@pytest.mark.parametrize("code", [700, 719, 214])
def test_a_lost_device_poisons_the_driver_and_closes_are_silent(code: int) -> None:
    """The first failure is named by every later one, at once: the driver is not asked any more."""
    said = child(
        EVERYTHING
        + f"""
    control.fail("*", code={code}, forever=True)
    first = refused(DeviceLostError, array.to_host)
    assert first.code == {code} and "new" in str(first), first
    control.clear()  # even if it seemed to work again
    again = [
        refused(DeviceLostError, cuda.mem_create, G, GPU, HandleKind.POSIX_FD),
        refused(DeviceLostError, cuda.mem_create, G, OTHER, HandleKind.POSIX_FD),
        refused(DeviceLostError, cuda.address_reserve, G),
        refused(DeviceLostError, cuda.mem_import, fd, HandleKind.POSIX_FD, G),
        refused(DeviceLostError, mapping.set_access, Access.READ, [GPU, OTHER]),
        refused(DeviceLostError, cuda.mem_get_access, mapping.address, GPU),
        refused(DeviceLostError, cuda.mem_retain, mapping.address),
        refused(DeviceLostError, cuda.mem_map, reservation.address + G, G, 0, allocation.driver_handle),
        refused(DeviceLostError, region.grow, 4 * G),
        refused(DeviceLostError, array.fill, 3),
        refused(DeviceLostError, cuda.copy, region.address, mapping.address, 64),
        refused(DeviceLostError, cuda.synchronize, GPU),
        refused(DeviceLostError, cuda.mem_info, OTHER),
        refused(DeviceLostError, cuda.stream_create, GPU),
        refused(DeviceLostError, cuda.stream_synchronize, stream, GPU),
        refused(DeviceLostError, cuda.event_is_done, event),
        refused(DeviceLostError, cuda.event_record, event, stream),
        refused(DeviceLostError, cuda.ordinal_of, mapping.address),
        refused(DeviceLostError, cuda.support, GPU),
        refused(DeviceLostError, Array.create, cuda, GPU, 9, "int8"),
    ]
    for error in again:
        assert error.code == {code} and first.call in str(error) and "process" in str(error), error
    assert sum(control.called().values()) == 0, control.called()
    # Closing is silent (warnings are errors here), and the books are right in the end.
    with region:
        region.shrink(1)
    cuda.stream_destroy(stream)
    cuda.event_destroy(event)
    cuda.host_unregister(page.ctypes.data)
    for thing in (mapping, array, allocation, reservation):
        thing.close()
    del capsule
    gc.collect()
    left = cuda.live()
    assert (left.reservations, left.handles, left.mappings, left.nbytes) == (0, 0, 0, 0), left
    assert not lifetime.stuck() and not lifetime.live(), lifetime.live()
    assert sum(control.called().values()) == 0, control.called()
    print("done")
    """
    )
    assert said == "done\n"


def test_a_device_can_be_lost_while_things_are_closed_and_unwound() -> None:
    """Whoever finds out first: nothing is said by a close, and an error that is unwound stays the first."""
    said = child(
        """
    region = Region.create(GPU, driver=cuda, capacity=8 * G, nbytes=2 * G, chunk=G)
    control.fail("cuMemUnmap", code=719, forever=True)
    region.close()
    assert cuda.live().mappings == 0 and not lifetime.stuck()
    error = refused(DeviceLostError, cuda.mem_create, G, GPU, HandleKind.POSIX_FD)
    assert "cuMemUnmap" in str(error), error
    print("done")
    """
    )
    assert said == "done\n"


def test_a_loss_in_the_middle_of_a_call_is_the_error_of_that_call() -> None:
    said = child(
        """
    control.fail("cuMemSetAccess", code=702, forever=True)
    error = refused(DeviceLostError, Region.create, GPU, driver=cuda, capacity=8 * G, nbytes=2 * G, chunk=G)
    assert error.call == "cuMemSetAccess" and error.code == 702 and not hasattr(error, "__notes__"), error
    left = cuda.live()
    assert (left.reservations, left.handles, left.mappings) == (0, 0, 0), left
    from cuda.bindings import driver as api
    assert int(api.cuCtxGetCurrent()[1]) == 0
    print("done")
    """
    )
    assert said == "done\n"


def test_the_context_of_the_thread_comes_back_from_a_lost_device() -> None:
    said = child(
        """
    from cuda.bindings import driver as api
    mine = api.cuDevicePrimaryCtxRetain(1)[1]
    api.cuCtxPushCurrent(mine)
    with Array.create(cuda, GPU, 64, "int8") as array:
        control.fail("cuMemcpyDtoHAsync", code=700)
        refused(DeviceLostError, array.to_host)
        assert int(api.cuCtxGetCurrent()[1]) == int(mine)
    print("done")
    """
    )
    assert said == "done\n"


def test_a_device_of_somebody_else_and_ordinary_errors_do_not_poison() -> None:
    said = child(
        """
    for code in (1, 2, 46, 101, 201, 709, 720, 999, 4711):
        control.fail("cuMemCreate", code=code)
        error = refused(DriverError, cuda.mem_create, G, GPU, HandleKind.POSIX_FD)
        assert not isinstance(error, DeviceLostError), error
    cuda.mem_release(cuda.mem_create(G, GPU, HandleKind.POSIX_FD))
    print("done")
    """
    )
    assert said == "done\n"


def test_a_forked_child_owns_nothing_and_is_told_so_i7() -> None:
    said = child(
        EVERYTHING
        + """
    before = dict(control.live())
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        try:
            errors = [
                refused(ForkedError, allocation.export),
                refused(ForkedError, mapping.set_access, Access.READ),
                refused(ForkedError, region.grow, 4 * G),
                refused(ForkedError, array.to_host),
                refused(ForkedError, Array.create, cuda, GPU, 4, "int8"),
                refused(ForkedError, cuda.mem_create, G, GPU, HandleKind.POSIX_FD),
                refused(ForkedError, cuda.stream_create, GPU),
                refused(ForkedError, cuda.copy_out, memoryview(bytearray(4)), array.address),
                refused(ForkedError, type(cuda)),
            ]
            for error in errors:
                assert "spawn" in str(error), error
            for thing in (mapping, region, array, allocation, reservation):
                thing.close()
            del capsule, mapping, region, array, allocation, reservation
            gc.collect()
        except BaseException as error:
            print("child:", repr(error))
            sys.stdout.flush()
            os._exit(1)
        sys.exit(0)  # with all finalizers
    assert os.waitpid(pid, 0)[1] == 0
    assert control.live() == before
    assert (array.to_host() == 0).all()
    for thing in (mapping, region, array, allocation, reservation):
        thing.close()
    del capsule
    cuda.stream_destroy(stream)
    cuda.event_destroy(event)
    cuda.host_unregister(page.ctypes.data)
    left = {kind for kind in control.live() if not kind.startswith("context")}
    assert not left, left
    print("done")
    """
    )
    assert said == "done\n"


def test_a_child_of_a_process_that_had_not_begun_is_free_to() -> None:
    script = """
import os
import vram.driver.cuda
from vram import driver
from vram.spec import Location, HandleKind
pid = os.fork()
if not pid:
    cuda = driver.get(Location("cuda"))
    cuda.mem_release(cuda.mem_create(2 << 20, Location("cuda", 0), HandleKind.POSIX_FD))
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, timeout=300, check=False, env=standin.child_environment(),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_the_interpreter_ends_with_everything_open_i8() -> None:
    assert child(EVERYTHING + "\n    print('open')\n") == "open\n"
    assert child(EVERYTHING + "\n    control.fail('*', code=4, forever=True)\n    print('gone')\n") == "gone\n"


def test_it_ends_with_everything_open_in_cycles_and_threads_i8() -> None:
    script = (
        EVERYTHING
        + """
    import threading
    class Node: pass
    node = Node()
    node.self, node.held = node, (allocation, reservation, mapping, region, array, capsule)
    stop = threading.Event()
    def work():
        mine = Array.create(cuda, OTHER, 1 << 16, "int8")
        while not stop.is_set():
            mine.fill(1)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    print("open")
    """
    )
    assert child(script) == "open\n"
