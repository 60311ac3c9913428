"""Groups: what ranks compute together, bit for bit; and whoever is missing, late, wrong or dead is named on all others.

Ranks are threads where nothing dies, and processes where something does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import children as processes
from tests.support import group_children as children
from tests.support.deadlines import SOON
from tests.support.groups import _raised, right, run, started, until_here, until_listening
from tests.support.threads import race

import vram
from vram.collectives import host
from vram.errors import ClosedError, LeakWarning, PeerGoneError, UsageError, WaitTimeoutError

RNG = np.random.default_rng(14)


# -- computing -------------------------------------------------------------------------------------------------------
KINDS = ("float32", "float16", "bfloat16", "int32", "float64", "int64")


def inputs(size: int, count: int, kind: str) -> list[np.ndarray[Any, Any]]:
    dtype = vram.empty(1, kind, device="host").dtype
    if dtype.kind == "i":
        return [RNG.integers(-(2**31), 2**31 - 1, count).astype(dtype) for _ in range(size)]
    return [(RNG.standard_normal(count) * 100).astype(dtype) for _ in range(size)]


def reference(op: str, given: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The result in the order of the ranks, written down another way than the code is."""
    dtype = given[0].dtype
    wide = [one.astype(np.float32) if dtype.itemsize == 2 else one for one in given]
    total = wide[0]
    for one in wide[1:]:
        total = {"sum": lambda a, b: a + b, "min": np.minimum, "max": np.maximum}[op](total, one)
    return total.astype(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", host.OPS)
def test_every_rank_has_the_result_of_all(at: str, op: Any, kind: str) -> None:
    size, count = 3, 70_001
    given = inputs(size, count, kind)
    expected = reference(op, given).tobytes()

    def work(group: vram.Group) -> list[bytes]:
        mine = given[group.rank]
        with (
            group.symmetric(count, kind, device="host") as buffer,
            group.symmetric(count, kind, device="host") as other,
        ):
            buffer.array.numpy()[:] = mine
            staged, apart = mine.copy(), np.empty_like(mine)
            group.all_reduce(staged, op)
            group.all_reduce(buffer, op, out=apart)
            assert buffer.array.numpy().tobytes() == mine.tobytes()
            group.all_reduce(buffer, op, out=other)
            group.all_reduce(buffer, op)
            return [one.tobytes() for one in (staged, apart, other.array.numpy(), buffer.array.numpy())]

    for results in right(run(size, at, work)):
        assert [one == expected for one in results] == [True] * 4


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 1000, 2**20 + 17, 3 * 2**20])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_sizes_come_out_also_those_that_go_in_pieces(at: str, size: int, count: int) -> None:
    given = inputs(size, count, "float32")

    def work(group: vram.Group) -> bytes:
        mine = given[group.rank].copy()
        group.all_reduce(mine)
        return mine.tobytes()

    expected = reference("sum", given).tobytes()
    assert [one == expected for one in right(run(size, at, work))] == [True] * size


def test_what_is_no_ordinary_number_comes_out_alike_on_all_ranks(at: str) -> None:
    odd = [np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-45, -1e-45, 3.4e38]
    given = [np.array(np.roll(odd, rank).tolist() * 9, np.float32) for rank in range(4)]

    def work(group: vram.Group) -> list[bytes]:
        results = []
        for op in host.OPS:
            with group.symmetric(72, device="host") as buffer:
                staged = given[group.rank].copy()
                buffer.array.numpy()[:] = staged
                with np.errstate(all="ignore"):
                    group.all_reduce(buffer, op)  # type: ignore[arg-type]
                    group.all_reduce(staged, op)  # type: ignore[arg-type]
                results += [buffer.array.numpy().tobytes(), staged.tobytes()]
        return results

    came = right(run(4, at, work))
    assert came[0][::2] == came[0][1::2]  # by either way
    assert came == [came[0]] * 4
    zeros = np.full(8, -0.0, np.float32)
    host.reduce("sum", [zeros, zeros], [zeros])
    assert not np.signbit(zeros).any()


