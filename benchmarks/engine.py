"""The work of engines with memory.

On the host, sections in which an entry is read that is updated in place, and updates. On a GPU, memory sleeps and
wakes, many tensors grow at once, PyTorch allocates it in a pool, and weights are updated in place.
"""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import vram
from vram import driver as drivers
from vram.bench.children import Child, child, own_keeper
from vram.bench.gpu import Bare, bare_calls, ordinal_of, torch_on
from vram.bench.machine import fitting
from vram.bench.measure import Figure, Result, Row, in_turns, timed
from vram.spec import Location, format_size

from .engine_updates import updates, waits

_READERS = 16
_SECTIONS = 20_000  # at a time
_UPDATED = 64 << 20  # of what is updated
# On a GPU:
_NBYTES = 32 << 30
_CHUNKS = (80 << 20, 512 << 20)  # layers of a model, and large tables
_GROWN = 64  # tensors
_STEP = 64 << 20  # bytes by which each of them grows
_ROOM = 4  # steps that each has addresses for
_TENSOR = 256 << 20
_TENSORS = 16
_REST = 1.0  # seconds asleep
_WINDOW = 4 << 30  # bytes of pinned memory that the plain copy goes through again and again
_PAGE = 2 << 20  # bytes: what kvcached maps at a time, unless told otherwise


def on_host(quick: bool) -> Result:
    """Measure sections alone, and in many processes at once; and updates beside those."""
    sections, rounds = (200, 3) if quick else (_SECTIONS, 25)
    nbytes, count = (1 << 20, 2) if quick else (_UPDATED, _READERS)
    lock = threading.Lock()

    def locked() -> None:
        with lock:
            pass

    with contextlib.ExitStack() as stage:
        keeper = stage.enter_context(own_keeper())
        weights = stage.enter_context(vram.zeros(nbytes, "uint8", device="host"))
        vram.publish("policy", {"w": weights}, keeper=keeper, updatable=True)
        lease = stage.enter_context(vram.attach("policy", keeper=keeper))
        took = in_turns({"lock": lambda: _cpu(locked, sections), "alone": lambda: _cpu_of(lease, sections)}, rounds)
        others = [stage.enter_context(child(_read, keeper, sections)) for _ in range(count)]
        for one in others:
            one.hear()
        beside = [spent for _ in range(rounds) for spent in _all(others, "measure")]
        for one in others:
            one.tell("go on")
        updates = in_turns(
            {"write": lambda: timed(lambda: weights.fill(1)), "update": lambda: timed(lambda: _update(keeper))}, rounds
        )
        stalls = [stalled for one in others for stalled in one.ask("stop")]
        waited = waits(quick, keeper)
    plain = Row("with threading.Lock()", Figure.of(took["lock"], "us", scale=1e6))
    written = Row(
        f"{format_size(nbytes)} written, nobody reads in sections", Figure.of(updates["write"], "ms", scale=1e3)
    )
    rows = [
        plain,
        Row.held("lease.reading(), entered and left", Figure.of(took["alone"], "us", scale=1e6), plain),
        Row.limited("lease.reading(), alone", Figure.of(took["alone"], "us", scale=1e6), at_most=5),
        Row.limited(f"lease.reading(), {count} processes at once", Figure.of(beside, "us", scale=1e6), at_most=5),
        written,
        Row.held(
            f"vram.update of {format_size(nbytes)}, {count} processes in and out of sections",
            Figure.of(updates["update"], "ms", scale=1e3),
            written,
        ),
    ]
    if stalls:
        rows.append(Row("what a reader waited for an update, of those who waited", Figure.of(stalls, "ms", scale=1e3)))
    rows += waited
    notes = [
        f"processor time of the thread a section, over {sections} empty ones. {len(stalls)} sections took longer than "
        f"a millisecond while the updates were made; on a machine with fewer processors than readers most of that is "
        f"waiting for one"
    ]
    return Result("engine", "Read in sections, and updated in place", rows, notes)


def _cpu(section: Any, count: int) -> float:
    begin = time.thread_time()
    for _ in range(count):
        section()
    return (time.thread_time() - begin) / count


def _cpu_of(lease: vram.Lease, count: int) -> float:
    begin = time.thread_time()
    for _ in range(count):
        with lease.reading():
            pass
    return (time.thread_time() - begin) / count


def _all(others: list[Child], what: str) -> Iterator[float]:
    """Have all do something at once, and yield what each found."""
    for one in others:
        one.tell(what)
    for one in others:
        yield one.hear()


