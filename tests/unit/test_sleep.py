"""Sleep and wake as users of arrays write it; what regions do is in tests/contracts/sleep.py."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.contracts.region import load, store
from tests.support.deadlines import SOON
from tests.support.forked import forked
from tests.support.threads import race

import vram
from vram.errors import AsleepError, BusyError, UsageError
from vram.memory import PhysicalAllocation, Region
from vram.memory.backups import Backup, FileBackup, NamedFileBackup, PageableBackup, PinnedBackup
from vram.memory.sleep import Remapped, sleep_regions, wake_regions


def test_arrays_sleep_with_all_that_lies_on_their_region(tmp_path: Path) -> None:
    with (
        vram.zeros((10, 4), "float32", device="host", capacity=1_000_000) as one,
        vram.asarray(np.arange(5.0), device="host") as other,
    ):
        one[:] = 3
        view, part, address = one.numpy(), one[2:4], one.address
        mapped = one.region.mapped + other.region.mapped
        slept = vram.sleep([one, part, other, other.region], tmp_path)
        assert (slept.nbytes, slept.freed) == (160 + 40, mapped)
        calls: list[Callable[[], object]] = [
            one.numpy,
            part.numpy,
            one.copy,
            one.memoryview,
            lambda: vram.copy(one),
            lambda: np.asarray(one),
            lambda: one[0],
            lambda: one.__setitem__(0, 1),
            lambda: one.fill(1),
            lambda: one.resize(20),
            lambda: one.resize(1),
            lambda: one.__dlpack__(),
            lambda: vram.sleep(one, tmp_path),
        ]
        for call in calls:
            with pytest.raises(AsleepError, match=r"vram\.wake|already"):
                call()
        assert (one.shape, one.address, one.nbytes) == ((10, 4), address, 160)
        assert "asleep" in repr(one.region)
        woke = vram.wake([part, other])
        assert (woke.nbytes, woke.discarded) == (200, 0)
        assert (view == 3).all()
        assert part.numpy()[1, 3] == 3
        assert other.numpy().tolist() == [0, 1, 2, 3, 4]
        one.resize(1_000_000)
        assert one.address == address


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        ((3,), {}, "arrays and regions"),
        (([1, 2],), {}, "arrays and regions"),
        (("ARRAY", 7), {}, "directory"),
        (("ARRAY", "host"), {}, "directory"),
        (("ARRAY", "/nowhere/at/all"), {}, "no directory"),
        (("ARRAY", "d" * 5000), {}, "no directory"),
        (("ARRAY", ""), {}, "current"),
        (("ARRAY", None), {"shared": "perhaps"}, "refuse"),
        (("ARRAY", None), {"after": "event"}, "event"),
    ],
)
def test_wrong_calls_change_nothing(arguments: tuple[Any, ...], options: dict[str, Any], says: str) -> None:
    with vram.asarray([1.0, 2.0], device="host") as array:
        given = [array if one == "ARRAY" else one for one in arguments]
        with pytest.raises(UsageError, match=says):
            vram.sleep(*given, **options)
        assert array.numpy().tolist() == [1, 2]
    with pytest.raises(UsageError, match="arrays and regions"):
        vram.wake(5)  # type: ignore[arg-type]


def test_what_is_published_or_attached_sleeps_only_here(tmp_path: Path) -> None:
    with vram.private_keeper(), vram.asarray(np.arange(4.0), device="host") as array:
        vram.publish("n", {"x": array})
        with vram.attach("n") as lease:
            seen = lease["x"].numpy()
            for one in (array, lease["x"]):
                with pytest.raises(BusyError, match="others hold"):
                    vram.sleep(one, tmp_path)
                assert vram.sleep(one, tmp_path, shared="unmap").freed == 0
                with pytest.raises(AsleepError):
                    one.numpy()
            with vram.attach("n") as another:
                assert another["x"].numpy().tolist() == [0, 1, 2, 3]
            vram.wake([array, lease["x"]])
            assert seen.tolist() == array.numpy().tolist() == [0, 1, 2, 3]
            assert not seen.flags.writeable
            vram.sleep(lease["x"], None, shared="unmap")
        del seen


def test_what_a_forked_child_has_mapped_sleeps_only_here(tmp_path: Path) -> None:
    """It would keep the old bytes; what was made since, or after it has ended, sleeps."""
    with vram.zeros((2, 1 << 19), "int32", device="host") as array:
        array[:] = 7
        view = array.numpy()
        with forked(lambda: int(view[0, 0])) as child:
            with pytest.raises(BusyError, match="a child that was forked at"):
                vram.sleep(array, tmp_path)
            with vram.asarray([1.0], device="host") as since:
                assert vram.sleep([since], tmp_path).freed
            with pytest.raises(BusyError, match="forked"):
                vram.sleep(array, None)
            assert vram.sleep(array, tmp_path, shared="unmap").freed == 0
            vram.wake(array)
            array[:] = 9  # the same memory: the child sees it
            with pytest.raises(BusyError, match="forked"):
                vram.sleep(array, tmp_path)  # mapped anew here, and the same memory still
            assert child.end() == 9
        assert vram.sleep(array, tmp_path).freed == array.region.capacity
        vram.wake(array)
        assert (view == 9).all()


def test_a_child_that_is_forked_while_memory_falls_asleep_keeps_it_awake(tmp_path: Path) -> None:
    with vram.asarray([1.0], device="host") as array:
        with ExitStack() as stack:

            def fork(event: Remapped) -> None:
                if (event.verb, event.when) == ("sleep", "before"):
                    stack.enter_context(forked())

            end = vram.memory.on_remap(fork)
            try:
                with pytest.raises(BusyError, match="forked"):
                    vram.sleep(array, tmp_path)
            finally:
                end()
        assert array.numpy().tolist() == [1]
        assert vram.sleep(array, tmp_path).freed
        vram.wake(array)
        assert array.numpy().tolist() == [1]


def test_what_was_only_unmapped_wakes_as_it_is_whatever_is_said_of_its_bytes(tmp_path: Path) -> None:
    """They were never put aside, and are the others': to make them zero would take them from those, too (I13)."""
    with vram.asarray([1.0, 2.0], device="host") as array:
        view = array.numpy()
        with forked(lambda: int(view[1])) as child, vram.asarray([3.0], device="host") as alone:
            vram.sleep([array, alone], tmp_path, shared="unmap")
            report = vram.wake([array, alone], discard=True)
            assert (report.nbytes, report.discarded) == (0, alone.nbytes)
            assert view.tolist() == [1, 2]
            assert alone.numpy().tolist() == [0]
            assert child.end() == 2


