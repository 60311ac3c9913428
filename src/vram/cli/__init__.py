"""The command line: prints what the library returns, and turns its errors into one line and an exit status."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Entry point of the ``vram`` command."""
    from .app import run

    run()
