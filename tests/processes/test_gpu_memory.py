"""GPU memory between processes: published, killed, attached, handed over. On the stand-in, and by hand on real GPUs."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import numpy as np
import pytest
from tests.support import gpu_children
from tests.support.children import CHILDREN
from tests.support.deadlines import SOON, until
from tests.support.places import short_directory
from tests.support.raw_cuda import CudaStranger
from tests.support.transports import answer, child

import vram
from vram import driver as drivers
from vram.driver.protocol import LiveObjects
from vram.errors import ReadOnlyError, UnsupportedError
from vram.keeper.client import KeeperClient
from vram.memory import Received, Region
from vram.open_files import close_fds
from vram.spec import Access, HandleKind, Location

ROWS = 4096
GPU, OTHER = "cuda:0", "cuda:1"
# The first GPU is what a wrong answer about an address looks like, too.
GPUS = range(drivers.get(Location("cuda")).device_count() if os.environ.get("VRAM_TEST_GPU") else 2)
pytestmark = [pytest.mark.usefixtures("kept", "hand_over"), pytest.mark.filterwarnings("default::DeprecationWarning")]


def all_bytes(name: str) -> bytes:
    """What a hostile reader sees: all of what is behind the descriptors of an entry."""
    driver: Any = drivers.get(Location("cuda"))
    found = bytearray()
    with KeeperClient.connect(os.environ["VRAM_KEEPER"]) as client:
        attachment = client.attach(name)
        for fd, segment in zip(attachment.fds, attachment.segments, strict=True):
            with Region.from_allocations(driver, [Received(fd, segment.size)], managed=True) as region:
                part = bytearray(region.nbytes)
                driver.copy_out(memoryview(part), region.address)
                found += part
        close_fds(attachment.fds)
        attachment.fds.clear()
    return bytes(found)


class GpuMemory:
    def test_it_outlives_its_maker(self) -> None:
        with child(gpu_children.publish_and_wait, GPU, ROWS) as (maker, pipe):
            assert answer(pipe) is True
            maker.kill()
            maker.join(SOON)
            assert maker.exitcode == -signal.SIGKILL
        with child(gpu_children.read, None) as (_, one), child(gpu_children.read, None) as (_, two):
            for pipe in (one, two):
                found, (device, dlpack, readonly) = answer(pipe)
                assert (device, dlpack, readonly) == (GPU, (2, 0), True)
                assert found["a"] + found["b"] == list(range(ROWS))
            assert vram.statistics().leases == 2
            for pipe in (one, two):
                pipe.send("go on")
                assert answer(pipe) == "released"
        # Each said so over a connection of its own, which the keeper may read after ours.
        until(lambda: vram.statistics().leases == 0, what="the return of both leases")

    def test_a_reader_may_not_write(self) -> None:
        """By its own mapping: on a GPU that is no security boundary."""
        with vram.zeros(100, "uint8", device=GPU) as a:
            vram.publish("numbers", {"a": a})
            assert a.readonly
            with vram.attach("numbers") as lease:
                with pytest.raises(ReadOnlyError):
                    lease["a"][:] = 1
                with pytest.raises(vram.errors.UsageError):
                    drivers.get(Location("cuda")).fill(lease["a"].address, 1, 10)
                with pytest.raises(UnsupportedError, match="cop"):
                    vram.attach("numbers", access="cow")

    def test_writable_memory_is_shared_both_ways(self) -> None:
        with vram.zeros((4, 4), "int32", device=GPU) as a:
            vram.publish("numbers", {"a": a}, writable=True)
            with vram.attach("numbers", access="rw") as lease:
                lease["a"][1] = 7
                assert a.to_host().sum() == 28
            assert not a.readonly

    def test_a_reader_sees_what_was_published_and_nothing_else(self) -> None:
        """Decision 020: a slice is copied, what a shrink left is zeroed, and what is whole goes as it is."""
        shown, secret = 0x5A, 0xA5
        with vram.zeros((64, 1024), "uint8", device=GPU) as a:
            a.fill(secret)
            a[8:16].fill(shown)
            assert set(vram.publish("numbers", {"part": a[8:16]}).copied) == {"part"}
            assert not a.readonly
            found = all_bytes("numbers")
            assert (found.count(shown), found.count(secret)) == (8 << 10, 0)
            assert vram.publish("numbers", {"part": a[8:16]}, writable=True, whole=True).zero_copy
            found = all_bytes("numbers")
            assert (found.count(shown), found.count(secret)) == (8 << 10, 56 << 10)
        with vram.zeros((64, 1024), "uint8", device=GPU) as a:
            a.fill(secret)
            a.resize(8)
            a.fill(shown)
            assert vram.publish("numbers", {"a": a}).zero_copy
            found = all_bytes("numbers")
            assert (found.count(shown), found.count(secret)) == (8 << 10, 0)

    def test_what_is_copied_stays_on_its_device(self) -> None:
        with vram.zeros((8, 8), "float32", device=GPU) as a:
            a[:] = np.arange(64).reshape(8, 8)
            vram.publish("first", {"a": a})
            with vram.attach("first") as lease:
                copied = {"host": np.arange(5), "gpu": lease["a"]}  # another's memory: it could still write to it
                published = vram.publish("numbers", copied)
            assert set(published.copied) == {"host", "gpu"}
        with vram.attach("numbers") as lease:
            assert (str(lease["host"].device), str(lease["gpu"].device)) == ("host", GPU)
            assert (lease["gpu"].to_host() == np.arange(64).reshape(8, 8)).all()
            assert (lease["host"].numpy() == np.arange(5)).all()

    def test_one_array_under_two_names_is_copied_twice(self) -> None:
        """Also where it was closed after the first."""
        with vram.zeros(1000, "uint8", device=GPU) as a, vram.zeros(1000, "uint8", device=GPU) as b:
            a.fill(7)
            vram.publish("numbers", {"a": a, "b": b})  # frozen: what is to be writable must be copied
            vram.publish("twice", {"p": a, "x": b, "q": a}, writable=True, consume=True)
        with vram.attach("twice") as lease:
            assert {name: int(array.to_host().max()) for name, array in lease.items()} == {"p": 7, "x": 0, "q": 7}

    def test_what_is_empty_stays_on_its_device(self) -> None:
        with vram.zeros(10, device=GPU) as a, vram.empty((0, 4), device=GPU) as empty:
            vram.publish("numbers", {"a": a, "here": np.empty((0, 3)), "there": empty})
        with vram.attach("numbers") as lease:
            assert [str(lease[name].device) for name in ("a", "here", "there")] == [GPU, "host", GPU]
            assert lease["here"].numpy().shape == (0, 3)

    def test_through_a_channel_and_back(self) -> None:
        ours, theirs = vram.ArrayChannel.pair()
        process = CHILDREN.Process(target=gpu_children.echo, args=(theirs,))
        process.start()
        theirs.close()
        with ours, vram.zeros((16, 16), "float32", device=GPU, capacity=1 << 16) as a:
            for round_ in range(1, 4):
                a.resize(16 * round_)
                ours.send(a)
                assert ours.recv(timeout=SOON) is a, "one's own array comes back as what it is"
                assert a[0].to_host()[0] == round_
            ours.send(None)
        process.join(SOON)
        assert process.exitcode == 0
        process.close()

    def test_through_a_queue(self) -> None:
        there, back = CHILDREN.Queue(), CHILDREN.Queue()
        process = CHILDREN.Process(target=gpu_children.from_queue, args=(there, back))
        process.start()
        with vram.zeros((16, 16), "float32", device=GPU) as a:
            for number in (1, 2, 3):
                a.fill(number)
                there.put(a)
                assert back.get(timeout=SOON) == 256.0 * number
            there.put(None)
            process.join(SOON)
            assert process.exitcode == 0
        process.close()
        for queue in (there, back):
            queue.close()
            queue.join_thread()

    @pytest.mark.usefixtures("two_gpus")
    def test_a_gpu_that_is_hidden_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with vram.zeros(100, device=GPU) as a:
            vram.publish("numbers", {"a": a})
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
            with child(gpu_children.read_hidden) as (_, pipe):
                kind, said = answer(pipe)
        assert kind == "UnsupportedError"
        assert "CUDA_VISIBLE_DEVICES" in said

    @pytest.mark.usefixtures("two_gpus")
    def test_a_device_has_one_uuid_whatever_is_visible(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with vram.zeros((ROWS, 256), device=OTHER) as a:
            vram.publish("numbers", {"a": a})
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
            with child(gpu_children.read, None) as (_, pipe):
                found, where = answer(pipe)
                assert where == (GPU, (2, 0), True), "the only one that it sees is its first"
                assert found["a"] == [0.0] * ROWS
                pipe.send("go on")

    @pytest.mark.usefixtures("two_gpus")
    def test_a_reader_on_another_gpu(self) -> None:
        with child(gpu_children.publish_and_wait, GPU, ROWS) as (_, maker):
            assert answer(maker) is True
            with child(gpu_children.read, OTHER) as (_, pipe):
                found, (device, dlpack, _) = answer(pipe)
                assert (device, dlpack) == (GPU, (2, 1))
                assert found["a"] + found["b"] == list(range(ROWS))
                pipe.send("go on")
                assert answer(pipe) == "released"

    @pytest.mark.usefixtures("two_gpus")
    def test_a_region_of_several_gpus_grows_for_all(self) -> None:
        driver = drivers.get(Location("cuda"))
        places = [Location("cuda", 0), Location("cuda", 1)]
        granule = driver.mem_granularity(places[0], vram.memory.HandleKind.POSIX_FD).recommended
        with Region.create(
            places[0], driver=driver, capacity=4 * granule, chunk=granule, nbytes=1, users=places
        ) as region:
            for size in (granule, 3 * granule):
                region.resize(size)
                for start in range(0, size, granule):
                    rights = [driver.mem_get_access(region.address + start, place) for place in places]
                    assert rights == [Access.READ_WRITE] * 2

    @pytest.mark.usefixtures("two_gpus")
    def test_copies_between_gpus(self) -> None:
        with vram.asarray(np.arange(1000.0), device=GPU) as a, vram.asarray(a, device=OTHER) as b:
            assert (str(a.device), str(b.device)) == (GPU, OTHER)
            assert (b.to_host() == np.arange(1000.0)).all()

    @pytest.mark.parametrize("gpu", GPUS)
    @pytest.mark.parametrize("kind", ["vmm", "legacy", "pool"])
    def test_memory_of_another_library_is_lent_from_every_gpu(self, kind: str, gpu: int) -> None:
        """S3: and is known to be on it, here and where it is opened."""
        driver: Any = drivers.get(Location("cuda"))
        granule = driver.mem_granularity(Location("cuda", gpu), HandleKind.POSIX_FD).recommended
        with short_directory() as folder, CudaStranger(gpu) as stranger:
            base = {
                "vmm": lambda: stranger.mapped((granule,), HandleKind.POSIX_FD),
                "legacy": lambda: stranger.legacy(granule),
                "pool": lambda: stranger.pooled(granule, shareable=True)[1],
            }[kind]()
            theirs = gpu_children.Interface(base + 4096, (ROWS,))
            route = vram.explain(theirs)
            assert (route.made_by, route.device) == (kind, f"cuda:{gpu}")
            with vram.share(theirs) as array:
                array[:] = np.arange(ROWS, dtype="i4")
            with vram.lend(theirs, at=f"{folder}/lent", writable=True):
                with child(gpu_children.borrow, f"{folder}/lent") as (_, pipe):
                    assert answer(pipe) == (f"cuda:{gpu}", (2, gpu), list(range(ROWS)))
            with vram.share(theirs) as array:
                assert array.to_host().tolist() == [number + 1 for number in range(ROWS)]

    def test_contexts_are_made_where_work_is_done(self) -> None:
        with child(gpu_children.devices) as (_, pipe):
            before, after = answer(pipe)
        assert not any(before), "making, mapping and sharing memory takes none"
        assert after == [True] + [False] * (len(after) - 1)

    def test_the_books_are_empty(self) -> None:
        gc.collect()
        assert drivers.get(Location("cuda")).live() == LiveObjects(0, 0, 0, 0)


@pytest.mark.standin
class TestOnTheStandin(GpuMemory):
    pass


@pytest.mark.gpu
class TestOnHardware(GpuMemory):
    pass
