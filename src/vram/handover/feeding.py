"""The threads with which queues of :mod:`multiprocessing` pickle, as CPython 3.11 to 3.14 make them."""

from __future__ import annotations

import gc
import sys
import threading
from collections import deque
from typing import Any


def _feeder() -> Any:
    """Return the calling thread if it feeds a queue."""
    queues: Any = sys.modules.get("multiprocessing.queues")
    thread = threading.current_thread()
    return thread if queues is not None and getattr(thread, "_target", None) is queues.Queue._feed else None


def fed_buffer() -> deque[object] | None:
    """Return the buffer of the queue that the calling thread feeds; None for any other thread."""
    thread = _feeder()
    return None if thread is None else thread._args[0]


def is_unheard() -> bool:
    """Whether an error in pickling would only be printed, and the value dropped, as a plain queue does."""
    thread = _feeder()
    return thread is not None and thread._target.__globals__["Queue"]._on_queue_feeder_error in thread._args


def is_given_up(buffer: deque[object]) -> bool:
    """Whether the queue with this buffer was given up, by ``cancel_join_thread``. Takes milliseconds."""
    for owner in gc.get_referrers(buffer):
        state = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
        if state.get("_buffer") is buffer and state.get("_joincancelled"):
            return True
    return False
