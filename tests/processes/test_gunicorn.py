"""Workers of gunicorn: those with threads attach, and those of gevent are refused with the reason and the way out."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest
from tests.support.deadlines import SOON, until

import vram

APPLICATION = """
import vram

def application(environment, respond):
    try:
        with vram.attach("x") as lease:
            said = f"got {lease['a'].numpy().sum()}"
    except vram.errors.UnsupportedError as error:
        said = f"UnsupportedError: {error}"
    respond("200 OK", [("Content-Type", "text/plain")])
    return [said.encode()]
"""


class UnixConnection(HTTPConnection):
    """A connection to a server that listens at a path."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=SOON)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(SOON)
        self.sock.connect(self.path)


def listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


@contextlib.contextmanager
def served(place: Path, worker: str) -> Iterator[str]:
    """Run the application with one worker of a class, and yield the path that it listens at."""
    (place / "app.py").write_text(APPLICATION)
    path = str(place / "http")
    command = [sys.executable, "-m", "gunicorn", "-k", worker, "--threads", "2", "--bind", f"unix:{path}"]
    with subprocess.Popen(
        [*command, "--no-control-socket", "--log-level", "error", "app"], cwd=place, stdin=subprocess.DEVNULL
    ) as server:
        try:
            until(lambda: listens(path) or server.poll() is not None)
            yield path
        finally:
            server.terminate()
            server.wait(SOON)


def answer(path: str) -> str:
    """Ask for the only page there is."""
    with contextlib.closing(UnixConnection(path)) as connection:
        connection.request("GET", "/")
        return connection.getresponse().read().decode()


@pytest.mark.parametrize(
    ("worker", "said"),
    [
        ("gthread", "got 10"),
        ("gevent", "UnsupportedError: vram needs the sockets and threads of Python; have those of gevent"),
    ],
    ids=["gthread", "gevent"],
)
def test_a_worker_attaches_or_is_told_why_not(tmp_path: Path, worker: str, said: str) -> None:
    with vram.private_keeper():
        vram.publish("x", {"a": np.arange(5)})
        with served(tmp_path, worker) as path:
            answered = answer(path)
        assert answered.startswith(said)
        assert ("sync, gthread or uvicorn_worker" in answered) is (worker == "gevent")