@pytest.mark.parametrize("each", [1, 7, 1_500_000])
def test_what_is_moved_arrives(at: str, each: int) -> None:
    size = 3

    def work(group: vram.Group) -> None:
        rank = group.rank
        mine = np.arange(each, dtype="int64") + 10_000_000 * rank
        gathered = np.empty((size, each), "int64")
        group.all_gather(mine, gathered)
        assert (gathered == [np.arange(each) + 10_000_000 * other for other in range(size)]).all()
        sent = np.empty((size, each), "int64")
        group.all_to_all(gathered + 1000 * rank, sent)
        assert (sent == [mine + 1000 * other for other in range(size)]).all()
        part = np.empty(each, "int64")
        group.reduce_scatter(gathered, part)
        assert (part == size * mine).all()
        if rank != 2:
            mine[:] = -1
        group.broadcast(mine, 2)
        assert (mine == np.arange(each) + 20_000_000).all()

    right(run(size, at, work))


def test_torch_like_buffers_and_vram_arrays_are_taken(at: str) -> None:
    def work(group: vram.Group) -> None:
        with vram.zeros(4, "float32", device="host") as array:
            array.numpy()[:] = group.rank
            group.all_reduce(array)
            assert array.numpy().tolist() == [1.0] * 4
        raw = bytearray(4)
        group.broadcast(memoryview(raw) if group.rank else memoryview(b"abcd"))
        assert raw == (b"abcd" if group.rank else bytes(4))

    right(run(2, at, work))


# -- symmetric buffers -----------------------------------------------------------------------------------------------
def test_a_buffer_shows_the_memory_of_all_ranks(at: str) -> None:
    def work(group: vram.Group) -> None:
        with group.symmetric((4, 3), "int16", device="host") as buffer:
            assert (buffer.shape, buffer.dtype, buffer.nbytes) == ((4, 3), np.int16, 24)
            buffer.array.numpy()[:] = group.rank + 1
            group.barrier()
            assert [int(peer.numpy()[3, 2]) for peer in buffer.peers] == [1, 2, 3]
            assert buffer.addresses == tuple(peer.address for peer in buffer.peers)
            assert buffer.peers[group.rank] is buffer.array
            group.barrier()
            buffer.peers[(group.rank + 1) % 3].numpy()[0, 0] = 100 + group.rank
            group.barrier()
            assert int(buffer.array.numpy()[0, 0]) == 100 + (group.rank - 1) % 3
            group.barrier()

    right(run(3, at, work))


def test_a_buffer_grows_on_all_ranks_at_the_same_addresses(at: str) -> None:
    rows = 2**19  # 2 MiB each time

    def work(group: vram.Group) -> None:
        with group.symmetric(rows, device="host", capacity=4 * rows) as buffer:
            addresses, before = buffer.addresses, buffer.array.numpy()
            before[:] = group.rank
            buffer.resize(3 * rows)
            assert buffer.addresses == addresses
            buffer.array.numpy()[rows:] = 10 + group.rank
            group.barrier()
            for rank, peer in enumerate(buffer.peers):
                assert peer.shape == (3 * rows,)
                assert (peer.numpy()[[0, rows - 1, rows, -1]] == [rank, rank, 10 + rank, 10 + rank]).all()
            group.all_reduce(buffer)
            assert (buffer.array.numpy()[[0, -1]] == [1, 21]).all()
            with pytest.raises(UsageError, match="cannot shrink"):
                buffer.resize(5)

    right(run(2, at, work))


def test_a_buffer_outlives_the_group_and_the_maker(at: str) -> None:
    kept: list[Any] = []

    def work(group: vram.Group) -> None:
        buffer = group.symmetric(10, device="host")
        buffer.array.numpy()[:] = group.rank
        group.barrier()
        if group.rank:
            buffer.close()
            with pytest.raises(ClosedError):
                buffer.peers
            with pytest.raises(ClosedError):
                group.all_reduce(buffer)
        else:
            kept.append(buffer)
        assert "closed" in repr(buffer) or not group.rank

    right(run(2, at, work))
    assert kept[0].peers[1].numpy().tolist() == [1.0] * 10
    kept.pop().close()


