"""Keeps memory alive when its maker is gone: a process that holds descriptors, names and leases, and its client.

Import what you need from the modules: :mod:`.client` in programs, :mod:`.session` for a keeper as an object,
:mod:`.private` for one of your own, ``python -m vram.keeper`` for the process itself. Nothing here imports numpy or a
driver.
"""

from __future__ import annotations
