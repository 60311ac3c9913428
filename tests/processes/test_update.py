"""Updates in place: no reader sees half of one, whoever dies at whatever step (I14)."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import mmap
import os
import pickle
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from tests.support import children as processes
from tests.support import update_children as children
from tests.support.deadlines import SOON
from tests.support.forked import end_of, refused
from tests.support.keeper_here import later, open_to_all
from tests.support.other_users import OTHER, needs_root
from tests.support.places import short_directory
from tests.support.samples import rounds
from tests.support.update_children import publish, seen
from tests.support.updates import child, steps, steps_of_an_update, tear, update_under_readers, words_of, write
from tests.support.users import being

import vram
from vram.driver import words
from vram.entries import reading
from vram.errors import (
    AccessDeniedError,
    BusyError,
    CapacityError,
    ClosedError,
    NotFoundError,
    PeerGoneError,
    TornError,
    UnsupportedError,
    UsageError,
    WaitTimeoutError,
)
from vram.keeper.client import KeeperClient, close_client
from vram.keeper.private import KeeperProcess
from vram.open_files import close_fds

pytestmark = pytest.mark.usefixtures("kept")
slots = pytest.mark.parametrize("swap", [False, True], ids=["one slot", "two slots"])


# -- one process, in words -------------------------------------------------------------------------------------------
def test_an_update_puts_new_bytes_into_the_same_memory() -> None:
    mine = publish()
    with vram.attach("w") as lease:
        views, where = lease.numpy(), {name: array.address for name, array in lease.items()}
        assert (lease.updatable, lease.torn, lease.version) == (True, False, 1)
        assert seen(lease) == (1, [1])
        with vram.update("w") as arrays:
            assert {name: array.address for name, array in arrays.items()} == {
                name: array.address for name, array in mine.items()
            }
            for array in arrays.values():
                array.numpy()[:] = 7
        with lease.reading() as version:
            assert version == 2
            assert all((view == 7).all() for view in views.values())
        assert {name: array.address for name, array in lease.items()} == where
        assert lease.wait(newer_than=1, timeout=0) == 2
        with pytest.raises(WaitTimeoutError, match=r"not updated within 0\.01 s"):
            lease.wait(newer_than=2, timeout=0.01)
        assert not vram.attach("w").keep_only("a0").numpy().flags.writeable


def test_what_is_copied_is_updated_where_it_was_copied_to() -> None:
    source = np.ones(100)
    receipt = vram.publish("w", {"a": source, "empty": np.empty(0)}, updatable=True)
    assert receipt.copied == {"a": "it is not in vram memory"}
    with vram.update("w") as arrays:
        arrays["a"].numpy()[:] = 3
    assert (source == 1).all()
    with vram.attach("w") as lease, lease.reading():
        assert (lease["a"].numpy() == 3).all()
        assert lease["empty"].shape == (0,)


def test_an_update_keeps_readers_out_and_waits_for_those_inside() -> None:
    """A writer that does not wait, or a reader that does not look, is caught here: both stand still."""
    publish()
    with vram.attach("w") as lease:
        with lease.reading() as version:
            with pytest.raises(BusyError, match=rf"pid {os.getpid()}, uid {os.getuid()}.*, lease \d+") as refused:
                write(2, timeout=0.05)
            assert len(refused.value.holders) == 1
            assert (version, seen(lease)) == (1, (1, [1]))
        assert seen(lease) == (1, [1]), "what was not begun has torn it, or keeps readers out"
        with vram.update("w", timeout=SOON) as arrays:
            arrays["a0"].fill(2)
            with pytest.raises(WaitTimeoutError, match=r"still being updated after 0\.05 s by the process of uid"):
                seen(lease, timeout=0.05)
            thread, came = later(lambda: seen(lease))
            for array in arrays.values():
                array.fill(2)
        thread.join(SOON)
        assert came == [(2, [2])]


def test_a_section_whose_lease_was_over_says_so_at_its_end() -> None:
    """The connection of a reader that lives was cut off: the publisher waits for it no longer (I14)."""
    with child(children.write_stopping, 99) as publisher:
        assert publisher.said() == "published"
        with vram.attach("w") as lease:
            section = lease.reading()
            assert section.__enter__() == 1
            lease._client._channel.hang_up()
            publisher.tell()
            assert publisher.said() == "done"
            with pytest.raises(TornError, match="updated while it was read"):
                section.__exit__(None, None, None)


def test_sections_nest_and_every_thread_has_its_own() -> None:
    publish()
    with vram.attach("w") as lease:
        with lease.reading() as outer, lease.reading() as inner:
            assert (outer, inner) == (1, 1)
            thread, came = later(lambda: seen(lease))
            thread.join(SOON)
            assert came == [(1, [1])]
            assert lease._pages[0].inside() == ["1 of this process's threads, inside lease.reading()"]
        assert not any(lease._pages[0].slots)
        section = lease.reading()
        with section, pytest.raises(UsageError, match="entered before"), section:
            pass
        assert not any(lease._pages[0].slots)


@slots
def test_what_an_interrupt_leaves_of_a_section_ends_with_it(swap: bool) -> None:
    """As if ``__exit__`` had never begun (I12)."""
    publish(swap=swap)
    with vram.attach("w") as lease:
        section = lease.reading()
        section.__enter__()
        assert any(lease._pages[0].slots)
        with pytest.raises(BusyError, match="of this process's threads"):
            lease.close(strict=True)
        del section
        assert not any(lease._pages[0].slots)
        write(2)
        assert seen(lease) == (2, [2])


def test_a_lease_has_room_for_512_threads_that_live() -> None:
    publish()
    with vram.attach("w") as lease:
        leave = threading.Event()
        inside = threading.Semaphore(0)

        def stay() -> None:
            with lease.reading():
                inside.release()
                leave.wait(SOON)

        threads = [threading.Thread(target=stay) for _ in range(reading.SLOTS)]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert inside.acquire(timeout=SOON)
        with pytest.raises(CapacityError, match="512 threads"):
            seen(lease)
        leave.set()
        for thread in threads:
            thread.join(SOON)
        assert seen(lease) == (1, [1]), "the words of threads that are gone are not used again"


# -- torn ------------------------------------------------------------------------------------------------------------
def test_a_block_that_raises_leaves_it_torn_until_the_next_one_is_whole() -> None:
    publish()
    with vram.attach("w") as lease:
        tear()
        assert lease.torn
        with pytest.raises(TornError, match="of no one version"):
            seen(lease)
        with pytest.raises(TornError):
            lease.wait(newer_than=1)
        with vram.attach("w") as another:
            assert another.torn
        tear()
        assert lease.torn
        write(3)
        assert not lease.torn
        assert seen(lease) == (2, [3])


def test_an_update_of_some_arrays_gets_no_others() -> None:
    publish()
    with vram.attach("w") as lease:
        with vram.update("w", only=["a2", "a0"]) as arrays:
            assert list(arrays) == ["a0", "a2"]
            for array in arrays.values():
                array.fill(5)
        assert seen(lease) == (2, [1, 5])
        for wrong in ("a0", [], 5, ["a0", 1]):
            with pytest.raises(UsageError, match="only"):
                vram.update("w", only=wrong)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="no array 'x'"):
            vram.update("w", only=["a0", "x"]).__enter__()
        assert seen(lease) == (2, [1, 5])


def test_what_tore_some_arrays_is_mended_by_who_names_them() -> None:
    publish()
    with vram.attach("w") as lease:

        def tear_one() -> None:
            with vram.update("w", only=["a0"]) as arrays:
                arrays["a0"].fill(99)
                raise KeyError("wrong")

        for _ in range(2):
            with pytest.raises(KeyError):
                tear_one()
            with pytest.raises(TornError, match="such as 'a0'"):
                vram.update("w", only=["a1"]).__enter__()
            with pytest.raises(TornError):
                seen(lease)
            assert lease.torn
        with vram.update("w", only=["a0", "a1"]) as arrays:
            for array in arrays.values():
                array.fill(7)
        assert seen(lease) == (2, [1, 7])
        with vram.update("w", only=["a2"]) as arrays:
            arrays["a2"].fill(7)
        assert seen(lease) == (3, [7])
        tear()
        with pytest.raises(TornError, match="written 2 arrays"):
            vram.update("w", only=["a0"]).__enter__()
        write(8)
        assert seen(lease) == (4, [8])


def test_what_was_torn_is_mended_by_a_new_publication() -> None:
    mine = publish()
    tear()
    receipt = vram.publish("w", mine, updatable=True)
    assert {reason.partition(",")[0] for reason in receipt.copied.values()} == {"it is published with updatable=True"}
    with vram.attach("w") as lease:
        assert (lease.torn, seen(lease)[0]) == (False, 1)
        write(5)
        assert seen(lease) == (2, [5])


def test_an_update_that_is_dropped_without_its_end_is_torn() -> None:
    """As if Ctrl-C had kept ``__exit__`` from beginning."""
    publish()
    with vram.attach("w") as lease:
        begun = vram.update("w")
        begun.__enter__()["a0"].fill(2)
        del begun
        gc.collect()
        with pytest.raises(TornError):
            seen(lease)
        write(3)
        assert seen(lease) == (2, [3])


def test_a_publisher_may_be_killed_at_any_step() -> None:
    leases: list[vram.Lease] = []

    def attach(victim: processes.Child) -> None:
        assert victim.said() == "published"
        leases.append(vram.attach("w"))
        assert seen(leases[0]) == (1, [1])
        victim.tell()

    found = {}
    for at, victim in steps(children.write_stopping, beside=attach):
        victim.kill()
        (lease,) = leases
        with lease:
            try:
                version, numbers = seen(lease)
                assert numbers == [version], at
                found[at] = version
                assert not lease.torn
            except TornError:
                assert lease.torn, at
                with vram.attach("w") as another:
                    assert another.torn, at
                found[at] = found.get(at, 0)
            with pytest.raises((PeerGoneError, TornError)):
                lease.wait(newer_than=2, timeout=SOON)
            with pytest.raises(AccessDeniedError, match="which is gone: publish it again"):
                vram.update("w").__enter__()
            leases.clear()
        vram.remove("w")
    assert found["begin_update"] == 1
    assert found["array 0"] == found["array 2"] == 0
    assert (found["end_update"], found["done"]) == (2, 2)
    assert {"barrier", "pages"} <= set(found)


@slots
def test_a_reader_may_be_killed_at_any_step(swap: bool) -> None:
    publish(swap=swap)
    value, found = 1, []
    for at, victim in steps(children.read_stopping, beside=lambda victim: None):
        if swap:
            value += 1
            write(value, timeout=SOON)  # the reader is in the version before now
        if at == "inside":
            with pytest.raises(BusyError, match=f"pid {victim.process.pid}"):
                write(0, timeout=0.05)
        thread, came = later(functools.partial(write, value + 1))
        victim.kill()
        thread.join(SOON)
        assert came == [None], at
        value += 1
        found.append(at)
    assert found == ["make", "give_page", "inside", "outside"]
    with vram.attach("w") as lease:
        assert seen(lease) == (value, [value])


# -- many at once ----------------------------------------------------------------------------------------------------
@slots
def test_readers_in_other_processes_never_see_half_of_an_update(swap: bool) -> None:
    publish(swap=swap)
    update_under_readers(3, rounds(1000, 250))


# -- who may, and what ------------------------------------------------------------------------------------------------
def test_who_did_not_publish_it_does_not_update_it() -> None:
    with pytest.raises(NotFoundError):
        vram.update("w").__enter__()
    with child(children.write_stopping, 99) as publisher:
        assert publisher.said() == "published"
        with pytest.raises(AccessDeniedError, match=rf"only the process that published.*pid {publisher.process.pid}"):
            vram.update("w").__enter__()
    with vram.zeros(3, device="host") as array:
        vram.publish("plain", {"a": array})
        with pytest.raises(UsageError, match="not published with updatable=True"):
            vram.update("plain").__enter__()
    with vram.attach("plain") as lease:
        assert (lease.updatable, lease.torn) == (False, False)
        for ask in (lease.reading, lambda: lease.wait(newer_than=0)):
            with pytest.raises(UsageError, match="not published with updatable=True"):
                ask()


@needs_root
def test_another_user_does_not_update_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it asks the keeper, it is refused, and the publisher's updates go on."""
    with open_to_all() as path:
        monkeypatch.setenv("VRAM_KEEPER", path)
        publish()
        with being(OTHER):
            stranger = KeeperClient.connect(path)
        with stranger, vram.attach("w") as lease:
            with pytest.raises(AccessDeniedError, match=f"only the process that published.*uid {os.geteuid()}"):
                stranger.begin_update("w", 1)
            assert seen(lease) == (1, [1])
            write(2)
            assert seen(lease) == (2, [2])
        close_client(path)