# -- agreeing --------------------------------------------------------------------------------------------------------
def test_ranks_that_disagree_hear_it_and_go_on(at: str) -> None:
    def work(group: vram.Group) -> list[str]:
        said = []
        for call in (
            lambda: group.symmetric(4 + group.rank, device="host"),
            lambda: group.symmetric(4, "float32" if group.rank else "int32", device="host"),
            lambda: group.all_reduce(np.zeros(4), "sum" if group.rank else "max"),
            lambda: group.all_reduce(np.zeros(4, "float32" if group.rank else "int32")),
            lambda: group.all_reduce(np.zeros(4 + group.rank)),
            lambda: group.barrier() if group.rank else group.broadcast(np.zeros(1)),
            lambda: group.broadcast(np.zeros(1), group.rank),
        ):
            with pytest.raises(UsageError, match="do not agree: rank") as caught:
                call()  # type: ignore[no-untyped-call]
            said.append(str(caught.value))
        value = np.ones(1)
        group.all_reduce(value)
        assert value[0] == 2
        return said

    first, second = right(run(2, at, work))
    assert "rank 1 called symmetric (float32 [5] on host, capacity" in first[0]
    assert "rank 0 called symmetric (float32 [4] on host, capacity" in second[0]


@pytest.mark.parametrize(
    ("changed", "words"),
    [({"size": 3}, "takes the group for one of 3"), ({"name": "other"}, "meets the group"), ({"rank": 0}, "Busy")],
)
def test_who_takes_the_group_for_another_is_told(at: str, changed: dict[str, Any], words: str) -> None:
    came: list[Any] = []
    alone = threading.Thread(target=lambda: came.append(_raised(lambda: vram.Group(rank=0, size=2, at=at, timeout=2))))
    alone.start()
    try:
        until_listening(at)
        error = _raised(
            lambda: vram.Group(**{"name": "group", "rank": 1, "size": 2, "at": at, "timeout": SOON} | changed)
        )
        assert words in f"{type(error).__name__} {error}"
    finally:
        alone.join(SOON)
    assert isinstance(came[0], (UsageError, WaitTimeoutError))
    assert not os.path.exists(at)


def test_whoever_is_missing_is_named_on_all_who_came(at: str) -> None:
    def come(rank: int) -> BaseException:
        return _raised(lambda: vram.Group(rank=rank, size=4, at=at, timeout=0.5 if rank == 2 else SOON))

    came = race(lambda: come(0), lambda: come(2))
    assert [type(one) for one in came] == [WaitTimeoutError] * 2
    assert all("ranks 1 and 3 did not come" in str(one) for one in came)
    assert not os.path.exists(at)


def test_without_rank_0_nobody_waits_longer_than_told(at: str) -> None:
    with pytest.raises(WaitTimeoutError, match="rank 0 of the group 'group' did not come"):
        vram.Group(rank=1, size=2, at=at, timeout=0.1)


def test_a_rank_that_is_late_is_named_and_hears_it_when_it_comes(at: str) -> None:
    waited = threading.Event()

    def work(group: vram.Group) -> str:
        if group.rank == 1:
            assert waited.wait(SOON)
        error = _raised(lambda: group.symmetric(4, device="host", timeout=SOON if group.rank else 0.2))
        waited.set()
        with group.symmetric(4, device="host") as buffer:  # all of them go on
            group.all_reduce(buffer)
        return f"{type(error).__name__}: {error}"

    for one in right(run(3, at, work)):
        assert one.startswith("WaitTimeoutError: rank 1 did not come to a set-up call")