def _update(keeper: str) -> None:
    with vram.update("policy", keeper=keeper) as arrays:
        arrays["w"].fill(1)


def _read(pipe: Connection, keeper: str, sections: int) -> None:
    """Measure sections when told to; then read in sections until told to stop, and say how long the slow ones took."""
    with vram.attach("policy", keeper=keeper) as lease:
        view = lease["w"].numpy()
        _cpu_of(lease, sections)
        pipe.send("ready")
        while pipe.recv()[0] == "measure":
            pipe.send(_cpu_of(lease, sections))
        stalls: list[float] = []
        while not pipe.poll(0):
            begin = time.perf_counter()
            with lease.reading():
                view[0]
            spent = time.perf_counter() - begin
            if spent > 1e-3:
                stalls.append(spent)
        pipe.recv()
        pipe.send(stalls)


# -- on a GPU ---------------------------------------------------------------------------------------------------------
def on_gpu(quick: bool, location: Location) -> Result:
    """Measure on one GPU, and on all that this process sees at once."""
    notes: list[str] = []
    rows: list[Row] = []
    nbytes = fitting(location, (64 << 20) if quick else _NBYTES, 1, 1.1, notes)
    rounds = 2 if quick else 7
    with _trimmed(), bare_calls(location) as bare, _plain_copies(bare, nbytes) as (down, up):
        for chunk in (16 << 20,) if quick else _CHUNKS:
            size = nbytes // chunk * chunk
            with _memory(location, size, chunk) as array:
                kept, rest = _kept([array]), 0.0 if quick else _REST
                cases: dict[str, Callable[[], float]] = {
                    "down": down, "up": up, **kept, "again": kept["asleep"],
                    "later": partial(_later, kept["awake"], rest),
                }  # fmt: skip
                took = in_turns(cases, rounds, warm=1)
            rates = {
                name: Figure.of([size / one for one in values], "GB/s", scale=1e-9) for name, values in took.items()
            }
            what = f"{format_size(size)} in chunks of {format_size(chunk)}"
            plain_down = Row(f"plain copy to pinned memory, beside {what}", rates["down"])
            plain_up = Row(f"plain copy from pinned memory, beside {what}", rates["up"])
            rows += [
                plain_down,
                Row.held(f"sleep: {what}", rates["asleep"], plain_down, at_least=0.92),
                plain_up,
                Row.held(f"wake at once: {what}", rates["awake"], plain_up, at_least=0.92),
                Row.held(f"wake a second later: {what}", rates["later"], plain_up, at_least=0.92),
            ]
            rows += _discarded(bare, location, size, chunk, rounds, what)
        rows += _grown(bare, location, 4 if quick else _GROWN, rounds, notes)
        rows += _first(bare, location, nbytes, 2 if quick else 4)
    with _trimmed():
        rows += _all_at_once(location, nbytes, rounds, notes)
    rows += _in_torchs_pool(quick, location, notes)
    rows += updates(quick, location, notes)
    notes.append(
        f"the second time and later: the pinned memory is there. The plain copy is one call after the other on one "
        f"stream, through {format_size(min(_WINDOW, nbytes))} of pinned memory that it uses again and again. Asleep, "
        f"memory is with the device; awake, every byte is back. Memory that was just released the device still clears, "
        f"which takes of what copies have"
    )
    return Result("engine", "GPU memory asleep and awake, in PyTorch's hands, and updated in place", rows, notes)


@contextlib.contextmanager
def _trimmed() -> Iterator[None]:
    """Give the pinned memory back that is kept for the next time: nobody sleeps after this."""
    try:
        yield
    finally:
        vram.memory.trim()


@contextlib.contextmanager
def _memory(location: Location, nbytes: int, chunk: int) -> Iterator[vram.Array]:
    with vram.memory.Region.create(location, capacity=nbytes, nbytes=nbytes, chunk=chunk) as region:
        drivers.get(location).fill(region.address, 1, nbytes)
        region.synchronize()
        yield vram.Array(region, "uint8", nbytes)


def _kept(arrays: list[vram.Array]) -> dict[str, Callable[[], float]]:
    return {"asleep": lambda: vram.sleep(arrays).seconds, "awake": lambda: vram.wake(arrays).seconds}


def _later(act: Callable[[], float], seconds: float) -> float:
    time.sleep(seconds)
    return act()


