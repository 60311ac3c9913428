"""The module that Ray imports in each process that uses the transport: see :mod:`.ray`.

A result's arrays become one entry of the node's keeper, under a random name of this user's; Ray transfers that name.
Ray takes values of one type, :class:`vram.Array`, out of a result: numpy arrays and torch tensors are taken out by
reducers that this module gives to Ray's pickler, and that act only in a method with a tensor transport.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray import cloudpickle
from ray._private.serialization import SerializationContext
from ray.experimental.rdt.tensor_transport_manager import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
)

import vram

from ..errors import AccessDeniedError, NotFoundError, PeerGoneError, UnsupportedError, UsageError, VramError
from ..lifetime import shielded
from ..spec import HOST
from .ray_sources import SOURCE, TRANSPORT, Process, prefix

_AGAIN, _TIMES = 5.0, 12  # seconds after which a source that was asked to free an object is looked at again; how often
_KEPT = 1 << 30  # bytes of copies that were freed, for the next ones
_KINDS = ("array", "numpy", "torch")
_TAKEN = frozenset("biufcmM")  # kinds of numpy's elements that are memory alone, and not of a user's own layout


# -- out of a result, and back into it ---------------------------------------------------------------------------------
def can_collect() -> bool:
    """Whether this Ray collects tensors of a result as the one that this was written for."""
    return hasattr(SerializationContext, "serialize_rdt_objects") and hasattr(ray._private.worker, "global_worker")


def _context() -> Any:
    """Return Ray's notes on the value that this thread is pickling."""
    return ray._private.worker.global_worker.get_serialization_context()._thread_local


def _collected() -> list[Any] | None:
    """Return the list to put tensors into; None where Ray pickles a value as a whole."""
    if not ray.is_initialized():
        return None
    context = _context()
    return context.rdt_tensors if getattr(context, "use_external_transport", False) else None


def _received(index: int) -> Any:
    return _context().rdt_tensors[index]


def _reduce_numpy(array: np.ndarray[Any, Any]) -> Any:
    collected = _collected() if array.dtype.kind in _TAKEN else None
    if collected is None:
        return array.__reduce_ex__(5)
    collected.append(array)
    return _received, (len(collected) - 1,)


def _reduce_torch(before: Callable[[Any], Any] | None, tensor: Any) -> Any:
    collected = _collected()
    if collected is None:
        return tensor.__reduce_ex__(5) if before is None else before(tensor)
    collected.append(tensor)
    return _received, (len(collected) - 1,)


def _take_numpy_and_torch() -> None:
    table = cloudpickle.CloudPickler.dispatch
    if table.get(np.ndarray) is not _reduce_numpy:
        table[np.ndarray] = _reduce_numpy
    try:
        import torch  # Ray does the same before it looks a transport up
    except ImportError:
        return
    before = table.get(torch.Tensor)

    def reduce_torch(tensor: Any) -> Any:
        return _reduce_torch(before, tensor)

    table[torch.Tensor] = reduce_torch


# -- what is known of an object ----------------------------------------------------------------------------------------
@dataclass
class VramMetadata(TensorTransportMetadata):  # type: ignore[misc]
    """The news of an object for its receiver; `name` is its entry, empty for a result without arrays. `source` is the
    text of a :class:`~.ray_sources.Process`; `origin` is where the node's carrier listens, empty if there is none."""

    name: str = ""
    version: int = 0
    kinds: tuple[str, ...] = field(default=())
    node: str = ""
    source: str = ""
    keeper: str = ""
    origin: str = ""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _left.watch(self)


