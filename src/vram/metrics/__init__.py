"""A keeper's numbers for Prometheus: ``vram metrics``, and ``vram keep --metrics``.

A process of its own asks the keeper (:meth:`vram.keeper.client.KeeperClient.measure`) and answers HTTP, so that whoever
scrapes, and never reads, costs the keeper nothing. :mod:`.families` says what each number is called, :mod:`.exporter`
serves them.
"""

from __future__ import annotations

from .exporter import Exporter, check_installed

__all__ = ["Exporter", "check_installed"]
