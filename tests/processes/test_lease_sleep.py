"""Leases that sleep: the memory goes, the addresses stay, and what comes again is right, or nothing does (I5, I13)."""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
from tests.support import asleep_children as children
from tests.support.asleep_children import descriptors, disconnect, free_on_gpu, mappings, tensor_over, threads
from tests.support.children import child
from tests.support.deadlines import SOON, until
from tests.support.forked import end_of, refused
from tests.support.own_keeper import own_keeper

import standin
import vram
from vram.errors import (
    AsleepError,
    BusyError,
    ClosedError,
    MismatchError,
    NotFoundError,
    OutOfMemoryError,
    PeerGoneError,
    UsageError,
    WaitTimeoutError,
)

MIB2 = 2 << 20
GPU = pytest.param("cuda:0", marks=pytest.mark.standin)
pytestmark = [pytest.mark.usefixtures("kept", "hand_over"), pytest.mark.filterwarnings("default::DeprecationWarning")]
everywhere = pytest.mark.parametrize("device", ["host", GPU])


def publish(device: str, value: int = 1, *, name: str = "w", **options: Any) -> int:
    """Publish two arrays full of a number, on two segments of one memory and on one of another; return the version."""
    with (
        vram.empty((2, MIB2), "uint8", device=device, chunk="2MiB") as a,
        vram.empty((100,), "int64", device=device) as b,
    ):
        a.fill(value)
        b.fill(value)
        return vram.publish(name, {"a": a, "b": b}, **options).version


def seen(lease: vram.Lease) -> set[int]:
    """Return the numbers that arrays are full of."""
    return {int(number) for array in lease.values() for number in np.unique(array.to_host())}


class TestALeaseSleeps:
    @everywhere
    def test_it_wakes_with_its_bytes_at_its_addresses(self, device: str) -> None:
        version = publish(device)
        with vram.attach("w") as lease:
            arrays = dict(lease)
            before = {name: array.address for name, array in arrays.items()}
            nbytes = lease.nbytes
            assert lease.sleep() == nbytes == 3 * MIB2
            assert lease.nbytes == 0
            assert "asleep" in repr(lease)
            (holder,) = vram.holders()
            assert (holder.is_asleep, holder.rights) == (True, "r, asleep")
            for use in (lambda: arrays["a"].to_host(), lambda: lease["b"].to_host(), lease.sleep):
                with pytest.raises(AsleepError):
                    use()
            with pytest.raises(UsageError, match=r"lease\.wake\(\)"):
                vram.wake(arrays["a"])
            assert lease.wake() == lease.wake() == lease.version == version
            assert (seen(lease), lease.nbytes) == ({1}, nbytes)
            assert {name: array.address for name, array in lease.items()} == before
            assert all(lease[name] is array for name, array in arrays.items())
            assert not vram.holders()[0].is_asleep

    def test_descriptors_and_mappings_are_gone_and_views_are_good_again(self) -> None:
        publish("host")
        gc.collect()
        before = descriptors(), mappings()
        with vram.attach("w") as lease:
            view = lease["a"].numpy()
            lease.sleep()
            assert (descriptors(), mappings()) == before
            lease.wake()
            assert (view == 1).all()
        assert (view == 1).all()

    def test_views_keep_what_sleeps_and_is_closed(self) -> None:
        publish("host")
        lease = vram.attach("w")
        view = lease["a"].numpy()
        lease.sleep()
        lease.close()
        assert len(vram.holders()) == 1
        with pytest.raises(ClosedError):
            lease.wake()
        del view
        gc.collect()
        until(lambda: not vram.holders(), what="the return of the lease")

    @everywhere
    def test_only_some_of_the_arrays(self, device: str) -> None:
        versions = [publish(device)]
        with vram.attach("w", only=["b"]) as lease:
            lease.sleep()
            versions.append(publish(device, 2))
            assert (lease.wake(), list(lease), seen(lease)) == (versions[0], ["b"], {1})
            lease.sleep()
            assert (lease.wake(newest=True), seen(lease)) == (versions[1], {2})

    def test_what_grew_goes_on_growing(self) -> None:
        rows = vram.zeros((10, MIB2), "uint8", capacity=100, device="host")
        vram.publish("w", {"a": rows}, writable=True)
        with vram.attach("w", growing=True) as lease:
            address = lease["a"].address
            lease.sleep()
            rows.resize(20)
            rows.fill(3)
            vram.publish("w", {"a": rows}, writable=True)
            with pytest.raises(AsleepError):
                lease.refresh()
            lease.wake()
            assert lease.refresh() == ("a",)
            assert (len(lease["a"]), lease["a"].address, seen(lease)) == (20, address, {3})
        rows.close()


