"""Memory as arrays of any framework: numpy, torch, DLPack, the buffer protocol, safetensors files.

:class:`Array` puts a shape and an element type on a :class:`~vram.memory.Region`. Views hold pins of their own, so
memory lives exactly as long as somebody looks at it (invariant I6).
"""

from __future__ import annotations

from .array import Array

__all__ = ["Array"]
