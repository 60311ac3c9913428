"""Transports in one process: order with streams, second mappings, threads, what is chosen and why."""

from __future__ import annotations

import functools
import gc
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.deadlines import SOON
from tests.support.forked import end_of, refused
from tests.support.keeper_here import later
from tests.support.order import undone_until_waited_for
from tests.support.transport_children import cuda_free, cuda_malloc, legacy_array
from typer.testing import CliRunner

import standin
import vram
from vram import driver as drivers
from vram import transports
from vram.errors import ClosedError, PeerGoneError, UnsupportedError, UsageError, WaitTimeoutError
from vram.spec import HOST, Location
from vram.transports import (
    Estimate,
    IpcTransport,
    No,
    PeerTransport,
    PipeExchange,
    ShmTransport,
    SocketExchange,
    StagedTransport,
    VmmTransport,
    Yes,
    endpoint,
    select,
)
from vram.transports.remote import RemoteTransport

GPU, OTHER = Location("cuda", 0), Location("cuda", 1)


def values(nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng().integers(0, 256, nbytes, dtype=np.uint8)


@pytest.fixture
def deferred() -> Iterator[standin.Standin]:
    """Work waits until somebody synchronises: a missing wait shows as wrong bytes."""
    with undone_until_waited_for() as control:
        yield control


# -- order ----------------------------------------------------------------------------------------------------------
PAIRS = [(GPU, OTHER), (GPU, GPU), (HOST, GPU), (GPU, HOST)]


@pytest.mark.standin
@pytest.mark.parametrize(("src", "dst"), PAIRS)
@pytest.mark.parametrize("slots", [2, 3])
def test_s10_staged_copies_wait_for_one_another(
    src: Location, dst: Location, slots: int, deferred: standin.Standin
) -> None:
    data = values(50_001)
    with vram.empty(50_001, "uint8", device=src) as array, vram.zeros(50_001, "uint8", device=dst) as target:
        array[...] = data
        with StagedTransport(src, dst, slots=slots, slot=4096) as transport:
            for shift in range(3):
                array[...] = np.roll(data, shift)
                transport.send(array)
                transport.recv(target, timeout=SOON)
                assert (target.to_host() == np.roll(data, shift)).all()


@pytest.mark.standin
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", ["peer", "staged", "vmm"])
def test_s10_what_a_stream_writes_is_waited_for(kind: str, given: bool, deferred: standin.Standin) -> None:
    """By the stream that was named, or all of the GPU's work."""
    driver = drivers.get(GPU)
    stream = driver.stream_create(GPU)
    try:
        with vram.zeros(4096, "uint8", device=GPU) as array, vram.zeros(4096, "uint8", device=OTHER) as target:
            for sender, receiver in ends_of(kind):
                driver.fill_async(array.address, 9, 4096, stream)
                assert deferred.live()["pending"]
                sender.send(array, stream if given else None)
                receiver.recv(target, timeout=SOON)
                assert set(target.to_host()) == {9}
    finally:
        driver.stream_destroy(stream)


@pytest.mark.standin
@pytest.mark.parametrize("kind", ["peer", "staged", "vmm"])
def test_s10_what_still_works_on_the_buffer_is_waited_for(kind: str, deferred: standin.Standin) -> None:
    driver = drivers.get(OTHER)
    stream = driver.stream_create(OTHER)
    try:
        with vram.zeros(4096, "uint8", device=GPU) as array, vram.zeros(4096, "uint8", device=OTHER) as target:
            array.fill(5)
            for sender, receiver in ends_of(kind):
                for named in (stream, None):
                    driver.fill_async(target.address, 9, 4096, stream)
                    sender.send(array)
                    receiver.recv(target, named, timeout=SOON)
                    driver.stream_synchronize(stream, OTHER)
                    assert set(target.to_host()) == {5}, "an older write came after what was received"
    finally:
        driver.stream_destroy(stream)


def ends_of(kind: str) -> Iterator[tuple[transports.Transport, transports.Transport]]:
    if kind == "vmm":
        one, other = SocketExchange.pair()
        with VmmTransport(GPU, OTHER, one) as sender, VmmTransport(GPU, OTHER, other) as receiver:
            yield sender, receiver
        return
    with (PeerTransport if kind == "peer" else StagedTransport)(GPU, OTHER) as both:
        yield both, both


def test_memory_of_the_host_has_no_streams() -> None:
    with vram.zeros(4, device="host") as array, StagedTransport("host", "host") as transport:
        with pytest.raises(UsageError, match="no stream"):
            transport.send(array, 1)


# -- staged ---------------------------------------------------------------------------------------------------------
def test_it_takes_two_buffers() -> None:
    for wrong in ({"slots": 1}, {"slots": 0}, {"slot": 0}):
        with pytest.raises(UsageError, match="two or more"):
            StagedTransport("host", "host", **wrong)  # type: ignore[arg-type]


@pytest.mark.standin
def test_both_directions_of_the_bus_are_queued_before_anybody_waits() -> None:
    """From GPU to GPU the processor waits once, at the end, however many pieces there are."""
    control = standin.Standin()
    with vram.zeros(64 * 4096, "uint8", device=GPU) as array, vram.empty(64 * 4096, "uint8", device=OTHER) as target:
        with StagedTransport(GPU, OTHER, slots=2, slot=4096) as transport:
            transport.send(array)
            control.clear()
            transport.recv(target)
            assert control.calls("cuMemcpyAsync") == 128
            assert control.calls("cuEventSynchronize") == 0
            assert control.calls("cuStreamSynchronize") <= 2
            assert control.calls("cuStreamWaitEvent") == 64 + 62


@pytest.mark.standin
@pytest.mark.parametrize("call", ["cuMemHostRegister", "cuStreamCreate", "cuEventCreate"])
def test_i4_a_failure_leaves_nothing_behind(call: str) -> None:
    control = standin.Standin()
    for nth in (1, 2):
        if (call, nth) == ("cuMemHostRegister", 2):
            continue
        with control.failing(call, nth=nth, code=2), pytest.raises(vram.errors.OutOfMemoryError):
            StagedTransport(GPU, OTHER)


@pytest.mark.standin
@pytest.mark.parametrize("kind", ["peer", "staged", "vmm"])
def test_i4_a_failing_copy_leaves_the_message(kind: str) -> None:
    control = standin.Standin()
    call = "cuMemcpyAsync" if kind == "staged" else "cuMemcpyDtoDAsync"
    with vram.zeros(5000, "uint8", device=GPU) as array, vram.zeros(5000, "uint8", device=OTHER) as target:
        array.fill(3)
        for sender, receiver in ends_of(kind):
            sender.send(array)
            with control.failing(call, nth=1, code=2), pytest.raises(vram.errors.DriverError):
                receiver.recv(target, timeout=SOON)
            if kind != "vmm":  # which gives the memory itself
                with control.failing(call, nth=1, code=2), pytest.raises(vram.errors.DriverError):
                    receiver.recv(timeout=SOON)
            assert set(receiver.recv(target, timeout=SOON).to_host()) == {3}


# -- peer -----------------------------------------------------------------------------------------------------------
@pytest.mark.standin
def test_what_is_imported_is_mapped_a_second_time_and_goes_with_its_arrays() -> None:
    driver = drivers.get(GPU)
    before = driver.live().mappings
    with PeerTransport(GPU, OTHER) as transport:
        array = vram.zeros(4096, "uint8", device=GPU)
        target = vram.zeros(4096, "uint8", device=OTHER)
        for value in range(5):
            array.fill(value)
            transport.send(array)
            transport.recv(target)
            assert set(target.to_host()) == {value}
        assert driver.live().mappings == before + 2
        with transport.import_(transport.export(array)) as seen:
            assert driver.live().mappings == before + 3
            array.fill(77)
            assert seen.address != array.address
            assert set(seen.to_host()) == {77}
            seen.fill(78)
            assert set(array.to_host()) == {78}
        assert driver.live().mappings == before + 2
        array.close()
        target.close()
        gc.collect()
        assert driver.live().mappings == before


@pytest.mark.standin
@pytest.mark.parametrize("kind", ["peer", "vmm"])
def test_memory_that_grew_is_sent_as_it_is_now(kind: str) -> None:
    granule = 1 << 21
    with vram.zeros(10, "uint8", device=GPU, capacity=4 * granule, chunk=granule) as array:
        for sender, receiver in ends_of(kind):
            for rows in (10, granule + 3, 3 * granule, 100):
                array.resize(rows)
                array[...] = data = values(rows)
                sender.send(array)
                with vram.empty(rows, "uint8", device=OTHER) as target:
                    receiver.recv(target, timeout=SOON)
                    assert (target.to_host() == data).all()


@pytest.mark.standin
@pytest.mark.parametrize("kind", ["peer", "staged"])
def test_memory_of_cudamalloc_is_sent_within_the_process(kind: str) -> None:
    address = cuda_malloc(70_001)
    array = legacy_array(address, 70_001)
    array[...] = data = values(70_001)
    with vram.empty(60_000, "uint8", device=OTHER) as target:
        for sender, receiver in ends_of(kind):
            with array[10_001:] as part:
                sender.send(part)
            receiver.recv(target, timeout=SOON)
            assert (target.to_host() == data[10_001:]).all()
            if kind == "peer":
                with pytest.raises(UsageError, match="cannot be mapped"):
                    receiver.import_(sender.export(array))
    array.close()
    del array, part
    cuda_free(address)


@pytest.mark.standin
def test_memory_without_descriptors_says_which_way_it_travels() -> None:
    address = cuda_malloc(4096)
    array = legacy_array(address, 4096)
    for sender, _ in ends_of("vmm"):
        for use in (sender.send, sender.export):
            with pytest.raises(UsageError, match="64-byte handle, with the ipc transport"):
                use(array)
    array.close()
    del array
    cuda_free(address)


# -- ends -----------------------------------------------------------------------------------------------------------
def test_threads_send_and_receive() -> None:
    with StagedTransport("host", "host") as both:
        seen: list[int] = []

        def receive() -> None:
            with vram.empty(8, "uint8", device="host") as buffer:
                for _ in range(50):
                    both.recv(buffer, timeout=SOON)
                    seen.append(int(buffer.numpy()[0]))

        threads = [threading.Thread(target=receive) for _ in range(4)]
        for thread in threads:
            thread.start()
        with vram.zeros((200, 8), "uint8", device="host") as array:
            array.numpy()[:] = np.arange(200, dtype="uint8")[:, None]
            for row in array:
                both.send(row)
            for thread in threads:
                thread.join(SOON)
        assert sorted(seen) == list(range(200))


def test_closing_wakes_who_waits() -> None:
    one, other = SocketExchange.pair()
    with one:
        for transport in (StagedTransport("host", "host"), VmmTransport("host", "host", other)):
            waiting, ended = later(functools.partial(transport.recv, timeout=SOON))
            transport.close()
            waiting.join(SOON)
            assert [type(error) for error in ended] == [ClosedError]


def test_i7_a_forked_child_has_none_of_it() -> None:
    one, other = SocketExchange.pair()
    with StagedTransport("host", "host") as staged, VmmTransport("host", "host", one) as vmm, other:

        def work() -> int:
            count = refused(lambda: staged.recv(timeout=0), lambda: vmm.recv(timeout=0))
            staged.close()
            vmm.close()
            return count

        assert end_of(work) == 2
        with pytest.raises(WaitTimeoutError):
            vmm.recv(timeout=0.01)


def test_a_transport_that_nobody_closed_warns() -> None:
    """I2."""
    with pytest.warns(vram.errors.LeakWarning, match="staged transport"):  # noqa: PT031
        StagedTransport("host", "host")
        gc.collect()


# -- what is available, and what is chosen ---------------------------------------------------------------------------
def test_what_works_on_the_host() -> None:
    for cls in (StagedTransport, VmmTransport, ShmTransport):
        assert cls.available("host", "host") == Yes()
    for cls in (PeerTransport, IpcTransport):
        answer = cls.available("host", "host")
        assert isinstance(answer, No)
        assert "host is not" in answer.reason
    with pytest.raises(UnsupportedError, match="peer transport from host to host"):
        PeerTransport("host", "host")
    for cls in (PeerTransport, IpcTransport, StagedTransport, VmmTransport):
        with pytest.raises(UsageError):
            cls.available("host", "gpu 5")


@pytest.mark.standin
def test_a_refusal_advises_what_there_is() -> None:
    """Within one process staged goes over the host; between two shm does."""
    for src, dst in (("host", "cuda:0"), ("cuda:0", "host"), ("host", "host")):
        for cls in (PeerTransport, IpcTransport, VmmTransport):
            if cls is VmmTransport and src == dst:
                continue
            answer = cls.available(src, dst)
            assert isinstance(answer, No)
            between = issubclass(cls, RemoteTransport)
            assert ("use staged" in answer.reason, "use shm" in answer.reason) == (not between, between)
            assert (ShmTransport if between else StagedTransport).available(src, dst)
            with pytest.raises(UnsupportedError) as refused:
                cls(src, dst, *([None] if between else []))
            assert refused.value.have.startswith(f"{src} and {dst}: ")


def test_what_is_no_exchange_is_told_what_is() -> None:
    with pytest.raises(UsageError) as refused:
        select("host", "host", exchange=object())  # type: ignore[arg-type]
    named = str(refused.value).partition(" is no exchange: ")[2].removesuffix(" are").replace(" and ", ", ").split(", ")
    assert len(named) == 3
    for name in named:
        assert hasattr(transports.__dict__[name], "carries_fds")


@pytest.mark.standin
def test_a_place_has_one_name() -> None:
    uuid = drivers.get(GPU).device_info(GPU).uuid
    with PeerTransport(f"cuda:{uuid}", "cuda:1") as transport:
        assert (transport.src, transport.dst) == (GPU, OTHER)
        assert transport.estimate() is PeerTransport.measure(GPU, OTHER)
        assert repr(transport) == "<PeerTransport cuda:0 to cuda:1, 0 sent, 0 received>"


@pytest.mark.standin
def test_the_ranking_is_what_was_measured() -> None:
    found = select("cuda:0", "cuda:1", nbytes="1MiB")
    assert [route.kind for route in found.routes if route.is_available] == ["peer", "staged"] or (
        found.routes[0].seconds <= found.routes[1].seconds
    )
    for route in found.routes:
        assert route.estimate is not None
        assert route.seconds == route.estimate.seconds(1 << 20)
    assert [route.kind for route in found.routes[2:]] == ["vmm", "ipc", "shm"]
    assert all("needs an exchange" in route.reason for route in found.routes[2:])
    assert "fastest for 1 MiB" in found.best.reason
    with found.transport() as transport:
        assert transport.kind == found.best.kind


@pytest.mark.standin
@pytest.mark.parametrize("cls", [PeerTransport, StagedTransport, VmmTransport, IpcTransport, ShmTransport])
def test_figures_are_measured_and_no_constants(cls: type[PeerTransport], monkeypatch: pytest.MonkeyPatch) -> None:
    """By moving bytes, for each pair of places anew; and once."""
    monkeypatch.setattr(endpoint, "_known", {})
    control = standin.Standin()
    found = []
    for pair in ((GPU, OTHER), (GPU, GPU)):
        control.clear()
        found.append(cls.measure(*pair))
        assert control.calls("cuMemcpyAsync") + control.calls("cuMemcpyDtoDAsync") >= 20
        control.clear()
        assert cls.measure(*pair) is found[-1]
        assert control.calls("cuMemcpyAsync") + control.calls("cuMemcpyDtoDAsync") == 0
    assert found[0] != found[1], "no two measurements are the same to the last digit"


def test_the_line_goes_through_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latency and bandwidth are told apart; noise gives no negative or infinite figures."""
    for times in ((1e-5, 1e-2), (1e-3, 1e-3), (2e-3, 1e-3), (1e-9, 1e-9)):
        taken = dict(zip((endpoint.SMALL, endpoint.LARGE), times, strict=True))
        monkeypatch.setattr(endpoint, "_best", lambda _, nbytes, taken=taken: taken[nbytes])
        found = endpoint._fit(lambda nbytes: None)
        assert 0 < found.bandwidth < float("inf")
        assert 0 < found.latency <= times[0]
        if times[1] > times[0]:
            assert abs(found.seconds(endpoint.LARGE) - times[1]) < 1e-9


@pytest.mark.standin
def test_a_larger_size_may_be_another_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latency decides for small ones, bandwidth for large ones: by the figures that are remembered."""
    known = {("peer", GPU, OTHER): Estimate(1e12, 1e-2), ("staged", GPU, OTHER): Estimate(1e9, 1e-6)}
    monkeypatch.setattr(endpoint, "_known", {**endpoint._known, **known})
    assert select(GPU, OTHER, nbytes="4KiB").best.kind == "staged"
    large = select(GPU, OTHER, nbytes="1GiB")
    assert large.best.kind == "peer"
    assert "slower" in large.routes[1].reason


@pytest.mark.standin
def test_between_processes_the_exchange_and_the_memory_decide() -> None:
    one, other = SocketExchange.pair()
    with other:
        found = select("cuda:0", "cuda:1", exchange=one)
        assert {route.kind for route in found.routes if route.is_available} == {"vmm", "shm"}
        reasons = {route.kind: route.reason for route in found.routes}
        assert "cudaMalloc and a stream-ordered pool only" in reasons["ipc"]
        assert "exchange leads to another" in reasons["peer"]
        for memory in ("legacy", "pool"):
            usable = {
                route.kind for route in select(GPU, GPU, exchange=one, memory=memory).routes if route.is_available
            }
            assert usable == {"ipc", "shm"}
        elsewhere = {route.kind: route for route in select(GPU, OTHER, exchange=one, memory="pool").routes}
        assert not elsewhere["ipc"].is_available
        assert "not on cuda:1" in elsewhere["ipc"].reason
        assert elsewhere["shm"].is_available
        with found.transport() as transport:
            assert transport.kind == found.best.kind
    with pytest.raises(UsageError, match="memory"):
        select("host", "host", memory="other")  # type: ignore[arg-type]


def test_nothing_is_taken_silently() -> None:
    """No fallback: if there is none, the error has every reason."""
    found = select("host", "cuda:4000")
    assert [route.is_available for route in found.routes] == [False] * 5
    for use in (lambda: found.best, found.transport):
        with pytest.raises(UnsupportedError) as raised:
            use()
        for route in found.routes:
            assert f"{route.kind}: {route.reason}" in str(raised.value)


# -- the command ----------------------------------------------------------------------------------------------------
def test_the_route_command_prints_the_ranking() -> None:
    from vram.cli.app import app

    done = CliRunner().invoke(app, ["route", "host", "host", "--size", "1MiB"])
    assert done.exit_code == 0
    for word in ("host to host", "1 MiB in", "GB/s", "us", "staged", "vmm", "ipc", "peer", "the fastest"):
        assert word in done.output
    done = CliRunner().invoke(app, ["route", "host", "host", "--json"])
    found = json.loads(done.output)
    assert (found["src"], found["dst"], found["nbytes"], found["best"]) == ("host", "host", 64 << 20, "staged")
    assert [route["kind"] for route in found["routes"]] == ["staged", "peer", "vmm", "ipc", "shm"]
    assert found["routes"][0]["estimate"]["bandwidth"] > 0
    done = CliRunner().invoke(app, ["route", "host", "cuda:4000"])
    assert done.exit_code == 1
    assert "cuda:4000" in done.output


# -- pipes ------------------------------------------------------------------------------------------------------------
def test_a_listener_that_stops_between_two_looks_is_gone(tmp_path: Path) -> None:
    """It had made both pipes, and takes both away."""
    there = tmp_path / "x.there"
    os.mkfifo(there)
    reads = os.open(there, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(PeerGoneError, match="has stopped"):
            PipeExchange.connect(str(tmp_path / "x"), SOON)
    finally:
        os.close(reads)


def test_a_listener_that_is_slow_to_open_its_pipe_is_not_taken_for_one_that_has_gone(tmp_path: Path) -> None:
    """Until it has opened the pipe, reading from that is the end of file."""
    there, back = tmp_path / "x.there", tmp_path / "x.back"
    os.mkfifo(there)
    os.mkfifo(back)
    reads = os.open(there, os.O_RDONLY | os.O_NONBLOCK)
    with PipeExchange.connect(str(tmp_path / "x"), SOON) as exchange:
        assert not exchange.is_gone()
        with pytest.raises(WaitTimeoutError):
            exchange.recv(timeout=0.02)
        writes = os.open(back, os.O_WRONLY)
        os.write(writes, (1).to_bytes(4, "little") + b"x")
        assert exchange.recv(timeout=SOON) == (b"x", [])
        os.close(writes)
        with pytest.raises(PeerGoneError):
            exchange.recv(timeout=SOON)
    os.close(reads)