class TestMeanwhile:
    @everywhere
    @pytest.mark.parametrize("how", ["removed", "replaced", "revoked"])
    def test_the_version_goes(self, device: str, how: str) -> None:
        version = publish(device)
        with vram.attach("w") as lease:
            lease.sleep()
            if how == "replaced":
                publish(device, 2)
            elif how == "removed":
                vram.remove("w")
            else:
                vram.revoke("w", timeout=0.0)
            assert (lease.wake(), seen(lease)) == (version, {1})
            assert lease.is_stale()
            assert lease.is_revoked() is (how == "revoked")

    @everywhere
    def test_a_newer_version_of_the_same_layout(self, device: str) -> None:
        publish(device)
        with vram.attach("w") as lease:
            array, address = lease["a"], lease["a"].address
            lease.sleep()
            version = publish(device, 2)
            assert (lease.wake(newest=True), lease.version, seen(lease)) == (version, version, {2})
            assert (lease["a"] is array, array.address) == (True, address)
            assert not lease.is_stale()
            assert [one.version for one in vram.entry("w").versions] == [version]

    @pytest.mark.parametrize("layout", ["gone", "new", "type", "shape", "segments", "memories"])
    def test_another_layout_is_refused_and_nothing_is_mapped(self, layout: str) -> None:
        version = publish("host")
        with vram.attach("w") as lease:
            lease.sleep()
            a = vram.zeros((2, MIB2), "uint8", device="host", chunk="4MiB" if layout == "segments" else "2MiB")
            b = vram.zeros((100,), "int64", device="host")
            arrays = {"a": a, "b": b}
            if layout == "gone":
                del arrays["b"]
            elif layout == "new":
                arrays["c"] = b
            elif layout == "type":
                arrays["b"] = vram.zeros((100,), "float64", device="host")
            elif layout == "shape":
                arrays["a"] = vram.zeros((1, MIB2), "uint8", device="host")
            elif layout == "memories":
                arrays = dict(vram.pack(arrays, device="host"))
            vram.publish("w", arrays)
            with pytest.raises(MismatchError, match=r"cannot be mapped where version \d+ was: (array|its|it)"):
                lease.wake(newest=True)
            assert (lease.nbytes, len(vram.holders())) == (0, 1)
            assert (lease.wake(), seen(lease)) == (version, {1})

    def test_released_it_wakes_on_what_there_is(self) -> None:
        publish("host")
        with vram.attach("w") as lease:
            lease.sleep(release=True)
            assert not vram.holders()
            for ask in (lease.is_stale, lease.is_revoked, lease.refresh, lease.fileno):
                with pytest.raises(AsleepError, match="released"):
                    ask()
            version = publish("host", 2)
            assert [one.version for one in vram.entry("w").versions] == [version]  # nobody kept the one before
            assert (lease.wake(), seen(lease), lease.is_stale()) == (version, {2}, False)
            lease.sleep(release=True)
            vram.remove("w")
            with pytest.raises(NotFoundError):
                lease.wake(timeout=0.0)
            with pytest.raises(WaitTimeoutError):
                lease.wake(timeout=0.05)
            publish("host", 3)
            assert lease.wake() == lease.version
            assert seen(lease) == {3}

    def test_news_of_the_same_version_is_heard_once_and_at_the_same_descriptor(self) -> None:
        publish("host")
        with vram.attach("w") as lease:
            told: list[int] = []
            lease.on_revoke(lambda one: (told.append(one.version), one.sleep(), one.wake()))
            fd = lease.fileno()
            lease.sleep()
            lease.wake()
            assert lease.fileno() == fd
            assert select.select([fd], [], [], 0)[0] == []
            vram.revoke("w", timeout=0.0)
            until(lambda: told != [] and lease.nbytes > 0, what="the callback")
            assert select.select([fd], [], [], SOON)[0] == [fd]
            lease.sleep()
            lease.wake()
            assert (told, lease.is_revoked()) == ([lease.version], True)

    def test_a_slice_is_pickled_as_what_it_shows(self) -> None:
        publish("host")
        with vram.attach("w") as lease, vram.attach("w") as other:
            part, whole = lease["a"][1], lease["a"]
            lease.sleep()
            publish("host", 2)
            lease.wake(newest=True)
            assert int(part.to_host()[0]) == 2
            for array in (part, whole):
                again = pickle.loads(ForkingPickler.dumps(array))
                assert int(again.to_host().flat[0]) == 2
            assert seen(other) == {1}

    def test_callbacks_go_on_with_the_version_it_wakes_on(self) -> None:
        publish("host")
        with vram.attach("w") as lease:
            told: list[int] = []
            lease.on_revoke(lambda one: told.append(one.version))
            lease.sleep(release=True)
            version = publish("host", 2)
            lease.wake()
            vram.revoke("w", timeout=0.0)
            until(lambda: told == [version], what="the callback")