@contextlib.contextmanager
def _plain_copies(bare: Bare, nbytes: int) -> Iterator[tuple[Callable[[], float], Callable[[], float]]]:
    """Yield what copies so many bytes down, and up, and returns the seconds."""
    api, ok = bare.api, bare.ok
    window = min(_WINDOW, nbytes)
    device = int(ok(api.cuMemAlloc(window)))
    try:
        host = int(ok(api.cuMemHostAlloc(window, 0)))
        try:

            def run(copy: Callable[[int], Any]) -> float:
                begin = time.perf_counter()
                for start in range(0, nbytes, window):
                    ok(copy(min(window, nbytes - start)))
                ok(api.cuStreamSynchronize(0))
                return time.perf_counter() - begin

            yield (
                lambda: run(lambda size: api.cuMemcpyDtoHAsync(host, device, size, 0)),
                lambda: run(lambda size: api.cuMemcpyHtoDAsync(device, host, size, 0)),
            )
        finally:
            api.cuMemFreeHost(host)
    finally:
        api.cuMemFree(device)


def _first(bare: Bare, location: Location, nbytes: int, rounds: int) -> list[Row]:
    """Sleep while no memory is pinned yet, and park and wake: against pinning it in one call, and a plain copy."""
    api, ok = bare.api, bare.ok
    window = min(_WINDOW, nbytes)

    def plain() -> float:
        device = int(ok(api.cuMemAlloc(window)))
        begin = time.perf_counter()
        host = int(ok(api.cuMemHostAlloc(window, 0)))
        ok(api.cuMemcpyDtoHAsync(host, device, window, 0))
        ok(api.cuStreamSynchronize(0))
        took = time.perf_counter() - begin
        api.cuMemFreeHost(host)
        api.cuMemFree(device)
        return window / took

    def first() -> float:
        vram.memory.trim()
        report = vram.sleep(array)
        vram.wake(array)
        return report.rate

    def parked() -> float:
        report = vram.park("parked", keeper=keeper)
        parks.append(report.nbytes / report.seconds)
        begin = time.perf_counter()
        with vram.attach("parked", wake=True, keeper=keeper):
            return report.nbytes / (time.perf_counter() - begin)

    parks: list[float] = []
    with _memory(location, nbytes, 1 << 30 if nbytes >= 1 << 30 else nbytes) as array:
        took = in_turns({"plain": plain, "first": first}, rounds, warm=1)
    with own_keeper() as keeper:
        arrays = {f"{n}": vram.zeros(nbytes // 16, "uint8", device=location) for n in range(8)}
        vram.publish("parked", arrays, consume=True, keeper=keeper)
        took |= in_turns({"woken": parked}, rounds, warm=1)
    rates = {name: Figure.of(values, "GB/s", scale=1e-9) for name, values in {**took, "parked": parks[1:]}.items()}
    plainly = Row(f"pin {format_size(window)} in one call, and copy", rates["plain"])
    half = format_size(nbytes // 2)
    return [
        plainly,
        Row.held(f"sleep {format_size(nbytes)}, nothing pinned yet", rates["first"], plainly, at_least=4),
        Row.held(f"park {half} in 8 arrays", rates["parked"], plainly, at_least=4),
        Row.held(f"wake what was parked, {half}", rates["woken"], plainly, at_least=4),
    ]


def _discarded(bare: Bare, location: Location, nbytes: int, chunk: int, rounds: int, what: str) -> list[Row]:
    """Let go of the bytes: against the same calls, bare."""
    with _memory(location, nbytes, chunk) as array, _bare_memory(bare, nbytes, chunk) as (unmap, remap):
        cases: dict[str, Callable[[], float]] = {
            "bare asleep": unmap,
            "bare awake": remap,
            "asleep": lambda: vram.sleep(array, to=None).seconds,
            "awake": lambda: vram.wake(array).seconds,
        }
        took = in_turns(cases, rounds, warm=1)
    figures = {name: Figure.of(seconds, "ms", scale=1e3) for name, seconds in took.items()}
    down = Row(f"bare unmap, release: {what}", figures["bare asleep"])
    up = Row(f"bare create, map, set_access: {what}", figures["bare awake"])
    return [
        down,
        Row.held(f"sleep, bytes discarded: {what}", figures["asleep"], down, at_most=1.2),
        up,
        Row.held(f"wake, bytes discarded: {what}", figures["awake"], up, at_most=1.2),
    ]


@contextlib.contextmanager
def _bare_memory(bare: Bare, nbytes: int, chunk: int) -> Iterator[tuple[Callable[[], float], Callable[[], float]]]:
    """Yield what unmaps and releases so much memory, and what makes it anew, and returns the seconds."""
    api, ok = bare.api, bare.ok
    base = int(ok(api.cuMemAddressReserve(nbytes, 0, 0, 0)))
    handles: list[Any] = []

    def unmap() -> float:
        ok(api.cuCtxSynchronize())
        begin = time.perf_counter()
        for address in range(base, base + nbytes, chunk):
            ok(api.cuMemUnmap(address, chunk))
            ok(api.cuMemRelease(handles.pop()))
        return time.perf_counter() - begin

    def remap() -> float:
        begin = time.perf_counter()
        for address in range(base, base + nbytes, chunk):
            handles.append(ok(api.cuMemCreate(chunk, bare.prop, 0)))
            ok(api.cuMemMap(address, chunk, 0, handles[-1], 0))
        ok(api.cuMemSetAccess(base, nbytes, bare.grants, 1))
        return time.perf_counter() - begin

    try:
        remap()
        yield unmap, remap
    finally:
        if handles:
            api.cuMemUnmap(base, len(handles) * chunk)
        for handle in handles:
            api.cuMemRelease(handle)
        api.cuMemAddressFree(base, nbytes)


def _grown(bare: Bare, location: Location, count: int, rounds: int, notes: list[str]) -> list[Row]:
    """Grow many tensors in one call, with their memory made ahead and without: against the same calls, bare."""
    step = fitting(location, _STEP, count, 2.5, notes)
    with contextlib.ExitStack() as stage:
        arrays = [
            stage.enter_context(vram.empty(0, "uint8", device=location, capacity=_ROOM * step, chunk=step))
            for _ in range(count)
        ]

        def grow() -> float:
            spent = timed(lambda: vram.resize(dict.fromkeys(arrays, step)))
            vram.resize(dict.fromkeys(arrays, 0))
            return spent

        def prepared() -> float:
            ready = vram.prepare(location, count * step, chunk=step)
            try:
                ready.wait(60)
                return grow()
            finally:
                ready.close()

        made, mapped = stage.enter_context(_bare_growth(bare, count, step))
        cases = {"made": made, "grown": grow, "mapped": mapped, "prepared": prepared}
        cases |= stage.enter_context(_kvcached_growth(location, count, step, _ROOM * step, notes))
        took = in_turns(cases, rounds, warm=1)
    figures = {name: Figure.of(seconds, "ms", scale=1e3) for name, seconds in took.items()}
    what = f"{count} tensors by {format_size(step)} each"
    create = Row(f"bare create, map, set_access: {what}", figures["made"])
    only = Row(f"bare map, set_access: {what}", figures["mapped"])
    rows = [
        create,
        Row.held(f"vram.resize: {what}", figures["grown"], create, at_most=1.3),
        only,
        Row.held(f"vram.resize, memory made ahead: {what}", figures["prepared"], only, at_most=1.2),
    ]
    if "kvcached" in figures:
        pages = Row(f"kvcached, pages of 2 MiB: {what}", figures["kvcached"])
        rows += [pages, Row.held(f"vram.resize, again: {what}", figures["grown"], pages)]
    return rows


@contextlib.contextmanager
def _bare_growth(bare: Bare, count: int, step: int) -> Iterator[tuple[Callable[[], float], Callable[[], float]]]:
    """Yield what maps a chunk behind each of many addresses, made for it or before, and returns the seconds.

    Each has a range of its own, with room to grow, as the tensors have.
    """
    api, ok = bare.api, bare.ok
    places: list[int] = []

    def run(*, ahead: bool) -> float:
        handles: list[Any] = []
        mapped: list[int] = []
        try:
            if ahead:
                handles += [ok(api.cuMemCreate(step, bare.prop, 0)) for _ in places]
            begin = time.perf_counter()
            for number, address in enumerate(places):
                if not ahead:
                    handles.append(ok(api.cuMemCreate(step, bare.prop, 0)))
                ok(api.cuMemMap(address, step, 0, handles[number], 0))
                mapped.append(address)
                ok(api.cuMemSetAccess(address, step, bare.grants, 1))
            return time.perf_counter() - begin
        finally:
            for address in mapped:
                api.cuMemUnmap(address, step)
            for handle in handles:
                api.cuMemRelease(handle)

    try:
        for _ in range(count):
            places.append(int(ok(api.cuMemAddressReserve(_ROOM * step, 0, 0, 0))))
        yield lambda: run(ahead=False), lambda: run(ahead=True)
    finally:
        for address in places:
            api.cuMemAddressFree(address, _ROOM * step)


def _all_at_once(location: Location, nbytes: int, rounds: int, notes: list[str]) -> list[Row]:
    """Sleep and wake the memory of every GPU in one call: against that of one."""
    devices = drivers.get(location).device_count()
    if devices < 2:
        notes.append("one GPU here: several at once were not measured")
        return []
    places = [Location("cuda", ordinal) for ordinal in range(devices)]
    chunk = min(_CHUNKS[0], nbytes)
    size = min(fitting(place, nbytes // chunk * chunk, 1, 1.1, notes) for place in places) // chunk * chunk
    with contextlib.ExitStack() as stage:
        arrays = [stage.enter_context(_memory(place, size, chunk)) for place in places]
        cases: dict[str, Callable[[], float]] = {}
        for name, some in {"one": arrays[:1], "all": arrays}.items():
            cases |= {f"{name} {how}": case for how, case in _kept(some).items()}
        took = in_turns(cases, rounds, warm=1)
    figures = {name: Figure.of(seconds, "ms", scale=1e3) for name, seconds in took.items()}
    rows = []
    for verb, word in {"asleep": "sleep", "awake": "wake"}.items():
        one = Row(f"{word}: {format_size(size)} of one GPU", figures[f"one {verb}"])
        every = f"{word}: {format_size(size)} of each of {devices} GPUs, in one call"
        rows += [one, Row.held(every, figures[f"all {verb}"], one, at_most=1.1)]
    return rows


def _in_torchs_pool(quick: bool, location: Location, notes: list[str]) -> list[Row]:
    """Allocate tensors in a pool of ours: against torch's own."""
    torch = torch_on(location, notes)
    if torch is None:
        return []
    device = f"cuda:{ordinal_of(location)}"
    nbytes = fitting(location, (4 << 20) if quick else _TENSOR, _TENSORS, 1.25, notes)
    pool = vram.TorchPool(device)

    def new() -> Any:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def first() -> float:
        kept: list[Any] = []
        return statistics.median(timed(lambda: kept.append(new())) for _ in range(_TENSORS))

    def reused() -> float:
        new()
        return statistics.median(timed(new) for _ in range(100 if quick else 1000))

    def case(allocate: Callable[[], float], *, ours: bool) -> Callable[[], float]:
        def run() -> float:
            with pool.use("bench") if ours else contextlib.nullcontext():
                spent = allocate()
            pool.close()  # which empties torch's cache as well
            torch.cuda.empty_cache()
            return spent

        return run

    cases = {
        "torch first": case(first, ours=False),
        "first": case(first, ours=True),
        "torch reused": case(reused, ours=False),
        "reused": case(reused, ours=True),
    }
    took = in_turns(cases, 2 if quick else 9, warm=1)
    figures = {name: Figure.of(seconds, "us", scale=1e6) for name, seconds in took.items()}
    rows: list[Row] = []
    for name, most in {"first": 1.5, "reused": 1.05}.items():
        own = Row(f"torch.empty of {format_size(nbytes)}, {name}: torch's own pool", figures[f"torch {name}"])
        rows += [own, Row.held(f"in a vram.TorchPool, {name}", figures[name], own, at_most=most)]
    return rows


@contextlib.contextmanager
def _kvcached_growth(
    location: Location, count: int, step: int, room: int, notes: list[str]
) -> Iterator[dict[str, Callable[[], float]]]:
    """Yield what maps `step` bytes behind tensors of kvcached's with `room`, and returns the seconds; none without it.

    They are counted as vram's are: the keys and the values of half as many layers.
    """
    ops = _compiled(location, notes)
    if ops is None:
        yield {}
        return
    device = f"cuda:{ordinal_of(location)}"
    ops.init_kvcached(device, _PAGE, False)
    try:
        tensors = ops.create_kv_tensors(2 * room, 2, device, count // 2, 2)  # of 16 bits, keys and values
        pages = list(range(0, step, _PAGE))

        def grow() -> float:
            spent = timed(lambda: ops.map_to_kv_tensors(pages))
            ops.unmap_from_kv_tensors(pages)
            return spent

        yield {"kvcached": grow}
        tensors.clear()
    finally:
        ops.shutdown_kvcached()


def _compiled(location: Location, notes: list[str]) -> Any:
    """Return ``kvcached.vmm_ops``, or None and a note why it is not measured."""
    if importlib.util.find_spec("kvcached") is None:
        notes.append("kvcached did not run: it is not installed")
        return None
    if torch_on(location, notes) is None:
        return None
    try:
        return import_module("kvcached.vmm_ops")
    except ImportError as error:
        notes.append(f"kvcached did not run: {error}")
        return None
