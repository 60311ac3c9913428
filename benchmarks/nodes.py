"""Replicas over loopback, checked and published; against the same bytes by sendfile and recv_into alone.

All processes are of this machine, and share its cores: a second machine would have its own for half of the work. The
comparison is of the cost of checking, publishing and passing on, not of a network.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import vram
from vram.arrays.numpy_on_use import np
from vram.arrays.views import NDArray
from vram.bench.children import DEADLINE, Child, child, own_keeper, status
from vram.bench.measure import Figure, Result, Row, in_turns
from vram.keeper.client import close_client
from vram.nodes.address import KEY_VARIABLE
from vram.nodes.carrier import Carrier
from vram.nodes.replicate import STREAMS

_NAME = "model"
_PART = 1 << 20  # bytes that a thread changes at a time
_READERS = 16
_MOST_COPIES = 4
_BUFFER = 4 << 20  # bytes of a socket's buffers, as ours
_MANY = 32  # cores, for both ends of a link of 1 GB/s and for what limits it


def on_host(quick: bool) -> Result:
    """Measure one reader against bare calls, and many readers that pass on against many that do not."""
    nbytes, small, readers, rounds = (8 << 20, 4 << 20, 3, 1) if quick else (2 << 30, 256 << 20, _READERS, 5)
    rows: list[Row] = []
    with child(_carry, nbytes) as source, child(_pull, source.hear(), True) as reader:
        reader.hear()
        first = reader.ask("pull")[0]
        with _bare(nbytes, 1) as one, _bare(nbytes, 2) as two:
            cases: dict[str, Callable[[], float]] = {"1": one, "2": two, "ours": lambda: reader.ask("pull")[0]}
            values = in_turns(cases, rounds, warm=1)
        peak = reader.ask("peak") / nbytes
    bare = Row("sendfile to recv_into over one stream", _rate(values["1"], nbytes))
    rows += [bare, Row("sendfile to recv_into over two streams", _rate(values["2"], nbytes))]
    best = max(rows, key=lambda row: row.figure.median)
    said = f"vram.replicate of {nbytes >> 20} MiB over two streams, each piece checked"
    rows.append(Row.held(said, _rate(values["ours"], nbytes), best, at_least=0.8))
    rows.append(Row("the first time: the source finds out the digests", _rate([first], nbytes)))
    rows.append(Row.limited("memory of the reader, at its peak", Figure.of([peak], "copies"), at_most=1.1))
    many = len(os.sched_getaffinity(0)) >= _MANY and not quick
    rows += _deltas(16 << 30, 24, 1e9, 2) if many else _deltas(nbytes // 2, 4, 125e6, min(rounds, 2))
    with _key(), child(_carry, small) as source:  # without one nothing is passed on
        address = source.hear()
        alone = _many(source, address, small, readers, share=False)
        shared = _many(source, address, small, readers, share=True)
    queued = Row(f"{readers} readers of {small >> 20} MiB, all from the source", Figure.of([alone[0]], "s"))
    rows += [queued, Row.held(f"{readers} readers that pass on what they have", Figure.of([shared[0]], "s"), queued)]
    sent = Figure.of([shared[1]], "copies")
    rows.append(Row.limited("copies that the source sends then", sent, at_most=_MOST_COPIES))
    return Result(
        "nodes",
        "An entry to another keeper, over loopback",
        rows,
        ["both ends on this machine: they share its cores, and no network is between them"],
    )


def _deltas(nbytes: int, streams: int, link: float, rounds: int) -> list[Row]:
    """Measure a reader that has the version before against one that has nothing, over a link of so many bytes a second;
    of each mebibyte one word in fifty changed."""
    sizes: list[float] = []
    with child(_limit, link) as limit, child(_carry, nbytes, limit.hear()) as source:
        limit.tell(source.hear())
        there = limit.hear()
        with (
            child(_pull, there, False, streams) as other,
            child(_pull, there, False, streams, True) as follower,
        ):
            follower.hear()
            other.hear()
            follower.ask("pull")

            def changed() -> float:
                source.ask("next")
                seconds, _, packed = follower.ask("pull")
                sizes.append(packed / nbytes)
                return float(seconds)

            values = in_turns({"delta": changed, "whole": lambda: other.ask("pull")[0]}, rounds, warm=1)
    what = f"{nbytes >> 20} MiB over a link of {link / 1e9:g} GB/s, {streams} streams"
    whole = Row(f"{what}: whole", Figure.of(values["whole"], "s"))
    delta = Row.held(
        "the same, of which 2 % changed, as a delta", Figure.of(values["delta"], "s"), whole, at_most=1 / 4
    )
    return [whole, delta, Row.limited("bytes of the delta", Figure.of(sizes[1:], "copies"), at_most=1 / 12)]


def _rate(values: list[float], nbytes: int) -> Figure:
    return Figure.of([nbytes / value for value in values], "GB/s", scale=1e-9)


@contextlib.contextmanager
def _key() -> Iterator[None]:
    """Have a key, which the processes that are started meanwhile find in their environment."""
    with tempfile.NamedTemporaryFile() as file:  # of mode 0600
        file.write(os.urandom(32))
        file.flush()
        before = os.environ.get(KEY_VARIABLE)
        os.environ[KEY_VARIABLE] = file.name
        try:
            yield
        finally:
            if before is None:
                del os.environ[KEY_VARIABLE]
            else:
                os.environ[KEY_VARIABLE] = before


# -- ours -----------------------------------------------------------------------------------------------------------
def _carry(pipe: Connection, nbytes: int, limit: str = "") -> None:
    """Offer an entry; where a limit is named, that is how it is reached, and deltas are sent."""
    with own_keeper() as path:
        with vram.empty(nbytes, "uint8", device="host") as array:
            array.numpy().view(np.uint64)[...] = np.arange(nbytes // 8, dtype=np.uint64)
            vram.publish(_NAME, {"w": array}, keeper=path)
        names = [limit] if limit else []
        with Carrier("127.0.0.1:0", deltas=bool(limit), names=names, keeper=path) as carrier:
            pipe.send(carrier.address)
            while True:
                if pipe.recv() == ("next",):
                    with (
                        vram.attach(_NAME, keeper=path) as lease,
                        vram.empty(nbytes, "uint8", device="host") as array,
                        ThreadPoolExecutor() as threads,
                    ):
                        old, new = (one.numpy().reshape(-1, _PART).view(np.uint16) for one in (lease["w"], array))
                        deque(threads.map(_change, old, new), 0)
                        del old, new
                        vram.publish(_NAME, {"w": array}, keeper=path)
                pipe.send(carrier.sent)


def _change(old: NDArray, new: NDArray) -> None:
    """Make the next state of a part, one word in fifty of which changed."""
    draw = np.random.default_rng()
    new[...] = old
    some = draw.integers(0, len(new), len(new) // 50)
    new[some] ^= draw.integers(1, 1 << 16, len(some), dtype=np.uint16)


def _pull(pipe: Connection, address: str, share: bool, streams: int = STREAMS, follows: bool = False) -> None:
    with own_keeper() as path:
        Path("/proc/self/clear_refs").write_text("5")  # what was resident at most, from here on
        before = status("self", "VmRSS")
        pipe.send("ready")
        while True:
            (what,) = pipe.recv()
            if what == "peak":
                pipe.send(status("self", "VmHWM") - before)
                continue
            began = time.perf_counter()
            done = vram.replicate(address, _NAME, share=share, streams=streams, timeout=DEADLINE, keeper=path)
            pipe.send((time.perf_counter() - began, done.from_peers, done.delta_bytes))
            if not follows:
                vram.remove(_NAME, keeper=path)
            close_client(path)  # and with it what it kept of this version


def _limit(pipe: Connection, rate: float) -> None:
    """Pass on what readers and a carrier say, the carrier so many bytes a second over all connections."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        here = f"127.0.0.1:{listener.getsockname()[1]}"
        pipe.send(here)
        (there,) = pipe.recv()
        host, port = there.rsplit(":", 1)
        pipe.send(here)
        budget = _Budget(rate)
        threading.Thread(target=_hang_up, args=(pipe,), daemon=True).start()
        while True:
            reader, _ = listener.accept()
            carrier = socket.create_connection((host, int(port)))
            threading.Thread(target=_pass_on, args=(reader, carrier, None), daemon=True).start()
            threading.Thread(target=_pass_on, args=(carrier, reader, budget), daemon=True).start()