def test_what_was_replaced_or_removed_is_updated_no_more() -> None:
    publish()
    with vram.attach("w") as lease:
        assert seen(lease) == (1, [1])
        vram.publish("w", {"a": np.zeros(3)})
        with pytest.raises(UsageError, match="not published with updatable=True"):
            write(2)
        with pytest.raises(NotFoundError, match="replaced or removed"):
            lease.wait(newer_than=1, timeout=SOON)
        assert seen(lease) == (1, [1])
    vram.remove("w")
    publish()
    with KeeperClient.connect(os.environ["VRAM_KEEPER"]) as other:
        other.remove("w")  # by somebody else of this user
    with pytest.raises(NotFoundError):
        write(2)


def test_arguments_that_cannot_be() -> None:
    publish()
    with pytest.raises(UsageError, match="choose one of them"):
        vram.publish("x", {"a": np.zeros(3)}, updatable=True, writable=True)
    with pytest.raises(UsageError):
        vram.publish("x", {"a": np.zeros(3)}, updatable=1)  # type: ignore[arg-type]
    with pytest.raises(AccessDeniedError):
        vram.attach("w", access="rw")
    with vram.attach("w", access="cow") as private, pytest.raises(UsageError, match="private copy"):
        private.reading()
    with vram.attach("w") as lease:
        for timeout in (-1, -0.5, float("nan")):
            with pytest.raises(UsageError):
                lease.reading(timeout=timeout)
        with pytest.raises(UsageError):
            lease.wait(newer_than="1")  # type: ignore[arg-type]
        one = vram.update("w")
        with one, pytest.raises(BusyError, match="this thread is updating"):
            write(2)
        with pytest.raises(UsageError, match="begun before"):
            one.__enter__()
    with pytest.raises(ClosedError):
        lease.reading()


