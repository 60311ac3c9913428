"""Plain pickle: what was published travels as keeper, name and version; everything else refuses and says what to do."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.deadlines import until

import vram
from vram.errors import AccessDeniedError, NotFoundError, PeerGoneError, UsageError
from vram.keeper.client import close_client

pytestmark = pytest.mark.usefixtures("kept")


def rows(count: int = 8, **options: Any) -> vram.Array:
    array = vram.empty((count, 4), "int64", device="host", **options)
    array.numpy()[:] = np.arange(count * 4).reshape(count, 4)
    return array


def again(array: vram.Array) -> vram.Array:
    found = pickle.loads(pickle.dumps(array))
    assert isinstance(found, vram.Array)
    return found


def test_a_published_array_travels_as_its_name() -> None:
    with rows() as a:
        vram.publish("n", {"a": a})
        assert len(pickle.dumps(a)) < 500
        with again(a) as found:
            assert (found.numpy() == a.numpy()).all()
            assert found.readonly
            assert found.address != a.address
            with again(found) as further:
                assert (further.numpy() == a.numpy()).all()
    assert vram.statistics().leases == 0


def test_slices_travel_as_their_part_of_it() -> None:
    with rows() as a:
        part = a[2:6]
        vram.publish("n", {"part": part}, whole=True)
        for look in (lambda x: x[:], lambda x: x[1:3], lambda x: x[0], lambda x: x[3][1:2], lambda x: x[4:]):
            with look(part) as slice_, again(slice_) as found:
                assert found.shape == slice_.shape
                assert (found.numpy() == slice_.numpy()).all()
        with pytest.raises(UsageError, match="publish"):
            pickle.dumps(a)
        part.close()


def test_attached_arrays_travel_with_their_access() -> None:
    with rows() as a:
        vram.publish("n", {"a": a}, writable=True)
        for access in ("r", "rw", "cow"):
            with vram.attach("n", access=access) as lease, again(lease["a"]) as found, again(lease["a"][3:5]) as part:
                assert found.readonly is (access == "r")
                assert found.region.is_private is (access == "cow")
                assert part.numpy()[0, 0] == 12
        with vram.attach("n", access="rw") as lease, again(lease["a"]) as found:
            found[0, 0] = -1
            assert lease["a"].numpy()[0, 0] == a.numpy()[0, 0] == -1


def test_a_private_copy_travels_by_name_until_it_is_written() -> None:
    """access="cow" is a copy of one process's own: its name would bring the receiver other bytes."""
    vram.publish("n", {"x": np.arange(3)})
    with vram.attach("n", access="cow") as lease:
        with again(lease["x"]) as one:
            one[1] = 8
            assert lease["x"].numpy().tolist() == [0, 1, 2]
        lease["x"][0] = 9
        with pytest.raises(UsageError, match=r"private copy .* that was written to.*\.copy\(\)"):
            pickle.dumps(lease["x"])
        with copy.deepcopy(lease["x"]) as other:
            assert other.numpy().tolist() == [9, 1, 2]


def test_s6_a_version_is_attached_once_however_many_of_its_arrays_are_unpickled() -> None:
    with rows() as a:
        vram.publish("n", {f"a{n}": a[n] for n in range(8)} | {"x": np.arange(5), "none": np.empty((0, 3))})
        with vram.attach("n") as lease:
            stored = pickle.dumps([*lease.values(), *lease.values()])
        found = pickle.loads(stored)
        assert vram.statistics().leases == 2, "one for each of the two memories"
        assert [int(array.numpy().sum()) for array in found[:8]] == [int(a.numpy()[n].sum()) for n in range(8)]
        assert found[8].numpy().tolist() == [0, 1, 2, 3, 4]
        assert found[9].shape == (0, 3)
        regions = {id(array.region) for array in found}
        assert len(regions) == 2
        view = found[0].numpy()
        del found
        gc.collect()
        assert vram.statistics().leases == 1
        assert view.tolist() == [0, 1, 2, 3]
        del view
        gc.collect()
        assert vram.statistics().leases == 0
        back = pickle.loads(stored)[3]
        assert back.numpy().tolist() == [12, 13, 14, 15]
        back.close()
        assert vram.statistics().leases == 0


