"""``python -m vram.doctor``: what the driver of the GPUs says, as JSON; see :func:`vram.doctor.gpus.ask`."""

from __future__ import annotations

import sys

import msgspec

from .gpus import examine

if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(examine()))
    sys.stdout.flush()
