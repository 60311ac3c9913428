"""The threads with which queues of :mod:`multiprocessing` pickle, as CPython 3.11 to 3.14 make them."""

from __future__ import annotations

import sys
import threading
from typing import Any

__all__ = ["feeder", "is_given_up", "is_unheard", "note_joined"]


def feeder() -> threading.Thread | None:
    """Return the calling thread if it feeds a queue."""
    queues: Any = sys.modules.get("multiprocessing.queues")
    thread = threading.current_thread()
    return thread if queues is not None and getattr(thread, "_target", None) is queues.Queue._feed else None


def is_unheard() -> bool:
    """Whether an error in pickling would only be printed, and the value dropped, as a plain queue does."""
    thread: Any = feeder()
    return thread is not None and thread._target.__globals__["Queue"]._on_queue_feeder_error in thread._args


_joined: set[threading.Thread | None] | None = None


def note_joined() -> None:
    """Note which feeder threads :mod:`multiprocessing` will join, as it begins to end this process."""
    global _joined
    queues: Any = sys.modules.get("multiprocessing.queues")
    if queues is not None:
        registry: Any = sys.modules["multiprocessing.util"]
        ends = list(registry._finalizer_registry.values())
        _joined = {end._args[0]() for end in ends if end._callback is queues.Queue._finalize_join}


def is_given_up(thread: threading.Thread) -> bool:
    """Whether a feeder thread is of a queue that was given up, by ``cancel_join_thread``, while this process ends."""
    return _joined is not None and thread not in _joined
