"""What NIXL and replicas by it do with memory of two GPUs of one host: which kinds of memory, and how fast.

    python benchmarks/engines/nixl_gpu.py [--size 1GiB] [--seconds 60] [--only bare,replicas]

First what NIXL's UCX was built with and finds here. Then NIXL's own reads of pieces of 16 MiB from one process to
another, for memory of ``cuMemCreate`` (that of arrays) and of ``cuMemAlloc`` on either side, by turns; the first read
apart, since it makes connections. Then ``vram.replicate`` from ``cuda:0`` to ``cuda:1``: by NIXL alone, by tcp alone,
and by what it chooses. Each part runs in processes of its own, which are killed after so many seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import vram
from vram import driver as drivers
from vram.bench.children import own_keeper
from vram.errors import UnsupportedError
from vram.memory.foreign import create_legacy
from vram.nodes import messages as m
from vram.nodes import pull
from vram.nodes.carrier import Carrier
from vram.nodes.nixl import Nixl
from vram.spec import HOST, Location, parse_size

KINDS = ("cuMemCreate", "cuMemAlloc")
READS = 16
LATE = 10.0  # seconds of one read
NEEDED = ("cuda_cpy", "cuda_ipc")


# -- what a part of this says to the whole: NIXL and UCX may print, too ------------------------------------------------
def say(what: object) -> None:
    """Say something."""
    print(f"\n: {json.dumps(what)}", flush=True)


def heard(process: Any) -> Any:
    """Return what it says next; None if it has ended."""
    for line in process.stdout:
        if line.startswith(": "):
            return json.loads(line[2:])
    return None


# -- what there is -----------------------------------------------------------------------------------------------------
class _Component(ctypes.Structure):
    """What of ``uct_component_attr_t`` is asked for, and room for the rest."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 16),
        ("count", ctypes.c_uint),
        ("rest", ctypes.c_char * 256),
    )


def components() -> dict[str, int]:
    """Return the components of the UCX that NIXL has loaded, with how many devices or domains each finds here."""
    Nixl(trusted=True)._agent()  # loads it
    maps = Path("/proc/self/maps").read_text()
    (path,) = {line.split()[-1] for line in maps.splitlines() if "/libuct-" in line or "/libuct.so" in line}
    uct = ctypes.CDLL(path)
    rows, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_uint()
    assert uct.uct_query_components(ctypes.byref(rows), ctypes.byref(count)) == 0
    found = {}
    for number in range(count.value):
        about = _Component(field_mask=3)
        if uct.uct_component_query(ctypes.c_void_p(rows[number]), ctypes.byref(about)) == 0:
            found[about.name.decode()] = int(about.count)
    return found


# -- NIXL's own reads --------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def memory(kind: str, location: Location, nbytes: int) -> Iterator[int]:
    """Memory of a kind; yields where it is."""
    if kind == "cuMemAlloc":
        region = create_legacy(drivers.get(location), nbytes, location)
        with contextlib.closing(region):
            yield region.address
    else:
        with vram.empty(nbytes, "u1", device=str(location)) as array:
            yield array.address


def source(kind: str, ordinal: int, nbytes: int) -> None:
    """Offer memory whose MiB number N is full of N."""
    location = Location("cuda", ordinal)
    driver: Any = drivers.get(location)
    with memory(kind, location, nbytes) as address:
        for number in range(nbytes >> 20):
            driver.fill(address + (number << 20), number & 255, 1 << 20)
        driver.synchronize(location)
        agent = Nixl(trusted=True)._agent()
        rows = [(address, nbytes, ordinal, "")]
        registered: Any = agent.call(lambda api: api.register_memory(rows, mem_type="VRAM"), "registration")
        data = agent.call(lambda api: api.get_partial_agent_metadata(registered, True, ["UCX"]), "its description")
        say((data.hex(), address, ordinal))
        sys.stdin.read()


def read(kind: str, ordinal: int, nbytes: int, told: str) -> None:
    """Read pieces of it, and say what was measured and whether the bytes are right."""
    metadata, there, device = json.loads(told)
    location = Location("cuda", ordinal)
    driver: Any = drivers.get(location)
    with memory(kind, location, nbytes) as address:
        driver.fill(address, 0xEE, nbytes)
        driver.synchronize(location)
        agent = Nixl(trusted=True)._agent()
        peer = agent.add(bytes.fromhex(metadata))
        api, took = agent._api, []
        registered = api.register_memory([(address, nbytes, ordinal, "")], mem_type="VRAM")
        for number in range(READS):
            offset = number * m.PIECE % nbytes
            here = api.get_xfer_descs([(address + offset, m.PIECE, ordinal)], mem_type="VRAM")
            far = api.get_xfer_descs([(there + offset, m.PIECE, device)], mem_type="VRAM")
            began = time.perf_counter()
            handle = api.initialize_xfer("READ", here, far, peer)
            state = api.transfer(handle)
            while state == "PROC":
                assert time.perf_counter() - began < LATE, "a read did not end"
                time.sleep(20e-6)
                state = api.check_xfer_state(handle)
            took.append(time.perf_counter() - began)
            assert state == "DONE", state
            api.release_xfer_handle(handle)
        got = memoryview(bytearray(nbytes))
        driver.copy_out(got, address)
        wrong = [n for n in range(nbytes >> 20) if got[n << 20 : (n + 1) << 20] != bytes([n & 255]) * (1 << 20)]
        api.deregister_memory(registered)
        say({"first": took[0], "median": statistics.median(took[1:]), "wrong MiB": wrong})