def test_nothing_is_told_where_nothing_changes(tmp_path: Path) -> None:
    """What is told of a change may wake memory itself: it is over with what is awake."""
    told: list[tuple[str, str]] = []

    def wake(event: Remapped) -> None:
        told.append((event.verb, event.when))
        assert len(told) < 9
        if event.when == "after":
            vram.wake(array)

    with vram.asarray([1.0], device="host") as array:
        end = vram.memory.on_remap(wake)
        try:
            assert vram.wake(array).nbytes == 0
            assert not told
            assert vram.sleep([], tmp_path).nbytes == 0
            assert not told
            vram.sleep(array, tmp_path)
            assert told == [("sleep", "before"), ("sleep", "after"), ("wake", "before"), ("wake", "after")]
            assert array.numpy().tolist() == [1]
        finally:
            end()


def test_what_was_ever_lent_is_held_for_good_and_the_error_says_why(tmp_path: Path) -> None:
    """The lender sees its borrowers go. It does not see a descriptor that one of them kept, or passed on."""
    with vram.asarray([1.0, 2.0], device="host") as array:
        with vram.lend(array, at=str(tmp_path / "s")):
            (allocation,), _ = array.region.segments(0, 16)
            passed_on = os.dup(allocation.export())  # as whoever was sent it may
            allocation.close()
        with pytest.raises(BusyError, match=r"kept or passed on.*also when a loan is over.*Copy it") as caught:
            vram.sleep(array, tmp_path)
        assert [one.partition(" (")[0] for one in caught.value.holders] == ["whoever it was exported to"]
        with (
            PhysicalAllocation.import_(array.region.driver, passed_on, array.region.mapped) as theirs,
            Region.from_allocations(array.region.driver, [theirs], nbytes=16) as seen,
            vram.Array(seen, array.dtype, array.shape) as shown,
        ):
            assert shown.numpy().tolist() == [1, 2]
        os.close(passed_on)
        assert vram.sleep(array, tmp_path, shared="unmap").freed == 0
        vram.wake(array)
        assert array.numpy().tolist() == [1, 2]


def test_asleep_it_is_not_published_sent_or_lent(tmp_path: Path) -> None:
    ours, theirs = vram.ArrayChannel.pair()
    with ours, theirs, vram.private_keeper(), vram.asarray([1.0], device="host") as array:
        vram.sleep(array, tmp_path)
        for call in (
            lambda: vram.publish("n", {"x": array}),
            lambda: ours.send(array, timeout=SOON),
            lambda: vram.lend({"x": array}, at=str(tmp_path / "s")),
        ):
            with pytest.raises(AsleepError):
                call()
        assert vram.list_entries() == []
        vram.wake(array)
        ours.send(array, timeout=SOON)
        with theirs.recv(timeout=SOON) as came:
            assert came.numpy().tolist() == [1]