class TestUpdates:
    @everywhere
    @pytest.mark.parametrize("swap", [False, True])
    def test_it_is_updated_while_it_sleeps(self, device: str, swap: bool) -> None:
        publish(device, updatable=True, swap=swap)
        with vram.attach("w") as lease:
            with lease.reading():
                assert seen(lease) == {1}
                with pytest.raises(BusyError, match="reading"):
                    lease.sleep()
            lease.sleep()
            assert lease.updatable
            for use in (lambda: lease.reading().__enter__(), lambda: lease.torn, lambda: lease.wait(newer_than=1)):
                with pytest.raises(AsleepError, match=r"lease\.wake\(\)"):
                    use()
            for value in (5, 6):  # a reader that sleeps keeps nobody waiting
                with vram.update("w", timeout=0.0 if value == 5 else SOON) as arrays:
                    for array in arrays.values():
                        array.fill(value)
            lease.wake()
            with lease.reading() as number:
                assert (number, seen(lease)) == (3, {6})
        vram.remove("w")

    def test_a_section_that_was_made_before_is_not_entered(self) -> None:
        publish("host", updatable=True)
        with vram.attach("w") as lease:
            with lease.reading():
                pass
            section, other = lease.reading(), lease.reading()
            lease.sleep()
            with pytest.raises(AsleepError, match=r"lease\.wake\(\)"):
                section.__enter__()
            with vram.update("w", timeout=SOON):
                pass
            lease.wake()
            with pytest.raises(AsleepError):  # of the pages of then
                other.__enter__()
            with lease.reading() as number:
                assert number == 2
        vram.remove("w")

    def test_threads_that_read_and_one_that_sleeps_never_meet(self) -> None:
        """What a section would read were it let in while the memory goes ends the process."""
        publish("host", updatable=True)
        with child(children.read_and_sleep, "w") as racer:
            assert racer.said() > 10
            racer.tell()
        vram.remove("w")


