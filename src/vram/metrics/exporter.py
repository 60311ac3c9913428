"""The exporter for Prometheus: a web server that asks the keeper at each scrape."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from ..errors import UnsupportedError, UsageError, VramError
from ..keeper.client import KeeperClient
from ..keeper.paths import find_path

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_BUSY = 15.0  # seconds to wait for the address, which the exporter of a keeper that was replaced may still have


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
    """Serves one keeper's numbers, from threads, until :meth:`close`.

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
        from prometheus_client import CollectorRegistry, make_wsgi_app

        self.keeper, _ = find_path(keeper)
        self._client: KeeperClient | None = None
        self._asking = threading.Lock()
        registry = CollectorRegistry()
        registry.register(self)
        self._server = _listen(host, port)
        self._server.set_app(make_wsgi_app(registry))
        self.host, self.port = host, self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

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

    def close(self) -> None:
        """Stop. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        with self._asking:
            self._hang_up()

    def _hang_up(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that is late, or gone, is not reported."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = 15.0  # seconds of one read or write: a scraper that is slower is hung up on

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of each scrape."""


def _listen(host: str, port: int) -> _Server:
    until = time.monotonic() + _BUSY
    while True:
        try:
            return (_Server6 if ":" in host else _Server)((host, port), _Handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not port or time.monotonic() > until:
                raise UsageError(f"cannot listen at {host}:{port}: {error.strerror or error}") from None
            time.sleep(0.2)
