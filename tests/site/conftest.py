"""A browser, pages of two widths, and what is served to them: the site, and maps."""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-site")

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def served(directory: Path) -> Iterator[str]:
    """Serve a directory over HTTP, and yield where."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Say nothing."""

    handler = functools.partial(Quiet, directory=str(directory))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Where the site is served."""
    with served(ROOT / "build/site") as where:
        yield where


@pytest.fixture(scope="session")
def maps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where maps are served that draw_maps.py has drawn, by a Python that has this library's dependencies."""
    directory = tmp_path_factory.mktemp("maps")
    python = os.environ.get("VRAM_PYTHON") or str(ROOT / ".venv/bin/python")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    program = str(Path(__file__).with_name("draw_maps.py"))
    subprocess.run([python, program, str(directory)], env=environment, check=True, timeout=120)
    with served(directory) as where:
        yield where


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    """The Chromium of this machine."""
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=os.environ.get("VRAM_BROWSER") or None)
        yield opened
        opened.close()


@pytest.fixture(params=[1300, 390], ids=["wide", "narrow"])
def page(request: pytest.FixtureRequest, browser: object) -> Iterator[object]:
    """A page of that width, in which no script may fail, and which asks nobody else for anything."""
    opened = browser.new_page(viewport={"width": request.param, "height": 900})
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    left = "net::ERR_ABORTED"  # the page was left before it had all of it
    opened.on("requestfailed", lambda failed: wrong.append(failed.url) if failed.failure != left else None)
    opened.on("request", lambda sent: wrong.append(sent.url) if "127.0.0.1" not in sent.url else None)
    opened.on("response", lambda got: wrong.append(got.url) if got.status >= 400 else None)
    yield opened
    opened.close()
    assert not wrong
