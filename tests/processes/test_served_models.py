"""A model of torch under the servers that people use: one copy for all workers, and new weights while they serve."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.deadlines import SOON, until

import vram

pytest.importorskip("torch", reason="could not import 'torch'")
for package in ("fastapi", "uvicorn", "uvicorn_worker", "gunicorn"):
    pytest.importorskip(package, reason=f"could not import '{package}'")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WORKERS = 3
SERVERS = {
    "uvicorn": "uvicorn --workers 3 --log-level error --port",
    "gunicorn": "gunicorn -k uvicorn_worker.UvicornWorker -w 3 --no-control-socket --log-level error -b :",
    "gunicorn with preload": "gunicorn -k uvicorn_worker.UvicornWorker -w 3 --no-control-socket --preload "
    "--log-level error -b :",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def served(words: str, keeper: str) -> Iterator[str]:
    """Run the application of the example, and yield its address."""
    port = free_port()
    given = re.sub(" -b :$", f" -b 127.0.0.1:{port}", words) if "-b" in words else f"{words} {port}"
    command = [sys.executable, "-m", *given.split(), "serve_with_fastapi:app"]
    with subprocess.Popen(command, cwd=EXAMPLES, env={**os.environ, "VRAM_KEEPER": keeper}) as server:
        try:
            yield f"http://127.0.0.1:{port}/?x=0.5"
        finally:
            server.terminate()
            server.wait(SOON)


def ask(url: str) -> dict[str, Any]:
    """Return an answer; none as long as nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=SOON) as reply:
            said: dict[str, Any] = json.load(reply)
            return said
    except OSError:
        return {}


@pytest.mark.parametrize("server", SERVERS)
def test_all_workers_serve_one_copy_and_go_on_to_the_next(server: str, kept: vram.Keeper) -> None:
    sys.path.insert(0, str(EXAMPLES))
    try:
        from serve_with_fastapi import build  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(EXAMPLES))
    vram.publish("classifier", build())
    before = vram.entry("classifier")
    with served(SERVERS[server], kept.path) as url:
        seen: dict[int, set[tuple[int, float]]] = {}
        for version in (before.version, before.version + 1):
            answers: set[tuple[int, float]] = set()

            def all_answer(version: int = version, answers: set[tuple[int, float]] = answers) -> bool:
                said = ask(url)
                if said.get("version") == version:
                    answers.add((said["worker"], said["y"]))
                return len(answers) == WORKERS

            until(all_answer, what=f"the answers of all workers by version {version}")
            seen[version] = answers
            if version == before.version:
                assert vram.entry("classifier").nbytes == before.nbytes
                vram.publish("classifier", build())
        first, second = seen.values()
        assert {worker for worker, _ in first} == {worker for worker, _ in second}, "no worker was started anew"
        assert len({y for _, y in first}) == len({y for _, y in second}) == 1
    until(lambda: not vram.statistics().leases, what="the end of all leases")
