"""The verbs that wait, to be awaited: ``lease = await vram.aio.attach("policy", timeout=None)``.

They are what :func:`vram.attach`, :meth:`vram.Ring.attach`, :func:`vram.borrow`, :func:`vram.follow` and
:meth:`vram.ArrayChannel.recv` are, without stopping the event loop, which is asyncio's or one that keeps to its rules.
Cancelling gives everything back.
"""

from __future__ import annotations

from .entries.awaited import attach, attach_ring, borrow, follow, recv

__all__ = ["attach", "attach_ring", "borrow", "follow", "recv"]