class TestWhatCannotSleep:
    def test_copies_followers_rings_and_what_is_written(self) -> None:
        publish("host")
        with vram.attach("w", access="cow") as lease, pytest.raises(UsageError, match="private copy"):
            lease.sleep()
        with vram.follow("w") as follower, pytest.raises(UsageError, match="follower"):
            follower.current().sleep()
        with vram.attach("w") as lease:
            tensor = tensor_over(lease["a"])
            lease.sleep()
            lease.wake()
            assert (tensor == 1).all()
            tensor[0] = 9
            with pytest.raises(BusyError, match="written to"):
                lease.sleep()
            assert (tensor[0], seen(lease)) == (9, {1})
            assert not vram.holders()[0].is_asleep

    def test_in_a_forked_child(self) -> None:
        publish("host")
        with vram.attach("w") as lease:
            lease.sleep()
            assert end_of(lambda: refused(lease.wake, lease.sleep)) == 2
            assert (lease.wake(), seen(lease)) == (lease.version, {1})

    def test_memory_that_is_held_otherwise_in_this_process(self) -> None:
        publish("host")
        with vram.attach("w") as lease:
            held, _ = lease["a"].region.segments(0, MIB2)
            with pytest.raises(BusyError):
                lease.sleep()
            assert (seen(lease), vram.holders()[0].is_asleep) == ({1}, False)
            held[0].close()
            lease.sleep()

    def test_odd_arguments(self) -> None:
        publish("host")
        with vram.attach("w") as lease:
            for wrong in ("yes", np.ones(2), 2):
                with pytest.raises(UsageError):
                    lease.sleep(release=wrong)  # type: ignore[arg-type]
                with pytest.raises(UsageError):
                    lease.wake(newest=wrong)  # type: ignore[arg-type]
            with pytest.raises(UsageError):
                lease.wake(timeout=-1.0)


@pytest.mark.standin
class TestParked:
    def test_all_sleep_the_entry_is_parked_and_the_first_brings_it_back(self) -> None:
        """Several engines share one model; all of them asleep, none of it is on the GPU."""
        publish("cuda:0")
        with child(children.sleep_and_wake, "w") as first, child(children.sleep_and_wake, "w") as second:
            both = [first, second]
            assert [one.said() for one in both] == [{"a": 1, "b": 1}] * 2
            first.tell()
            assert first.said() == 3 * MIB2
            with pytest.raises(BusyError, match="1 lease"):
                vram.park("w", timeout=0.0)
            second.tell()
            assert second.said() == 3 * MIB2
            report = vram.park("w", timeout=0.0)
            assert (report.freed, report.holders) == (report.nbytes, ())
            for one in both:
                one.tell()
                assert one.said() == {"a": 1, "b": 1}
            assert not vram.entry("w").parked
            for one in both:
                one.tell()
                assert one.said() == "closed"

    def test_the_gpu_is_full(self) -> None:
        gpu = standin.Standin()
        before = free_on_gpu()
        publish("cuda:0")
        with vram.attach("w") as lease:
            lease.sleep()
            vram.park("w", timeout=0.0)
            until(lambda: free_on_gpu() == before, what="the end of the memory that was parked, which would make room")
            gpu.set_free(0, 1 << 20)
            try:
                for _ in range(2):
                    with pytest.raises(OutOfMemoryError):
                        lease.wake()
                    assert vram.entry("w").parked
            finally:
                gpu.set_free(0, None)
            assert (lease.wake(), seen(lease)) == (lease.version, {1})

    def test_parked_and_removed_it_cannot_be_brought_back(self) -> None:
        publish("cuda:0")
        with vram.attach("w") as lease:
            lease.sleep()
            vram.park("w", timeout=0.0)
            vram.remove("w")
            with pytest.raises(NotFoundError, match="replaced or removed"):
                lease.wake()
            version = publish("cuda:0", 2)
            assert (lease.wake(newest=True), seen(lease)) == (version, {2})


