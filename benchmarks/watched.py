"""Attaches at a keeper that is scraped each second while ``vram top`` runs, and at one that nobody watches."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import statistics
import struct
import subprocess
import sys
import termios
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from multiprocessing.connection import Connection

import vram
from vram.bench.children import DEADLINE, Child, child, own_keeper
from vram.bench.measure import Figure, Result, Row, in_turns
from vram.errors import InternalError
from vram.keeper.client import KeeperClient

from .entries import fill

_NAME = "model"
_WITHIN, _SHARE = 1.03, 3.0
_ORDERS = ("name", "size")  # the one that asks for least, and one for which all entries are read


def on_host(quick: bool) -> Result:
    """Measure attaches at one keeper, watched and not, in turns; and at one that logs."""
    rounds, seconds, entries = (2, 0.2, 60) if quick else (12, 1.0, 1_000)
    rows: list[Row] = []
    notes = [
        f"attach, touch, release acknowledged, one after the other, by one process, for {seconds:g} s a round; "
        f"{entries} entries, which vram top has sorted as it says. While nobody watches, vram top and the exporter "
        f"stand still (SIGSTOP). How many a second includes what the watchers take of these cores"
    ]
    if find_spec("prometheus_client") is None:
        notes.append("without scrapes: prometheus-client is not installed")
    with contextlib.ExitStack() as stage:
        quiet = stage.enter_context(_full_keeper(entries))
        logging = stage.enter_context(_full_keeper(entries, "--log", "json"))
        ordinary = stage.enter_context(child(_attach_on_demand))
        watching = {order: stage.enter_context(child(_watch, quiet, order)) for order in _ORDERS}
        for one in watching.values():
            one.hear()
        took: dict[str, list[float]] = {}

        def at(case: str, path: str, watcher: Child | None = None) -> Callable[[], float]:
            def run() -> float:
                with _watched_by(watcher):
                    rate, median = ordinary.ask(path, seconds)
                took.setdefault(case, []).append(median)
                return float(rate)

            return run

        cases = {"quiet": at("quiet", quiet), "logs": at("logs", logging)}
        cases |= {order: at(order, quiet, watching[order]) for order in _ORDERS}
        rates = in_turns(cases, rounds, warm=1)
        shares = {order: [_share(quiet, watching[order], seconds) for _ in range(min(rounds, 5))] for order in _ORDERS}
    scrapes = "" if find_spec("prometheus_client") is None else "scraped each second, "
    said = {order: f"{scrapes}vram top running, sorted by {order}" for order in _ORDERS} | {"logs": "with --log json"}
    for values, unit, scale, target in ((took, "us", 1e6, _WITHIN), (rates, "attaches/s", 1.0, None)):
        figure = Figure.of(values["quiet"][-rounds:], unit, scale=scale)
        alone = Row(f"attach and release, nobody watches, {unit}", figure)
        rows.append(alone)
        for case, words in said.items():
            rows.append(Row.held(words, Figure.of(values[case][-rounds:], unit, scale=scale), alone, at_most=target))
    for order, parts in shares.items():
        figure = Figure.of(parts, "%", scale=100)
        rows.append(Row.limited(f"the keeper's processor time, {said[order]}, no attaches", figure, at_most=_SHARE))
    return Result("watched", "Attach while the keeper is watched", rows, notes)


@contextlib.contextmanager
def _full_keeper(entries: int, *options: str) -> Iterator[str]:
    with own_keeper(*options) as path, vram.zeros(2 << 20, "uint8", device="host") as array:
        fill(path, entries)
        vram.publish(_NAME, {"w": array}, keeper=path)
        yield path


def _share(path: str, watcher: Child, seconds: float) -> float:
    """The share of a processor that a watched keeper takes: other work on this machine does not change it."""
    with KeeperClient.connect(path) as client, _watched_by(watcher):
        begin, before = time.monotonic(), client.measure().processor
        time.sleep(2 * seconds)
        return (client.measure().processor - before) / (time.monotonic() - begin)


@contextlib.contextmanager
def _watched_by(watcher: Child | None) -> Iterator[None]:
    if watcher is not None:
        watcher.ask("go")
    try:
        yield
    finally:
        if watcher is not None:
            watcher.ask("pause")


def _attach_on_demand(pipe: Connection) -> None:
    while True:
        path, seconds = pipe.recv()
        with vram.attach(_NAME, keeper=path) as lease:
            _ = lease["w"].numpy()[0]
        took: list[float] = []
        begin = now = time.perf_counter()
        while now - begin < seconds:
            with vram.attach(_NAME, keeper=path) as lease:
                _ = lease["w"].numpy()[0]
            del _
            took.append(-now + (now := time.perf_counter()))
        pipe.send((len(took) / (now - begin), statistics.median(took)))


def _watch(pipe: Connection, path: str, order: str) -> None:
    """Run ``vram top`` and an exporter from "go" to "pause", and scrape each second."""
    with contextlib.ExitStack() as stage:
        screen, top = stage.enter_context(_top(path, order))
        processes, address = [top], ""
        if find_spec("prometheus_client") is not None:
            exporter, address = stage.enter_context(_exporter(path))
            processes.append(exporter)
        _drain(screen, time.monotonic() + 0.5)
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        pipe.send("ready")
        while True:
            pipe.recv()
            for process in processes:
                process.send_signal(signal.SIGCONT)
            pipe.send("going")
            while not pipe.poll():
                if address:
                    with urllib.request.urlopen(f"http://{address}/metrics", timeout=DEADLINE) as answer:
                        answer.read()
                _drain(screen, time.monotonic() + 1.0, pipe)
            pipe.recv()
            if top.poll() is not None:
                raise InternalError(f"vram top ended with status {top.returncode}")
            for process in processes:
                process.send_signal(signal.SIGSTOP)
            pipe.send("paused")


def _drain(screen: int, until: float, pipe: Connection | None = None) -> None:
    """Read what is drawn until then, or until the pipe has something."""
    watched = [screen] if pipe is None else [screen, pipe.fileno()]
    while (left := until - time.monotonic()) > 0:
        ready, _, _ = select.select(watched, [], [], left)
        if screen in ready:
            os.read(screen, 65536)
        if pipe is not None and pipe.fileno() in ready:
            return


@contextlib.contextmanager
def _top(path: str, order: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    screen, theirs = pty.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    program = "from vram.cli import main; main()"
    command = [sys.executable, "-P", "-c", program, "top", "--socket", path, "--sort", order]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        try:
            yield screen, process
        finally:
            process.kill()
            os.close(screen)


@contextlib.contextmanager
def _exporter(path: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    command = [sys.executable, "-P", "-m", "vram.metrics", "--listen", "127.0.0.1:0", "--socket", path]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            said = process.stderr.readline() if process.stderr is not None else b""
            found = re.search(rb"http://([0-9.:]+)/metrics", said)
            if found is None:
                raise InternalError("vram metrics did not begin to serve")
            yield process, found[1].decode()
        finally:
            process.kill()