def test_whose_patience_is_over_in_a_collective_gives_up_and_the_late_one_hears_it(at: str) -> None:
    waited = threading.Event()

    def work(group: vram.Group) -> list[str]:
        said = []
        if group.rank:
            assert waited.wait(SOON)
            group.barrier()  # all have come to this one, by now
        else:
            said.append(_said(lambda: group.barrier(timeout=0.2)))
            waited.set()
        return [*said, _said(group.barrier), _said(group.barrier)]

    first, second = right(run(2, at, work))
    assert first[0].startswith("WaitTimeoutError: rank 1 of the group 'group' did not come to call 1 in time")
    for said in (*first[1:], *second):
        assert said.startswith("PeerGoneError: rank 0 of the group 'group' gave up in the middle of a call")


def _said(act: Callable[[], Any]) -> str:
    error = _raised(act)
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rank": 2}, "rank must be"),
        ({"rank": True}, "rank must be"),
        ({"size": 0}, "size must be"),
        ({"size": 65}, "size must be"),
        ({"timeout": None}, "not for ever"),
        ({"timeout": float("inf")}, "not for ever"),
        ({"timeout": "soon"}, "timeout"),
        ({"name": "a/b"}, "called by"),
        ({"at": "x" * 200}, "socket path"),
    ],
)
def test_odd_arguments_of_a_group(at: str, given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        vram.Group(**{"rank": 0, "size": 2, "at": at, "timeout": 0.1} | given)


def test_odd_arguments_of_its_calls(at: str) -> None:
    def work(group: vram.Group) -> None:
        fixed = np.zeros(4)
        fixed.flags.writeable = False
        for act, words in (
            (lambda: group.all_reduce(np.zeros(4), "mean"), "op 'mean'"),  # type: ignore[arg-type]
            (lambda: group.all_reduce(np.zeros(4, "int8")), "int8 are not reduced"),
            (lambda: group.all_reduce(np.zeros((4, 4))[:, 1]), "contiguous"),
            (lambda: group.all_reduce(fixed), "read-only"),
            (lambda: group.all_reduce(np.zeros(4), out=np.zeros(5)), "out is"),
            (lambda: group.all_reduce([1, 2]), "is no array"),  # type: ignore[arg-type]
            (lambda: group.broadcast(np.zeros(4), 1), "root 1"),
            (lambda: group.all_gather(np.zeros(4), np.zeros(5)), "where it takes 4"),
            (lambda: group.symmetric(0, device="host"), "at least one element"),
            (lambda: group.barrier(timeout=-1), "timeout"),
        ):
            with pytest.raises(UsageError, match=words):
                act()  # type: ignore[no-untyped-call]
        group.barrier()

    right(run(1, at, work))


def test_from_the_environment_of_torchrun(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(Path(at).parent))
    monkeypatch.delenv("VRAM_KEEPER", raising=False)
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x/y"}.items():
        monkeypatch.setenv(key, value)
    with vram.Group.from_env() as group:
        assert (group.rank, group.size) == (0, 1)
        group.barrier()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="2 of 1 processes are on this machine"):
        vram.Group.from_env()
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(UsageError, match="RANK is 'first'"):
        vram.Group.from_env()


# -- the end ---------------------------------------------------------------------------------------------------------
def test_who_leaves_is_named_at_the_next_call_and_not_before(at: str) -> None:
    left = threading.Event()

    def work(group: vram.Group) -> None:
        group.barrier()
        if group.rank == 1:
            group.close()
            group.close()
            left.set()
            with pytest.raises(ClosedError):
                group.barrier()
            return
        assert left.wait(SOON)
        error = _raised(group.barrier)
        assert isinstance(error, PeerGoneError)
        assert error.ranks == (1,)
        assert "rank 1 has left the group" in str(error)
        assert group.gone == (1,)
        with pytest.raises(PeerGoneError):
            group.check()

    right(run(2, at, work))


def test_a_group_that_nobody_closes_is_a_leak_that_ends(at: str) -> None:
    group: vram.Group | None = vram.Group(rank=0, size=1, at=at, timeout=SOON)
    assert group is not None
    thread = group._spoke._thread
    with pytest.warns(LeakWarning):
        group = None
    thread.join(SOON)
    assert not thread.is_alive()