def test_nobody_else_can_ever_write_to_it() -> None:
    mine = publish(count=1)["a0"]
    client = KeeperClient.connect(os.environ["VRAM_KEEPER"])
    with client:
        leased = client.attach("w")
        try:
            assert len(leased.fds) == 2, "the memory, and the page of the publisher"
            for fd in leased.fds:
                nbytes = os.fstat(fd).st_size
                with pytest.raises(PermissionError):
                    mmap.mmap(fd, nbytes)
                with pytest.raises(PermissionError):
                    os.pwrite(fd, b"x", 0)
                with mmap.mmap(fd, nbytes, prot=mmap.PROT_READ):
                    pass
        finally:
            close_fds(leased.fds)
    mine.fill(9)  # its publisher can
    with vram.attach("w") as lease:
        assert seen(lease) == (1, [9])


def test_memory_that_others_may_be_able_to_write_is_copied() -> None:
    with vram.zeros(8, device="host") as array:
        vram.publish("shared", {"a": array}, writable=True)
        receipt = vram.publish("w", {"a": array}, updatable=True)
        assert "left this process before" in receipt.copied["a"]
    with vram.zeros(8, device="host") as array:
        vram.publish("frozen", {"a": array})
        receipt = vram.publish("x", {"a": array}, updatable=True)
        assert "cannot be written here" in receipt.copied["a"]
    with vram.attach("shared", access="rw") as lease:
        receipt = vram.publish("y", {"a": lease["a"]}, updatable=True)
        assert "not this library's own" in receipt.copied["a"]