class _Budget:
    """Bytes a second that several threads have in common."""

    def __init__(self, rate: float) -> None:
        self._rate, self._lock, self._next = rate, threading.Lock(), 0.0

    def spend(self, nbytes: int) -> None:
        """Wait until so many bytes may go."""
        with self._lock:
            self._next = max(self._next, time.perf_counter() - _BUFFER / self._rate) + nbytes / self._rate
            ahead = self._next - time.perf_counter()
        if ahead > 0:
            time.sleep(ahead)


def _pass_on(source: socket.socket, sink: socket.socket, budget: _Budget | None) -> None:
    block = memoryview(bytearray(1 << 18))
    with contextlib.suppress(OSError):  # of an end that hung up
        while count := source.recv_into(block):
            if budget is not None:
                budget.spend(count)
            sink.sendall(block[:count])
        sink.shutdown(socket.SHUT_WR)


def _hang_up(pipe: Connection) -> None:
    with contextlib.suppress(EOFError):
        pipe.recv()
    os._exit(0)


def _many(source: Child, address: str, nbytes: int, readers: int, *, share: bool) -> tuple[float, float]:
    """Have many pull at once; return the seconds until the last has it, and the copies that the source sent."""
    with contextlib.ExitStack() as stage:
        children = [stage.enter_context(child(_pull, address, share)) for _ in range(readers)]
        for one in children:
            one.hear()
        before = source.ask("sent")
        for one in children:
            one.tell("pull")
        last = max(one.hear()[0] for one in children)
        return last, (source.ask("sent") - before) / nbytes


