"""Answers scrapes, and asks the keeper for each."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedError, UsageError, VramError
from ..keeper.client import KeeperClient
from ..keeper.paths import find_path

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_PATIENCE = 15.0  # seconds that a scrape may take: whoever sends or reads more slowly is hung up on
_MOST = 16  # connections at a time: for another one, who has been asking for longest is hung up on
_BUSY = 15.0  # seconds to wait for the address, which the exporter of a keeper that was replaced may still have


def parse_address(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT``, such as ``127.0.0.1:9464`` or ``[::1]:9464``.

    Raises
    ------
    UsageError
        If it is something else. The host has to be said: ``0.0.0.0`` is everybody who reaches this machine.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise UsageError(f"{text!r:.80} is no address to listen at; write it as 127.0.0.1:9464")
    return host, int(port)


def check_installed() -> None:
    """Raise :class:`UnsupportedError` where prometheus-client is not installed."""
    if find_spec("prometheus_client") is None:
        raise UnsupportedError(
            "metrics for Prometheus",
            "prometheus-client",
            "no such package",
            "pip install '.[metrics]' in a clone of vram",
        )


class Exporter:
    """Serves one keeper's numbers.

    Parameters
    ----------
    host, port : str, int
        Where to listen; port 0 chooses one.
    keeper : str or PathLike, optional
        The keeper's socket; by default ``VRAM_KEEPER``, or the user's own. It need not run yet.

    Raises
    ------
    UnsupportedError
        If prometheus-client is not installed.
    UsageError
        If the address cannot be had.
    """

    def __init__(self, host: str, port: int, keeper: str | os.PathLike[str] | None = None) -> None:
        check_installed()
        self.keeper, _ = find_path(keeper)
        self._client: KeeperClient | None = None
        self._asking = threading.Lock()
        self._server = _listen(host, port, self)
        self.host, self.port = host, int(self._server.server_address[1])
        self._serving = False

    def collect(self) -> Iterator[Metric]:
        """Ask the keeper, as a collector of prometheus_client's."""
        from .families import absent, families

        with self._asking:
            try:
                if self._client is None:
                    self._client = KeeperClient.connect(self.keeper, label="vram metrics")
                held, done = self._client.statistics(), self._client.measure()
            except (VramError, OSError):
                self._hang_up()
                yield from absent()
                return
        yield from families(held, done)

    def serve(self, parent_fd: int = -1) -> None:
        """Answer scrapes until :meth:`close`, or until `parent_fd` reads end of file.

        Parameters
        ----------
        parent_fd : int
            A pipe whose other end is with whom this belongs to.
        """
        if parent_fd >= 0:
            threading.Thread(target=self._end_with, args=(parent_fd,), daemon=True).start()
        self._serving = True
        self._server.serve_forever(poll_interval=0.5)

    def close(self) -> None:
        """Stop. Idempotent."""
        if self._serving:  # it would else wait for a loop that never begins
            self._server.shutdown()
        self._server.server_close()
        with self._asking:
            self._hang_up()

    def _end_with(self, fd: int) -> None:
        while select.select([fd], [], [])[0] and os.read(fd, 1):
            pass
        self._server.shutdown()

    def _hang_up(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    exporter: Exporter

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._since: dict[socket.socket, float] = {}  # the connections, and when they were made: the oldest first
        self.answered: set[socket.socket] = set()  # those whose question is whole
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread. Of many who have not said what they want yet, the oldest makes room."""
        if len(self._since) >= _MOST:
            asking = next((one for one in self._since.copy() if one not in self.answered), None)
            if asking is None:
                request.close()
                return
            self._since.pop(asking, None)
            with contextlib.suppress(OSError):
                asking.shutdown(socket.SHUT_RDWR)  # its thread sees the end of the file
        self._since[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """It was answered."""
        self._since.pop(request, None)
        self.answered.discard(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Hang up on those who take too long; the thread that answers sees the end of the file."""
        late = time.monotonic() - _PATIENCE
        for request in [one for one, since in self._since.copy().items() if since < late]:
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who scrapes has gone: nothing to say."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    timeout = _PATIENCE  # of one read or write
    server: _Server
    server_version = "vram"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer ``/metrics``."""
        self.server.answered.add(self.request)
        if self.path.partition("?")[0] != "/metrics":
            self._answer(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"see /metrics\n")
            return
        kind, body = _encoded(self.server.exporter, self.headers.get("Accept", ""))
        self._answer(HTTPStatus.OK, kind, body)

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of each scrape."""


def _encoded(exporter: Exporter, accept: str) -> tuple[str, bytes]:
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry(auto_describe=False)
    registry.register(exporter)
    encode, kind = choose_encoder(accept)
    return kind, encode(registry)


def _listen(host: str, port: int, exporter: Exporter) -> _Server:
    until = time.monotonic() + _BUSY
    while True:
        try:
            server = (_Server6 if ":" in host else _Server)((host, port), _Handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port and time.monotonic() < until:
                time.sleep(0.2)
                continue
            raise UsageError(f"cannot listen at {host}:{port}: {error.strerror or error}") from None
        server.exporter = exporter
        return server