def test_what_was_closed_is_attached_anew() -> None:
    vram.publish("n", {"x": np.arange(3)})
    with vram.attach("n") as lease:
        stored = pickle.dumps(lease["x"])
    first = pickle.loads(stored)
    view = first.numpy()
    first.close()
    with pickle.loads(stored) as second:
        assert second.numpy().tolist() == view.tolist() == [0, 1, 2]
    del view


def test_another_process_unpickles_it(tmp_path: Path) -> None:
    stored = tmp_path / "arrays.pickle"
    with rows() as a:
        vram.publish("n", {"a": a, "x": np.arange(3)})
        with vram.attach("n") as lease:
            stored.write_bytes(pickle.dumps({"a": a, "part": a[5:], "x": lease["x"]}))
    code = f"""
import pickle
import socket
found = pickle.load(open({str(stored)!r}, "rb"))
print(found["a"].numpy().sum(), found["part"].numpy()[0, 0], found["x"].numpy().tolist(), found["a"].readonly)
"""
    environment = {key: value for key, value in os.environ.items() if key != "VRAM_KEEPER"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path
    )
    assert done.stdout == "496 20 [0, 1, 2] True\n", done.stderr


def test_what_was_not_published_refuses_and_says_what_to_do() -> None:
    with rows(capacity=2_000_000, chunk="2MiB") as a:
        for refused in (a, a[2:3]):
            with pytest.raises(UsageError, match=r"publish .* Queue, Pipe or Pool .* \.copy\(\)"):
                pickle.dumps(refused)
        early = a[2:3]
        vram.publish("n", {"a": a}, writable=True)
        with pytest.raises(UsageError):
            pickle.dumps(early)  # it does not know; a slice taken now does
        early.close()
        a.resize(9)
        with pytest.raises(UsageError):
            pickle.dumps(a)  # row 8 was not published
        with a[:8] as part, again(part) as found:
            assert found.shape == (8, 4)


def test_rows_that_were_given_back_and_grown_again_are_other_memory() -> None:
    with rows(200_000, chunk="2MiB") as a:
        vram.publish("n", {"a": a}, writable=True)
        again(a).close()
        a.resize(8)
        a.resize(200_000)
        a[:] = -1
        for part in (a, a[150_000:]):
            with pytest.raises(UsageError):
                pickle.dumps(part)


def test_what_is_gone_raises_at_its_first_use(kept: vram.Keeper) -> None:
    vram.publish("n", {"x": np.arange(3)})
    with vram.attach("n") as lease:
        stored = pickle.dumps(lease["x"])
        spoilt = pickle.dumps(lease["x"]).replace(b"\x8c\x01x", b"\x8c\x01y")
    with pytest.raises(NotFoundError, match="no array 'y'"):
        pickle.loads(spoilt).numpy()
    until(lambda: vram.statistics().leases == 0)
    vram.remove("n")
    with pytest.raises(NotFoundError, match="n"):
        pickle.loads(stored).numpy()
    close_client(kept.path)
    with pytest.raises(PeerGoneError):
        pickle.loads(stored.replace(b"keeper.sock", b"nobody.sock")).numpy()


def test_a_slice_that_lies_outside_is_refused() -> None:
    vram.publish("n", {"x": np.arange(3)})
    with vram.attach("n") as lease:
        rebuild, arguments = lease["x"].__reduce__()
    path, name, version, entry, access, _, _, dtype = arguments
    for start, shape in [(-8, (1,)), (8, (300_000,)), (2 << 20, (1,))]:
        with pytest.raises(UsageError):
            rebuild(path, name, version, entry, access, start, shape, dtype).numpy()
    with pytest.raises(AccessDeniedError):
        rebuild(path, name, version, entry, "rw", 0, (3,), dtype).numpy()
    gc.collect()
    until(lambda: vram.statistics().leases == 0)


# -- what is no pickle of ours --------------------------------------------------------------------------------------