class _Left:
    """Removes objects whose source has ended, in a driver that owns them: Ray asks only the source, which is gone. A
    driver drops metadata with the last reference; an actor does not, so that nothing is removed there."""

    def __init__(self) -> None:
        self._is_on = False
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()  # had by the thread that unpickles, and by ours: by no finalizer
        self._dropped: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()  # reentrant: finalizers put
        self._thread = threading.Thread(target=self._remove, name="vram ray left", daemon=True)

    def begin(self) -> None:
        """Do so in this process, if it is a driver. May be called again."""
        with self._lock:
            if not self._is_on:
                self._is_on = True
                self._thread.start()

    def end(self) -> None:
        """Stop doing so, for good."""
        self._dropped.put(None)
        self._thread.join()

    def watch(self, metadata: VramMetadata) -> None:
        """Remove this object when Ray has dropped all that it was told of it."""
        if not self._is_on or not metadata.name or ray._private.worker.global_worker.mode != ray.SCRIPT_MODE:
            return
        with self._lock:
            self._counts[metadata.name] = self._counts.get(metadata.name, 0) + 1
        weakref.finalize(metadata, self._dropped.put, (metadata.name, metadata.source)).atexit = False

    def _remove(self) -> None:
        # Sources that lived when Ray asked them, and may have died before they could do it.
        asked: deque[tuple[float, int, str, Process]] = deque()
        while True:
            with contextlib.suppress(queue.Empty):
                dropped = self._dropped.get(timeout=_AGAIN if asked else None)
                if dropped is None:
                    return
                name, said = dropped
                with self._lock:
                    left = self._counts.pop(name, 1) - 1
                    if left:
                        self._counts[name] = left
                source = Process.parse(said)
                if not left and source is not None and not self._gone(name, source):
                    asked.append((time.monotonic() + _AGAIN, _TIMES, name, source))
            while asked and asked[0][0] <= time.monotonic():
                _, times, name, source = asked.popleft()
                if not self._gone(name, source) and times > 1:
                    asked.append((time.monotonic() + _AGAIN, times - 1, name, source))

    def _gone(self, name: str, source: Process) -> bool:
        """Remove an object if its source has ended, and say whether it has."""
        ended = source.has_ended
        if ended:
            with contextlib.suppress(VramError):
                vram.remove(name)
        return ended


_left = _Left()
collect_left = _left.begin


# -- copies of numpy arrays --------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class _Freed:
    """A copy whose entry was removed, and a lease of our own on that, as long as `held` is kept.
    The lease tells a keeper without readers from a keeper that has lost all that it had."""

    name: str
    held: Mapping[str, vram.Array]
    packed: dict[str, vram.Array]

    def is_read(self) -> bool:
        """Whether somebody else may have it: each process that it was passed on to has a lease of its own."""
        try:
            return vram.entry(self.name).leases != 1
        except NotFoundError:
            return True


class _Copies:
    """Memory of copies, for the next result with the same arrays: new pages cost several times what copying costs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._freed: deque[_Freed] = deque()

    def copy(self, arrays: dict[str, np.ndarray[Any, Any]]) -> dict[str, vram.Array]:
        """Copy arrays into memory that nobody reads any more, or else into new memory."""
        if not arrays:
            return {}
        packed = self._unread(_layout(arrays))
        if packed is None:
            return vram.pack(arrays, device="host")
        for key, array in arrays.items():
            packed[key].numpy()[...] = array
        return packed

    def free(self, name: str, version: int, packed: dict[str, vram.Array]) -> None:
        """Remove an entry, and keep its memory; the oldest goes where that is more than is kept."""
        held = vram.attach(name, version=version).keep_all()
        vram.remove(name)
        with self._lock:
            self._freed.append(_Freed(name, held, packed))
            while sum(array.nbytes for freed in self._freed for array in freed.packed.values()) > _KEPT:
                self._freed.popleft()

    def _unread(self, layout: list[Any]) -> dict[str, vram.Array] | None:
        with self._lock:
            for freed in self._freed:
                if _layout(freed.packed) == layout and not freed.is_read():
                    self._freed.remove(freed)
                    return freed.packed
        return None


def _layout(arrays: Mapping[str, vram.Array | np.ndarray[Any, Any]]) -> list[Any]:
    return [(key, array.shape, array.dtype) for key, array in arrays.items()]


def _is_copied(array: Any) -> bool:
    """Whether it is a numpy array on memory of numpy's own, and no view of memory that may be shared as it is."""
    while isinstance(array, np.ndarray) and array.base is not None:
        array = array.base
    return isinstance(array, np.ndarray)


