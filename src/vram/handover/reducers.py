"""How multiprocessing pickles arrays: as a reference to shared memory, or by name what was attached.

An end of an :class:`ArrayChannel` can be the argument of a process, too.

Most who attach or publish never load :mod:`multiprocessing`, which takes as long as half of what they need. So it is
taught when it is loaded, whoever does that, and again when it is loaded again: nothing can be pickled for it before.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import VramError
from ..lifetime import shielded

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from ..arrays import Array
    from .array_channel import ArrayChannel

_REDUCTION = "multiprocessing.reduction"  # which holds the table of how things are pickled


def register() -> None:
    """Teach :mod:`multiprocessing` (queues, pipes, pools, process arguments) to pass arrays without copying them."""
    # First: another thread may be about to load it. It stays, since a reload makes a new table.
    sys.meta_path.insert(0, _Finder())
    if _REDUCTION in sys.modules:
        _teach()


def _teach() -> None:
    from multiprocessing import util
    from multiprocessing.reduction import ForkingPickler

    from ..arrays import Array
    from .array_channel import ArrayChannel

    ForkingPickler.register(Array, _reduce)
    ForkingPickler.register(ArrayChannel, _reduce_channel)
    # Before anything is pickled: a feeder thread pickles while a process ends, when nothing can be registered any more.
    # A forked child forgets what was registered, and runs this again.
    util.register_after_fork(_at_end, _register_end)
    _register_end(_at_end)


def _at_end() -> None:
    pickling = sys.modules.get("vram.handover.pickling")
    if pickling is not None and hasattr(pickling, "end_of_process"):  # it is not while that is being imported
        pickling.end_of_process()


def _register_end(at_end: Callable[[], None]) -> None:
    from multiprocessing.util import Finalize

    # multiprocessing's own way: its children run no atexit. After the feeder threads, which are joined at -5.
    Finalize(None, at_end, exitpriority=-100)


class _Finder:
    """Asked first whenever a module is looked for. Finds one: as others do, to be taught once it is loaded."""

    def __init__(self) -> None:
        self._asking: set[int] = set()  # the threads that ask the other finders

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find the module that is waited for as the other finders do; no other."""
        thread = threading.get_ident()
        if name != _REDUCTION or thread in self._asking:  # a finder that is asked may ask all others in its turn
            return None
        self._asking.add(thread)
        try:
            for finder in tuple(sys.meta_path):
                find = getattr(finder, "find_spec", None)  # one of before Python 3.4 has none, and is passed over
                spec: ModuleSpec | None = None if finder is self or find is None else find(name, path, target)
                if spec is None:
                    continue
                _teach_after(spec.loader)
                return spec
        finally:
            self._asking.discard(thread)
        return None


def _teach_after(loader: Any) -> None:
    """Have a loader teach the module that it loads next, and be as it was."""
    load = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        loader.exec_module = load
        load(module)
        _teach()

    loader.exec_module = exec_module


def _take_back(_: Array, written: tuple[Callable[..., Array], tuple[Any, ...]]) -> None:
    """The pickling failed: nobody will unpickle what it wrote."""
    if written[0] is _rebuild:
        from .pickling import endpoint

        endpoint().take_back(*written[1])


@shielded(undo=_take_back)
def _reduce(array: Array) -> tuple[Callable[..., Array], tuple[Any, ...]]:
    from . import pickling  # a listening socket, a thread and random names: only what is pickled needs them

    try:
        # An attached array is attached again by its receiver: then the keeper knows every holder. An array that was
        # borrowed by handle cannot be attached by a third process, and is refused below.
        if array.provenance is not None and array.region.is_imported:
            from ..memory.foreign import ForeignRegion

            by_name = None if isinstance(array.region, ForeignRegion) else array.provenance.reduce(array)
            if by_name is not None:
                return by_name
        return _rebuild, (pickling._current or pickling.endpoint()).reduce(array)
    except VramError as error:
        if not _is_unheard():
            raise
        error.args = (f"process {os.getpid()}, which was to send this array, could not: {error}",)
        return type(array).lost, (array.dtype, array.shape, error)


def _is_unheard() -> bool:
    """Whether an error in pickling would only be printed, and the value dropped, as the thread that feeds a plain queue
    does, in CPython 3.11 to 3.14."""
    queues: Any = sys.modules.get("multiprocessing.queues")
    thread: Any = threading.current_thread()
    feeds = queues is not None and getattr(thread, "_target", None) is queues.Queue._feed
    return feeds and queues.Queue._on_queue_feeder_error in thread._args


@shielded
def _rebuild(*reference: Any) -> Array:
    """Return the array, or an array that raises the reason at its first use: an error here would end a thread or a
    worker of multiprocessing, and the caller would wait for the result for ever."""
    from ..arrays import Array
    from . import pickling

    try:
        return (pickling._current or pickling.endpoint()).read(*reference)
    except Exception as error:  # noqa: BLE001
        _, _, dtype, shape = reference[2]
        return Array.lost(dtype, shape, error)


@shielded
def _reduce_channel(channel: ArrayChannel) -> tuple[Callable[..., ArrayChannel], tuple[Any, ...]]:
    from multiprocessing.reduction import DupFd

    return _rebuild_channel, (DupFd(channel.give_away()),)


@shielded
def _rebuild_channel(descriptor: Any) -> ArrayChannel:
    from ..errors import ProtocolError
    from ..open_files import close_fds
    from .array_channel import ArrayChannel

    try:
        fd = descriptor.detach()
    except (OSError, EOFError):  # the sender ended first: a channel whose other end is gone says so when it is used
        ours, theirs = ArrayChannel.pair()
        theirs.close()
        return ours
    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        close_fds([fd])
        raise ProtocolError(f"a channel was pickled, and what came is no socket: {error.strerror}") from None
    try:
        return ArrayChannel(sock)
    except BaseException:
        sock.close()
        raise