# -- bare calls -----------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _bare(nbytes: int, streams: int) -> Iterator[Callable[[], float]]:
    """Yield what moves so many bytes between two processes, in as many parts as there are streams."""
    with socket.create_server(("127.0.0.1", 0)) as listener, child(_send, listener, nbytes, streams) as sender:
        sender.hear()
        where = listener.getsockname()

        def run() -> float:
            with vram.empty(nbytes, "uint8", device="host") as array:
                began = time.perf_counter()
                part = nbytes // streams
                ends = [_connect(where) for _ in range(streams)]
                with array.numpy().data as view:
                    parts = [view[number * part : (number + 1) * part] for number in range(streams)]
                    threads = [threading.Thread(target=_fill, args=pair) for pair in zip(ends, parts, strict=True)]
                    for thread in threads:
                        thread.start()
                    for thread in threads:
                        thread.join()
                    taken = time.perf_counter() - began
                    for one in parts:
                        one.release()
                for end in ends:
                    end.close()
                return taken

        yield run


def _connect(where: tuple[str, int]) -> socket.socket:
    end = socket.socket()
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)  # or it is a matter of luck how large it grows
    end.settimeout(DEADLINE)
    end.connect(where)
    return end


def _fill(end: socket.socket, into: memoryview) -> None:
    end.setblocking(True)
    at = 0
    while at < len(into):
        with into[at:] as rest:
            got = end.recv_into(rest)
        if not got:
            return
        at += got


def _send(pipe: Connection, listener: socket.socket, nbytes: int, streams: int) -> None:
    with vram.empty(nbytes, "uint8", device="host") as array:
        array.numpy()[...] = 1
        (allocation, *_), _ = array.region.segments(0, nbytes)
        fd, part = allocation.export(), nbytes // streams
        pipe.send("ready")
        threading.Thread(target=_serve, args=(listener, fd, part), daemon=True).start()
        pipe.recv()


def _serve(listener: socket.socket, fd: int, part: int) -> None:
    while True:
        end, _ = listener.accept()
        threading.Thread(target=_send_part, args=(end, fd, part), daemon=True).start()


def _send_part(end: socket.socket, fd: int, part: int) -> None:
    # All parts are of one length, and nobody looks at their bytes: each stream sends the same one.
    with end, contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        at = 0
        while at < part:
            at += os.sendfile(end.fileno(), fd, at, part - at)