def test_what_is_updated_is_not_shared_frozen_or_moved_besides(tmp_path: Path) -> None:
    mine = publish(count=1)["a0"]
    assert vram.publish("again", {"a": mine}).copied
    with pytest.raises(UnsupportedError, match="its bytes change under its readers"):
        vram.lend({"a": mine}, at=str(tmp_path / "lender.sock"))
    with pytest.raises(BusyError, match="updatable=True"):
        mine.region.freeze()
    for shared in (None, "unmap"):
        with pytest.raises(BusyError):
            vram.sleep([mine], to=None, **({} if shared is None else {"shared": shared}))
    with pytest.raises(BusyError):
        mine.resize(1)
    mine.close()
    with vram.attach("w") as lease:
        write(2)
        assert seen(lease) == (2, [2])


def test_what_is_updated_does_not_grow_under_its_readers() -> None:
    """Its last chunk is with them, and they would see rows that nobody has published."""
    with vram.zeros((4,), "uint8", device="host", capacity=1 << 20) as mine:
        vram.publish("growing", {"a": mine}, updatable=True)
        with pytest.raises(BusyError, match="Copy it to grow it"):
            mine.resize(4096)
        with pytest.raises(BusyError, match="Copy it to grow it"):
            vram.resize({mine: 4096})
        assert mine.shape == (4,)
        mine.resize(4)
        vram.remove("growing")
        with pytest.raises(BusyError, match="Copy it to grow it"):
            mine.resize(4096)  # who had a lease may have mapped it
        mine.resize(0)
        mine.resize(4096)
        assert vram.publish("grown", {"a": mine}, updatable=True, whole=True).zero_copy