def bare(seconds: float) -> None:
    """Read each kind of memory into each."""
    nbytes = 8 * m.PIECE
    for kind in KINDS:
        for target in KINDS:
            what = f"NIXL's own read, cuda:0 {kind} -> cuda:1 {target}"
            with running("source", kind, "0", str(nbytes), seconds=seconds) as there:
                told = heard(there)
                if told is None:
                    print(f"{what}: the source failed", flush=True)
                    continue
                with running("read", target, "1", str(nbytes), json.dumps(told), seconds=seconds) as here:
                    found = heard(here)
                if found is None:
                    print(f"{what}: the reader failed or was killed after {seconds:g} s", flush=True)
                    continue
            rates = " then ".join(f"{m.PIECE / found[which] / 1e9:.2f}" for which in ("first", "median"))
            print(f"{what}: first {rates} GB/s, wrong: {found['wrong MiB'] or 'nothing'}", flush=True)


@contextlib.contextmanager
def running(*arguments: str, seconds: float) -> Iterator[Any]:
    """Run a part of this in a process of its own, which is killed at the end, or after so many seconds."""
    command = [sys.executable, __file__, "--part", *arguments]
    environment = {"UCX_LOG_FILE": "stderr", **os.environ}  # else what UCX warns of comes between what is said
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:  # fmt: skip
        late = threading.Timer(seconds, process.kill)
        late.start()
        try:
            yield process
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        finally:
            late.cancel()
            process.kill()


# -- replicas ----------------------------------------------------------------------------------------------------------
class NoTcp:
    """In the place of tcp."""

    name = "tcp"

    def reaches(self, location: Any) -> bool:
        return location == HOST

    def open(self, data: bytes, link: Any) -> Any:
        raise UnsupportedError("tcp", "another measurement", "one of NIXL")


def carry(keeper: str, nbytes: int) -> None:
    """Publish an array on the first GPU, and carry it."""
    array = vram.empty(nbytes // 8, "u8", device="cuda:0")
    driver: Any = array.region.driver
    for offset in range(0, nbytes, 1 << 20):
        driver.fill(array.address + offset, offset >> 20 & 255, min(1 << 20, nbytes - offset))
    vram.publish("model", {"w": array}, keeper=keeper)
    with Carrier("127.0.0.1:0", keeper=keeper, engines=[Nixl(trusted=True)]) as carrier:
        say(carrier.address)
        sys.stdin.read()


def replicate(address: str, how: str, keeper: str) -> None:
    """Pull it to the second GPU a few times."""
    plain: Any = pull.TCP
    if how == "nixl":
        pull.TCP = NoTcp()  # type: ignore[assignment]
    engines = [] if how == "tcp" else [Nixl(trusted=True)]
    for _ in range(4):
        done = vram.replicate(address, "model", device="cuda:1", engines=engines, keeper=keeper, timeout=30.0)
        vram.remove("model", keeper=keeper)
        rates = ", ".join(f"{name} {rate / 1e9:.2f}" for name, rate in done.rates.items())
        say(
            f"vram.replicate, {how}: {done.nbytes / done.seconds / 1e9:.2f} GB/s by {done.engine}"
            + (f" (a piece of each: {rates})" if rates else "")
            + f" {getattr(done, 'why', '') or ''}"
        )
    pull.TCP = plain


def replicas(nbytes: int, seconds: float) -> None:
    """Pull an entry by each engine."""
    with own_keeper() as origin, own_keeper() as here:
        with running("carry", origin, str(nbytes), seconds=4 * seconds) as there:
            address = heard(there) or ""
            for how in ("nixl", "tcp", "chosen"):
                with running("replicate", address, how, here, seconds=seconds) as process:
                    count = 0
                    while (line := heard(process)) is not None:
                        count += 1
                        print(line, flush=True)
                    if count < 4:
                        print(f"vram.replicate, {how}: failed or was killed after {seconds:g} s", flush=True)


def main() -> int:
    """Print all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1GiB")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", default="components,bare,replicas")
    parser.add_argument("--part", nargs="+", default=[], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        name, *rest = given.part
        parts: dict[str, Any] = {
            "components": lambda: say(components()),
            "source": lambda kind, ordinal, nbytes: source(kind, int(ordinal), int(nbytes)),
            "read": lambda kind, ordinal, nbytes, told: read(kind, int(ordinal), int(nbytes), told),
            "carry": lambda keeper, nbytes: carry(keeper, int(nbytes)),
            "replicate": replicate,
        }
        parts[name](*rest)
        return 0
    only = given.only.split(",")
    if "components" in only:
        with running("components", seconds=given.seconds) as process:
            found = heard(process) or {}
        lacks = [name for name in NEEDED if not found.get(name)]
        print(f"UCX finds {found}" + (f"; it lacks {', '.join(lacks)}" if lacks else ""), flush=True)
    if "bare" in only:
        bare(given.seconds)
    if "replicas" in only:
        replicas(parse_size(given.size), given.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