# -- the transport -----------------------------------------------------------------------------------------------------
class VramTransport(TensorTransportManager):  # type: ignore[misc]
    """``tensor_transport="VRAM"``: objects as entries of the node's keeper. A receiver attaches by itself."""

    def __init__(self) -> None:
        self._published: dict[str, VramMetadata] = {}  # by Ray's id of the object: a task may be tried again
        self._packed: dict[str, dict[str, vram.Array]] = {}  # what was copied for it
        self._copies = _Copies()

    def tensor_transport_backend(self) -> str:
        """Return the name."""
        return TRANSPORT

    @staticmethod
    def is_one_sided() -> bool:
        """Return True: the source does nothing for a receiver."""
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        """Return True: what a receiver does ends by itself, so that no actor has to be killed for it."""
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """Return True; whether a keeper is there an actor finds out with its first result."""
        return True

    @shielded
    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> VramMetadata:
        """Publish the arrays of an object, and return what a receiver needs to attach them.
        Raises as :func:`vram.publish` does: no keeper, a quota, memory that cannot be shared."""
        made = self._published.get(obj_id)
        if made is None:
            made = self._publish(obj_id, rdt_object) if rdt_object else VramMetadata([])
            self._published[obj_id] = made
        return made

    def _publish(self, obj_id: str, arrays: list[Any]) -> VramMetadata:
        source = str(Process.this())
        name = f"{prefix()}{obj_id}/{secrets.token_hex(16)}"
        kinds, shapes, devices = zip(*map(_describe, arrays), strict=True)
        given = {str(number): _as_memory(one) for number, one in enumerate(arrays)}
        packed = self._copies.copy({key: one for key, one in given.items() if _is_copied(one)})
        # Not sealed, unless all of it is already: the source may go on to write to what it has handed over, as with
        # Ray's other direct transports (ray.experimental.wait_tensor_freed tells when nobody sees it). Sealing takes
        # the pages of its mapping away, which costs more than all the rest of a hand-over.
        published = vram.publish(
            name,
            given | packed,
            meta={SOURCE: source},
            writable=not all(isinstance(one, vram.Array) and one.region.is_frozen for one in arrays),
        )
        self._packed[obj_id] = packed
        return VramMetadata(
            list(shapes),
            "cuda" if "cuda" in devices else "cpu",
            name,
            published.version,
            kinds,
            ray.get_runtime_context().get_node_id(),
            source,
            os.environ.get("VRAM_KEEPER", "the user's own"),
            os.environ.get("VRAM_CARRIER", ""),
        )

    def get_communicator_metadata(
        self, src_actor: Any, dst_actor: Any, backend: str | None = None
    ) -> CommunicatorMetadata:
        """Return nothing: a receiver needs none."""
        return CommunicatorMetadata()

    @shielded
    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: VramMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> list[Any]:
        """Attach an object; the arrays keep its memory. Raises NotFoundError if Ray has freed it, AccessDeniedError for
        another user's entry, UnsupportedError for given buffers, and PeerGoneError without a keeper or a carrier."""
        metadata = tensor_transport_metadata
        if target_buffers:
            raise UnsupportedError(
                "a target for an object", "a transport that copies", f"{TRANSPORT}, which maps it", "copy what you get"
            )
        if not metadata.kinds:
            return []
        if not metadata.name.startswith(prefix()) or set(metadata.kinds) - set(_KINDS):
            raise AccessDeniedError(
                f"object {obj_id:.80} is said to be entry {metadata.name!r:.200}: this process takes its user's own, "
                f"under {prefix()!r}"
            )
        arrays = self._attach(obj_id, metadata).keep_all()
        return [_as_kind(arrays[str(number)], kind) for number, kind in enumerate(metadata.kinds)]

    def _attach(self, obj_id: str, metadata: VramMetadata) -> vram.Lease:
        try:
            return vram.attach(metadata.name, version=metadata.version, owner=os.geteuid())
        except NotFoundError as error:
            if metadata.node != ray.get_runtime_context().get_node_id():
                return self._replicate(obj_id, metadata, error)
            error.add_note(f"Ray has freed object {obj_id:.80}, or its actor asks another keeper: {metadata.keeper}")
            raise

    def _replicate(self, obj_id: str, metadata: VramMetadata, error: NotFoundError) -> vram.Lease:
        """Pull an object from the carrier of its node. It is kept here for as long as somebody uses it."""
        if not metadata.origin:
            raise UnsupportedError(
                f"object {obj_id:.80} of another node",
                "a carrier on that node (vram carry), with its address in $VRAM_CARRIER of the actors there",
                "no address: the object is with that node's keeper alone",
                "start one, place the actors on one node, or pass the object by another transport",
            ) from error
        lease = self._pull(metadata)
        if lease.owner != os.geteuid() or lease.meta.get(SOURCE) != metadata.source:
            lease.close()
            raise AccessDeniedError(f"object {obj_id:.80} is another than the one that {metadata.origin} was asked for")
        # Ray frees an object where it was made, and tells no receiver: a replica lasts as long as its leases.
        with contextlib.suppress(NotFoundError):
            vram.remove(metadata.name, version=lease.version)
        return lease

    def _pull(self, metadata: VramMetadata) -> vram.Lease:
        for last in (False, False, True):
            try:
                return vram.replicate(metadata.origin, metadata.name, if_missing=True)
            except NotFoundError:  # another process of this node had pulled it, too, and has just removed its name
                if last:
                    raise
        raise AssertionError("the last one returns or raises")

    def send_multiple_tensors(
        self,
        tensors: list[Any],
        tensor_transport_metadata: VramMetadata,
        communicator_metadata: CommunicatorMetadata,
    ) -> None:
        """Refuse, with UsageError: Ray calls this of two-sided transports alone."""
        raise UsageError(f"{TRANSPORT} is one sided: a receiver attaches by itself")

    @shielded
    def garbage_collect(self, obj_id: str, tensor_transport_meta: VramMetadata, tensors: list[Any]) -> None:
        """Remove an object's entry; who has received it keeps it."""
        made, packed = self._published.pop(obj_id, tensor_transport_meta), self._packed.pop(obj_id, {})
        if made is not None and made.name:
            with contextlib.suppress(NotFoundError, PeerGoneError):  # removed by hand, or gone with its keeper
                if packed:
                    self._copies.free(made.name, made.version, packed)
                else:
                    vram.remove(made.name)

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        """Do nothing: an attach ends by itself, within its time."""


def _describe(array: Any) -> tuple[str, tuple[tuple[int, ...], Any], str]:
    """Return the kind, the shape and element type, and the place of an array of a result."""
    if isinstance(array, vram.Array):
        return "array", (tuple(array.shape), np.dtype(array.dtype)), "cpu" if array.region.location == HOST else "cuda"
    if isinstance(array, np.ndarray):
        return "numpy", (array.shape, array.dtype), "cpu"
    return "torch", (tuple(array.shape), array.dtype), array.device.type


def _as_memory(array: Any) -> Any:
    """Return what to publish of an array: of a tensor that has a history of computations, the memory alone."""
    return array if isinstance(array, vram.Array | np.ndarray) else array.detach()


def _as_kind(array: vram.Array, kind: str) -> Any:
    return array if kind == "array" else array.numpy() if kind == "numpy" else array.torch()


_take_numpy_and_torch()
