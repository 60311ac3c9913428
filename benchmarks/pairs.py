"""Memory of each GPU, attached and borrowed on each other one: against the bare import, map and set_access there.

A process for each GPU publishes and lends memory of it; each of the others maps that for its own GPU, looks at what is
in it, and has its own GPU copy all of it to itself.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import vram
from vram import driver as drivers
from vram.bench.children import Child, child, own_keeper, workplace
from vram.bench.gpu import Bare, bare_calls
from vram.bench.machine import fitting
from vram.bench.measure import Figure, Result, Row, in_turns
from vram.errors import InternalError
from vram.keeper.client import KeeperClient
from vram.open_files import close_fds
from vram.spec import Location, format_size

from .graphs import Timer

_NBYTES = 1 << 30
_COPIES = 3  # in a row, in one figure


def on_gpu(quick: bool, location: Location) -> Result:
    """Measure between every ordered pair of the GPUs that this process sees."""
    title = "Memory of each GPU mapped on each other one, by processes of their own"
    devices = drivers.get(location).device_count()
    if devices < 2:
        return Result("pairs", title, [], ["it did not run: there is one GPU, and a pair takes two"])
    rounds, notes, rows = 2 if quick else 9, list[str](), list[Row]()
    places = [Location("cuda", ordinal) for ordinal in range(devices)]
    nbytes = min(fitting(place, (2 << 20) if quick else _NBYTES, 1, 2.5, notes) for place in places)
    with contextlib.ExitStack() as stage:
        keeper = stage.enter_context(own_keeper())
        folder = stage.enter_context(workplace())
        ranks = [
            stage.enter_context(child(_rank, keeper, str(folder), str(place), number, nbytes))
            for number, place in enumerate(places)
        ]
        for one in ranks:
            one.hear()
        for source, target in itertools.permutations(range(devices), 2):
            rows += _pair(ranks[target], source, f"cuda:{source} on cuda:{target}", rounds)
    notes.append(
        f"{format_size(nbytes)} of each GPU in one piece. Milliseconds until it is mapped for the GPU of the other "
        f"process, which has a context; bare calls have their descriptor already. Copied: by the GPU that reads, to "
        f"its own memory, {_COPIES} times in a row"
    )
    return Result("pairs", title, rows, notes)


def _pair(reader: Child, source: int, pair: str, rounds: int) -> list[Row]:
    cases: dict[str, Callable[[], float]] = {
        f"{what} {how}": partial(reader.ask, what, how, source)
        for what in ("map", "copy")
        for how in ("bare", "attach", "borrow")
    }
    took = in_turns(cases, rounds, warm=1)
    rows = []
    for what, unit in (("map", "ms"), ("copy", "GB/s")):
        figures = {how: Figure.of(took[f"{what} {how}"], unit) for how in ("bare", "attach", "borrow")}
        words = {"map": "mapped", "copy": "copied"}[what]
        bare = Row(f"{pair}, {words}: bare calls", figures.pop("bare"))
        rows += [bare, *(Row.held(f"{pair}, {words}: vram.{how}", one, bare) for how, one in figures.items())]
    return rows


def _rank(pipe: Connection, keeper: str, folder: str, device: str, number: int, nbytes: int) -> None:
    """Keep memory of one GPU open to all; measure how that of another one gets here when told to."""
    location = Location.parse(device)
    with contextlib.ExitStack() as stage:
        bare = stage.enter_context(bare_calls(location))
        own, mine = (stage.enter_context(vram.empty(nbytes, "uint8", device=location, chunk=nbytes)) for _ in range(2))
        drivers.get(location).fill(own.address, number + 1, nbytes)
        vram.publish(f"gpu-{number}", {"w": own}, keeper=keeper)
        stage.enter_context(vram.lend(own, at=str(Path(folder) / f"lent-{number}")))
        reader = _Reader(stage, bare, keeper, folder, mine)
        pipe.send("ready")
        while True:
            what, how, source = pipe.recv()
            pipe.send(reader.measured(what, how, source))


class _Reader:
    """One process: its GPU reads what another one keeps."""

    def __init__(self, stage: contextlib.ExitStack, bare: Bare, keeper: str, folder: str, mine: vram.Array) -> None:
        self._bare, self._keeper, self._folder, self._mine = bare, keeper, folder, mine
        self._client = stage.enter_context(KeeperClient.connect(keeper, label="bare calls"))
        self._timer = Timer(bare)
        stage.callback(self._timer.close)

    def measured(self, what: str, how: str, source: int) -> float:
        """Return the milliseconds that it takes to map it, or the GB/s with which it is copied from there."""
        with contextlib.ExitStack() as stage:
            fds = list(self._client.attach(f"gpu-{source}").fds) if how == "bare" else []
            stage.callback(close_fds, fds)
            device = self._mine.region.location
            begin = time.perf_counter()
            if how == "bare":
                address = self._map(fds[0], stage)
            elif how == "attach":
                lease = stage.enter_context(vram.attach(f"gpu-{source}", keeper=self._keeper, device=device))
                address = lease["w"].address
            else:
                path = str(Path(self._folder) / f"lent-{source}")
                address = stage.enter_context(vram.borrow(path, device=device)).array.address
            took = time.perf_counter() - begin
            rate = self._copied(address, source)
        return took * 1e3 if what == "map" else rate

    def _map(self, fd: int, stage: contextlib.ExitStack) -> int:
        api, ok, nbytes = self._bare.api, self._bare.ok, self._mine.nbytes
        base = int(ok(api.cuMemAddressReserve(nbytes, 0, 0, 0)))
        stage.callback(api.cuMemAddressFree, base, nbytes)
        handle = ok(api.cuMemImportFromShareableHandle(fd, self._bare.fd_kind))
        stage.callback(api.cuMemRelease, handle)
        ok(api.cuMemMap(base, nbytes, 0, handle, 0))
        stage.callback(api.cuMemUnmap, base, nbytes)
        ok(api.cuMemSetAccess(base, nbytes, self._bare.grants, 1))
        return base

    def _copied(self, address: int, source: int) -> float:
        """Have this GPU copy all of it, look at what came, and return the GB/s."""
        api, ok, mine = self._bare.api, self._bare.ok, self._mine
        driver: Any = drivers.get(mine.region.location)
        driver.fill(mine.address, 0, mine.nbytes)
        driver.synchronize(mine.region.location)
        self._timer.begin(0)
        for _ in range(_COPIES):
            ok(api.cuMemcpyDtoDAsync(mine.address, address, mine.nbytes, 0))
        self._timer.end(0)
        rate = _COPIES * mine.nbytes / self._timer.microseconds() * 1e-3
        found = bytearray(1)
        for at in (0, mine.nbytes // 2, mine.nbytes - 1):
            driver.copy_out(memoryview(found), mine.address + at)
            if found[0] != source + 1:
                raise InternalError(f"byte {at} of what cuda:{source} keeps is {found[0]} here, and not {source + 1}")
        return rate