class TestTheKeeperDies:
    @pytest.mark.parametrize("release", [False, True])
    def test_one_that_goes_on_knows_who_sleeps(self, release: bool) -> None:
        with own_keeper("--survive"):
            publish("host")
            lease = vram.attach("w")
            lease.sleep(release=release)
            pid = vram.statistics().pid
            os.kill(pid, signal.SIGKILL)
            until(lambda: vram.statistics().pid != pid, what="the next keeper")
            assert [one.is_asleep for one in vram.holders()] == [True] * (not release)
            assert (lease.wake(), seen(lease)) == (lease.version, {1})
            assert [one.is_asleep for one in vram.holders()] == [False]
            lease.close()

    def test_one_that_does_not_go_on_ends_the_lease(self) -> None:
        with own_keeper("--ephemeral") as process:
            publish("host")
            lease = vram.attach("w")
            view = lease["a"].numpy()
            lease.sleep()
            other = vram.attach("w")
            process.kill()
            with pytest.raises(PeerGoneError):  # nobody would have the bytes
                other.sleep(release=True)
            assert seen(other) == {1}
            other.close()
            with pytest.raises(PeerGoneError):
                lease.wake()
            with pytest.raises(PeerGoneError):
                lease.wake(newest=True, timeout=0.0)
            os.unlink(process.path)
            with own_keeper("--ephemeral", at=process.path):
                with pytest.raises(PeerGoneError):
                    lease.wake()  # it is that keeper's version
                publish("host", 2)
                assert (lease.wake(newest=True), seen(lease)) == (1, {2})
                assert (view == 2).all()
                lease.close()


class TestAllOfAProcess:
    def test_nothing_is_left_and_all_comes_again(self) -> None:
        for name in ("v", "w"):
            publish("host", name=name)
        gc.collect()
        disconnect()
        until(lambda: "vram: revoked leases" not in threads(), what="the end of the thread that an earlier test had")
        before = descriptors(), mappings(), threads()
        one, two, gone = (vram.attach(name) for name in ("v", "w", "w"))
        gone.close()
        told: list[int] = []
        one.on_revoke(lambda lease: told.append(lease.version))
        one.fileno()
        two.sleep()
        assert vram.detach_all() == 3 * MIB2
        until(lambda: "vram: revoked leases" not in threads(), what="the end of the thread")
        assert (descriptors(), mappings(), threads()) == before
        assert vram.detach_all() == 0
        assert not vram.holders()
        assert vram.reattach_all() == 6 * MIB2
        assert (seen(one), seen(two)) == ({1}, {1})
        vram.revoke("v", timeout=0.0)
        until(lambda: told == [one.version], what="the callback")
        assert vram.reattach_all() == 0
        one.close()
        two.close()

    def test_with_another_keeper_of_the_same_names(self) -> None:
        with own_keeper("--ephemeral") as process:
            publish("host")
            publish("host", name="v")
            leases = [vram.attach("w"), vram.attach("v")]
            view = leases[0]["a"].numpy()
            vram.detach_all()
            process.stop()
            with own_keeper("--ephemeral", at=process.path):
                publish("host", 7)
                with pytest.raises(NotFoundError):  # all or none
                    vram.reattach_all(timeout=0.0)
                assert [one.nbytes for one in leases] == [0, 0]
                publish("host", 8, name="v")
                assert vram.reattach_all() == 6 * MIB2
                assert ([seen(one) for one in leases], set(np.unique(view))) == ([{7}, {8}], {7})
                for lease in leases:
                    lease.close()

    def test_arrays_of_leases_that_are_closed_are_named(self) -> None:
        publish("host")
        lease = vram.attach("w")
        kept = vram.attach("w").keep_only("a")
        with pytest.raises(BusyError, match="lease on 'w'"):
            vram.detach_all()
        assert (seen(lease), int(kept.to_host()[0, 0])) == ({1}, 1)
        kept.close()
        assert vram.detach_all() == 3 * MIB2
        vram.reattach_all()
        lease.close()

    def test_all_of_them_or_none(self) -> None:
        publish("host")
        publish("host", name="u", updatable=True)
        with vram.attach("w") as lease, vram.attach("w", access="cow"):
            with pytest.raises(BusyError, match="'u'"):
                vram.detach_all()
            vram.remove("u")
            with pytest.raises(UsageError, match="private copy"):
                vram.detach_all()
            assert (seen(lease), len(vram.holders())) == ({1}, 2)