def test_a_path_of_one_that_died_is_used_again(at: str) -> None:
    with started(at, 1, _die_listening) as (child,):
        assert child.said() == "listening"
        child.kill()
    assert os.path.exists(at)
    with vram.Group(rank=0, size=1, at=at, timeout=SOON):
        assert not os.path.exists(at)


def _die_listening(at: str, pipe: Any, rank: int, size: int) -> None:
    thread = threading.Thread(target=lambda: vram.Group(rank=0, size=2, at=at), daemon=True)
    thread.start()
    until_listening(at)
    pipe.send("listening")
    pipe.recv()


def test_processes_compute_what_threads_do(at: str) -> None:
    with started(at, 4, children.compute) as ranks:
        came = [rank.said() for rank in ranks]
    given = [np.random.default_rng(rank).standard_normal(100_003, np.float32) for rank in range(4)]
    assert [one == reference("sum", given).tobytes() for one in came] == [True] * 4


@pytest.mark.parametrize("dead", [0, 2])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_rank_that_is_killed_is_named_on_all_others_at_once(at: str, dead: int, steps: int) -> None:
    """Also when it is rank 0, in whose process the hub was."""
    with started(at, 3, children.outlive) as ranks:
        for step in range(steps + 1):
            assert [rank.said() for rank in ranks] == [("formed", "made", "reduced")[step]] * 3
            if step < steps:
                for rank in ranks:
                    rank.tell()
        ranks[dead].kill()
        survivors = [rank for number, rank in enumerate(ranks) if number != dead]
        for rank in survivors:
            rank.tell()
        assert [rank.said() for rank in survivors] == [("gone", (dead,))] * 2


def test_a_rank_that_is_killed_before_all_have_come_may_come_again(at: str) -> None:
    with contextlib.ExitStack() as stack:

        def start(rank: int) -> processes.Child:
            return stack.enter_context(processes.child(children.wait_at_barrier, rank, 4, first=(at,), may_end=False))

        ranks = [start(0), start(1)]
        until_here(at, 4, 0, 1)
        ranks[1].kill()
        ranks[1:] = [start(1), start(2), start(3)]
        assert [rank.said() for rank in ranks] == ["here"] * 4
        assert [rank.said() for rank in ranks] == ["passed"] * 4


def test_a_rank_that_is_interrupted_is_named_and_nobody_waits(at: str) -> None:
    with contextlib.ExitStack() as stack:
        works = (children.wait_at_barrier, children.wait_at_barrier, _come_and_wait)
        ranks = [
            stack.enter_context(processes.child(work, rank, 3, first=(at,), may_end=False))
            for rank, work in enumerate(works)
        ]
        assert [rank.said() for rank in ranks] == ["here"] * 3
        process = ranks[1].process.pid
        assert process is not None
        os.kill(process, signal.SIGINT)
        assert ranks[1].said() == "interrupted"
        kind, words = ranks[0].said()
        assert kind == "PeerGoneError"
        assert words.startswith("rank 1 of the group 'group' gave up in the middle of a call")


def _come_and_wait(at: str, pipe: Any, rank: int, size: int) -> None:
    with vram.Group(rank=rank, size=size, at=at, timeout=children.TIMEOUT):
        pipe.send("here")
        pipe.recv()