def test_one_of_many_that_put_the_same_to_sleep_does(tmp_path: Path) -> None:
    with vram.asarray(np.arange(1000.0), device="host") as array, vram.asarray([1.0], device="host") as other:

        def sleep() -> bool:
            try:
                vram.sleep([array, other], tmp_path)
            except (AsleepError, BusyError):
                return False
            return True

        def wake() -> int:
            try:
                return vram.wake([other, array]).nbytes
            except BusyError:
                return 0

        for _ in range(10):
            assert sum(race(*[sleep] * 4)) == 1
            assert sum(race(*[wake] * 4)) == 8008
            assert array.numpy()[999] == 999


def test_what_is_said_after_it_is_done_is_raised_when_it_is(tmp_path: Path) -> None:
    def fail(event: Remapped) -> None:
        if event.when == "after":
            raise RuntimeError(event.verb)

    with vram.asarray([1.0], device="host") as array:
        end = vram.memory.on_remap(fail)
        try:
            with pytest.raises(RuntimeError, match="sleep"):
                vram.sleep(array, tmp_path)
            assert array.region.asleep is not None
            with pytest.raises(RuntimeError, match="wake"):
                vram.wake(array)
            assert array.numpy().tolist() == [1]
        finally:
            end()


# -- backups that the caller makes --------------------------------------------------------------------------------
G = 2 << 20


def test_a_backup_is_for_one_region_as_it_is(tmp_path: Path) -> None:
    with Region.create("host", capacity=4 * G, chunk=G, nbytes=G) as region:
        backup = NamedFileBackup(region.chunks, tmp_path)
        region.grow(2 * G)
        with pytest.raises(UsageError, match=rf"made for chunks of \({G},\) bytes"):
            sleep_regions({region: backup})
        for wrong in (PageableBackup(region.chunks), PinnedBackup(region.chunks)):
            with pytest.raises(UsageError, match="no better off"):
                sleep_regions({region: wrong})
        assert region.asleep is None
        assert not list(tmp_path.iterdir())


def test_a_file_with_a_name_is_there_while_its_region_sleeps(tmp_path: Path) -> None:
    with Region.create("host", capacity=2 * G, chunk=G, nbytes=2 * G) as region:
        with region.driver.buffer(region.address, 2 * G, readonly=False) as view:  # type: ignore[attr-defined]
            view[G - 2 : G + 2] = b"text"
        backup: Backup = NamedFileBackup(region.chunks, tmp_path, piece=1 << 19)
        for keep in (False, True):  # a file is not kept
            assert sleep_regions({region: backup}).nbytes == 2 * G
            (file,) = tmp_path.iterdir()
            assert (file.stat().st_size, file.stat().st_mode & 0o777) == (2 * G, 0o600)
            wake_regions([region], keep=keep)
            assert not list(tmp_path.iterdir())
            with region.driver.buffer(region.address, 2 * G, readonly=True) as view:  # type: ignore[attr-defined]
                assert bytes(view[G - 2 : G + 2]) == b"text"
        sleep_regions({region: backup})
        assert isinstance(backup, FileBackup)
    assert not list(tmp_path.iterdir())  # it went with the region


def test_a_file_with_a_name_goes_at_the_end_of_the_process(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from vram.memory import Region
        from vram.memory.backups import NamedFileBackup
        from vram.memory.sleep import sleep_regions
        region = Region.create("host", capacity=1 << 21, nbytes=1 << 21, managed=True)
        sleep_regions({region: NamedFileBackup(region.chunks, Path(sys.argv[1]))})
        assert len(list(Path(sys.argv[1]).iterdir())) == 1
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=SOON, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(tmp_path.iterdir())


@pytest.mark.standin
@pytest.mark.parametrize("make", [PageableBackup, PinnedBackup])
def test_a_kept_backup_is_made_anew_for_more_bytes(make: type[PageableBackup | PinnedBackup]) -> None:
    with Region.create("cuda:0", capacity=2 * G, chunk=2 * G, nbytes=5) as region:
        backup = make(region.chunks)
        sleep_regions({region: backup})
        assert [size for _, size in backup.spans(0, 5)] == [5]
        wake_regions([region], keep=True)
        assert backup.is_there
        region.grow(2 * G)
        store(region.driver, region.address + G, b"late")
        sleep_regions({region: backup})
        assert sum(size for _, size in backup.spans(0, 2 * G)) == 2 * G
        wake_regions([region])
        assert (load(region.driver, region.address + G, 4), backup.is_there, backup.spans(0, 2 * G)) == (
            b"late",
            False,
            [],
        )
    vram.memory.trim()