@slots
def test_a_forked_child_has_no_section_and_no_update(swap: bool) -> None:
    publish(swap=swap)
    with vram.attach("w") as lease:
        section = lease.reading()
        with lease.reading():
            assert end_of(lambda: refused(lease.reading, section.__enter__, lambda: lease["a0"])) == 3
            assert any(lease._pages[0].slots), "the child has left its parent's section"
        write(2)


def test_without_membarrier_there_are_no_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    publish()
    with vram.attach("w") as lease:
        with monkeypatch.context() as patched:
            patched.setattr(words, "_CALL", -1)
            patched.setattr(reading, "_registered", False)
            with pytest.raises(UnsupportedError, match=r"membarrier\(2\)"):
                lease.reading()
            with pytest.raises(UnsupportedError, match=r"membarrier\(2\)"):
                vram.publish("x", {"a": np.zeros(3)}, updatable=True)
            with pytest.raises(UnsupportedError, match=r"membarrier\(2\)"):
                write(2)
        assert seen(lease) == (1, [1])


def test_a_barrier_stands_between_the_writers_word_and_its_look_at_the_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store may be seen after a later load: without the barrier a reader's word comes too late, once in a while."""
    publish()
    with vram.attach("w") as lease:
        assert seen(lease) == (1, [1])
        order = steps_of_an_update(monkeypatch, lambda: f"word {words_of(lease)[reading.STATE]}")
        updating = f"barrier, word {reading.UPDATING}"
        assert order == [updating, "look", updating, "write", updating]


# -- a keeper that ends, and one that takes over ---------------------------------------------------------------------
@slots
def test_readers_go_on_when_the_keeper_is_gone_and_nobody_updates(swap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with short_directory() as directory:
        keeper = KeeperProcess(os.path.join(directory, "keeper.sock"), [])
        monkeypatch.setenv("VRAM_KEEPER", keeper.path)
        publish(swap=swap)
        with vram.attach("w") as lease:
            assert seen(lease) == (1, [1])
            with pytest.raises(PeerGoneError), vram.update("w") as arrays:  # at its end
                _fill_without_keeper(keeper, arrays, 2)
            assert seen(lease) == (2, [2]), "the update was whole"
            with pytest.raises(PeerGoneError):
                write(3)
            assert seen(lease) == (2, [2])
        close_client(keeper.path)


def _fill_without_keeper(keeper: KeeperProcess, arrays: Mapping[str, vram.Array], value: int) -> None:
    keeper.stop()
    for array in arrays.values():
        array.fill(value)


def test_a_takeover_carries_pages_words_and_what_was_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    with short_directory() as directory, contextlib.ExitStack() as stack:
        path = os.path.join(directory, "keeper.sock")
        first = KeeperProcess(path, ["--survive"])
        stack.callback(first.stop)
        monkeypatch.setenv("VRAM_KEEPER", path)
        stack.callback(close_client, path)
        publish()
        lease = stack.enter_context(vram.attach("w"))
        with child(children.hold) as reader:
            reader.said()
            with lease.reading():
                second = KeeperProcess(path, ["--takeover"])
                stack.callback(second.stop)
                with pytest.raises(BusyError, match="2 of its readers"):
                    write(2, timeout=0.5)
            assert vram.statistics().descriptors == 3 + 1 + 2  # the memories, the publisher's page, the readers'
            with pytest.raises(BusyError, match="1 of its readers"):
                write(2, timeout=0.5)
            reader.kill()
            write(2)
            assert seen(lease) == (2, [2])
        tear(lambda: stack.callback(KeeperProcess(path, ["--takeover"]).stop))
        assert lease.torn
        write(3)
        assert seen(lease) == (3, [3])


def test_i14_a_section_is_not_copied() -> None:
    vram.publish("weights", {"a": np.zeros(4)}, updatable=True)
    with vram.attach("weights") as lease, lease.reading() as version:
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(UsageError, match="cannot be pickled or copied"):
                duplicate(lease.reading())
        assert version == 1