# -- an all-reduce with a residual and a norm -------------------------------------------------------------------------
def of(dtype: str, count: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(count).astype(np.dtype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_are_summed_and_normalized_alike_on_all_ranks(at: str, dtype: str) -> None:
    rows, width = 3, 40

    def work(group: vram.Group) -> Any:
        mine, residual, weight = (of(dtype, rows * width, group.rank), of(dtype, rows * width, 8), of(dtype, width, 9))
        out, total = np.zeros_like(mine), np.zeros_like(mine)
        group.all_reduce_norm(mine, residual, weight, out=out, total=total, epsilon=1e-5)
        group.all_reduce_norm(mine, residual, weight, epsilon=1e-5)
        return out, total, mine, residual

    came = run(3, at, work)
    wide = [of(dtype, rows * width, rank).astype(np.float32) for rank in range(3)]
    summed = (wide[0] + wide[1] + wide[2]).astype(dtype)
    total = (summed.astype(np.float32) + of(dtype, rows * width, 8).astype(np.float32)).astype(dtype)
    exact = total.astype(np.float64).reshape(rows, width)
    exact *= 1 / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-5) * of(dtype, width, 9).astype(np.float64)
    for one in came:
        if isinstance(one, BaseException):
            raise one
        assert one[1].tobytes() == total.tobytes()
        assert one[0].tobytes() == came[0][0].tobytes() == one[2].tobytes(), "all ranks, and in place"
        assert one[3].tobytes() == total.tobytes()
        np.testing.assert_allclose(one[0], exact.reshape(-1), rtol=float(np.finfo(dtype).eps), atol=1e-6)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda: (of("float64", 8, 0), of("float64", 8, 0), of("float64", 4, 0)), "rows of float64 are not normalized"),
        (lambda: (of("float32", 8, 0), of("float32", 8, 0), of("float32", 3, 0)), "8 elements are no rows of 3"),
        (lambda: (of("float32", 8, 0), of("float32", 8, 0), of("float32", 0, 0)), "8 elements are no rows of 0"),
        (lambda: (of("float32", 8, 0), of("float32", 4, 0), of("float32", 4, 0)), "4 elements of float32 where"),
        (lambda: (of("float32", 8, 0), of("float16", 8, 0), of("float32", 4, 0)), "8 elements of float16 where"),
        (lambda: (of("float32", 8, 0), of("float32", 8, 0), of("float16", 4, 0)), "4 elements of float16 where"),
    ],
)
def test_what_is_not_normalized_is_refused(at: str, given: Callable[[], tuple[Any, ...]], said: str) -> None:
    with vram.Group(rank=0, size=1, at=at) as group:
        with pytest.raises(UsageError, match=said):
            group.all_reduce_norm(*given())
        for epsilon in (-1.0, float("nan"), float("inf"), "1", True):
            with pytest.raises(UsageError, match="is no number from 0 on"):
                group.all_reduce_norm(
                    of("float32", 8, 0), of("float32", 8, 0), of("float32", 4, 0), epsilon=epsilon  # type: ignore[arg-type]
                )  # fmt: skip


# -- tables of routes, and libraries ----------------------------------------------------------------------------------
class Other:
    """Another library, of a name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def all_reduce(self, source: Any, target: Any, op: str, stream: int) -> None:
        raise AssertionError("nothing is on a GPU here")


def test_ranks_agree_on_the_library_that_they_hand_over_to(at: str) -> None:
    def work(group: vram.Group) -> Any:
        group.hand_over(Other("a library"))
        said = group.explain(1 << 30)
        try:
            group.hand_over(Other(f"that of rank {group.rank}"))
        except UsageError as error:
            failed = str(error)
        kept = group.explain(1 << 30)
        group.hand_over(None)
        return said, failed, kept, group.explain(1 << 30), group.statistics()

    for rank, one in enumerate(run(2, at, work)):
        said, failed, kept, after, statistics = one
        assert "handed over to a library" in said
        assert said == kept
        assert f"rank {1 - rank} called hand_over (that of rank {1 - rank})" in failed
        assert "64 pieces of at most 16777216 bytes" in after
        assert statistics == {}


def test_a_group_says_which_way_a_call_takes(at: str, tmp_path: Path) -> None:
    with vram.Group(rank=0, size=1, at=at) as group:
        assert "packets, one kernel (table" in group.explain(4096)
        assert "shares, one kernel" in group.explain(32 << 20, symmetric=True)
        assert "built in" in group.explain(4096, "int32", "max")
        for given in ((-1, "int32", "sum"), (8, "float64", "sum"), (8, "int32", "mean"), ("8", "int32", "sum")):
            with pytest.raises(UsageError, match="is computed on GPUs"):
                group.explain(*given)  # type: ignore[arg-type]
    (tmp_path / "routes").write_text("{}")
    with pytest.raises(UsageError, match="no table of routes"):
        vram.Group(rank=0, size=1, at=at, routes=tmp_path / "routes")
