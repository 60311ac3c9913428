"""How an array's memory is shown: numpy views, each with a pin of its own (invariant I6).

A view's chain of bases ends at an :class:`Exporter`, which holds the pin; so a slice of a view, a tensor made of it,
or a memoryview keeps the memory exactly as long as it lives, whatever happens to the array it came from.

The arrays of one region share a :class:`RegionViews`: it knows the views that numpy was given, so
that freezing can take their writable flag away, and it is how memory that comes back to us as somebody else's array is
recognized (:func:`find`).
"""

from __future__ import annotations

import functools
import math
import os
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

from ..driver.protocol import HostMemory
from ..errors import UnsupportedError, UsageError
from ..memory import Pin, Region
from ..memory.foreign import ForeignRegion
from ..spec import Access
from .dtypes import is_plain
from .numpy_on_use import np

NDArray: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Spans: TypeAlias = Sequence[tuple[int, int]]  # from where to where, in bytes from the first of a region


class RegionViews:
    """A region as its arrays see it; :meth:`of` makes one for each region. `arrays` are the open arrays, by `id`.
    `is_grown`: one array's rows are all of the region. `is_owned`: the region closes with the last array."""

    __slots__ = (
        "__weakref__", "_shared", "_writable", "addressable", "arrays", "gpu", "is_grown", "is_owned", "numpy_views",
        "region",
    )  # fmt: skip

    def __init__(self, region: Region) -> None:
        self.region = region
        driver: Any = region.driver
        self.addressable = _is_addressable(driver)
        gpus = [place.id for place in region.users if place.kind == "cuda" and isinstance(place.id, int)]
        self.gpu = gpus[0] if gpus else None
        self.arrays: set[int] = set()
        self.is_grown = False
        self.is_owned = False
        self.numpy_views: set[_ViewRef] = set()
        self._writable: RegionViews | None = None  # of the copy-on-write mapping of read-only memory
        self._shared: weakref.ref[RegionViews] | None = None  # of such a mapping: whose it is

    @classmethod
    def of(cls, region: Region) -> RegionViews:
        """Return what the arrays of a region have in common."""
        homes, address = _all_views, region.address
        if isinstance(region, ForeignRegion):
            return homes.of_foreign(region)
        with homes.lock:
            ref = homes.by_address.get(address)
            views = None if ref is None else ref()
            if views is None or views.region is not region:
                views = cls(region)
                if ref is None:
                    homes.make_room()
                homes.by_address[address] = weakref.ref(views)
            return views

    def leave(self, array: int) -> None:
        """An array was closed; the last one out closes a region that belongs to the arrays."""
        self.arrays.discard(array)
        if self.is_owned and not self.arrays:
            self.region.close()

    def view(self, pin: Pin, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray:
        """Return a numpy view of the region's memory from `offset` (bytes) on. It takes the pin over.
        Raises UnsupportedError if the CPU cannot address this memory."""
        region = self.region
        if region.asleep is not None:
            raise region.sleeps()
        if not self.addressable:
            raise UnsupportedError(
                f"a numpy view of memory on {region.location}", "memory that the CPU can address",
                f"the {region.driver.name} driver's",
                "Use .to_host() for a copy, or (on a GPU) .torch(), DLPack or __cuda_array_interface__ for a view",
            )  # fmt: skip
        access = region.access
        if access is Access.NONE:
            self._check_readable()
        readonly = access is not Access.READ_WRITE
        view = _show(self, pin, region.address + offset, shape, dtype, readonly)
        if not readonly:
            self.numpy_views.add(_ViewRef(view, self.numpy_views.discard))
            if region.access is not Access.READ_WRITE:  # frozen meanwhile, by a thread that did not see this view
                view.flags.writeable = False
        return view

    def writable_view(self, pin: Pin, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray:
        """Return what :meth:`view` returns; of read-only memory a copy-on-write view, for consumers that know no such
        memory. Written pages are private. Arrays and views of the region keep its one such mapping."""
        region = self.region
        if region.access is not Access.READ or not self.addressable or not isinstance(region.driver, HostMemory):
            return self.view(pin, offset, shape, dtype)
        if region.asleep is not None:
            raise region.sleeps()
        writable = self._copy_on_write().region
        kept = writable.pin(offset, offset + math.prod(shape) * dtype.itemsize, "torch tensor", keeps=pin)
        return _show(self, kept, writable.address + offset, shape, dtype, False)

    def tolerant_view(self, pin: Pin, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray:
        """Return what :meth:`writable_view` returns, and say that it is read-only if the region is.
        It is for protocols whose consumers are told so and may not care: their writes then end nobody."""
        view = self.writable_view(pin, offset, shape, dtype)
        if self.region.access is not Access.READ_WRITE:
            view.flags.writeable = False
        return view

    def _copy_on_write(self) -> RegionViews:
        region = self.region
        with _all_views.lock:
            views = self._writable
            if views is None:
                given, _ = region.segments(0, region.nbytes)
                made = Region.from_allocations(
                    region.driver, given, nbytes=region.nbytes, capacity=region.capacity, access=Access.READ_WRITE,
                    private=True, location=region.location, managed=True,
                )  # fmt: skip
                views = self._writable = RegionViews.of(made)
                views._shared = weakref.ref(self)
            elif views.region.nbytes < region.nbytes:
                given, _ = region.segments(0, region.nbytes)
                views.region.extend(given[len(views.region.layout) :], region.nbytes)
        return views

    @property
    def private(self) -> RegionViews | None:
        """The views of the private mapping that :meth:`writable_view` shows, if there is one."""
        return self._writable

    def drop_writes(self) -> None:
        """Have the views of :meth:`writable_view` show the bytes of the region again."""
        views = self._writable
        if views is not None and views.region.mapped:
            region = views.region
            if is_written(region, 0, region.mapped):
                cast("HostMemory", region.driver).mem_drop_writes(region.address, region.mapped)

    def where_shared(self, offset: int, nbytes: int) -> Region | None:
        """Return the region that bytes of this one, a copy-on-write mapping, are still shared with; None if none is."""
        views = None if self._shared is None else self._shared()
        return None if views is None or is_written(self.region, offset, nbytes) else views.region

    def device_view(self, pin: Pin, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray:
        """Return what looks like a numpy view, over memory that the CPU may not touch. It takes the pin over.
        No user gets it: numpy makes a capsule of it, which says where the memory really is."""
        if self.region.asleep is not None:
            raise self.region.sleeps()
        self._check_readable()
        readonly = self.region.access is not Access.READ_WRITE
        return _show(self, pin, self.region.address + offset, shape, dtype, readonly)

    def _check_readable(self) -> None:
        if self.region.access is Access.NONE:
            raise UsageError("memory mapped without access cannot be looked at; map it with READ or READ_WRITE")

    def freeze_views(self) -> None:
        """Take the writable flag away from every view that was handed out: numpy refuses then, before the kernel's
        SIGSEGV. Arrays derived from a view (slices taken before) have flags of their own, which nobody can find."""
        for ref in self.numpy_views.copy():
            view = ref()
            if view is not None:
                view.flags.writeable = False


@functools.lru_cache(maxsize=16)  # the question takes microseconds, and there are few drivers
def _is_addressable(driver: Any) -> bool:
    return isinstance(driver, HostMemory)


class Exporter:
    """The end of a view's chain of bases: holds the pin, and says where the bytes are. It has no other protocol on
    purpose: numpy must find nothing that lets a user switch ``flags.writeable`` of read-only memory on again."""

    __slots__ = ("__array_interface__", "pin", "views")

    __array_interface__: dict[str, object]
    pin: Pin
    views: RegionViews


def _show(
    views: RegionViews, pin: Pin, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], readonly: bool
) -> NDArray:
    """Return a numpy array over an address, with an exporter as its base."""
    exporter, typestr = Exporter(), _typestr(dtype)
    exporter.views, exporter.pin = views, pin
    exporter.__array_interface__ = {
        "version": 3,
        "data": (address, readonly),
        "shape": shape,
        "typestr": typestr or f"|V{dtype.itemsize}",
    }
    view: NDArray = np.asarray(exporter)
    return view if typestr else view.view(dtype)


@functools.lru_cache(maxsize=256)
def _typestr(dtype: np.dtype[Any]) -> str | None:
    """Return the array interface's word for a type; it has none for bfloat16 and structures."""
    return dtype.str if is_plain(dtype) else None


def buffer(view: NDArray) -> memoryview:
    """Return a memoryview of a numpy array. Raises ValueError where the buffer protocol has no letter for its type."""
    return memoryview(cast("bytes", view))  # numpy's annotations know the buffer protocol from Python 3.12 on only


def bytes_of(view: NDArray) -> memoryview:
    """Return the bytes of a contiguous numpy array, flat."""
    return buffer(view.reshape(-1).view(np.uint8))


def part_of_view(view: NDArray, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray | None:
    """Return an array over a part of what a view shows, from `offset` (bytes) on; None where it shows no such part. It
    keeps the view and its pin. For memory that is read-only here: :meth:`RegionViews.freeze_views` does not find it."""
    try:
        return np.ndarray(shape, dtype, cast("bytes", view), offset)
    except (TypeError, ValueError):
        return None


def claimed_writable(view: NDArray) -> NDArray:
    """Return a root view again, by the same pin, that says it is writable: for consumers that know nothing else."""
    exporter: object = view.base
    if view.flags.writeable or not isinstance(exporter, Exporter):
        return view
    address = view.__array_interface__["data"][0]
    return _show(exporter.views, exporter.pin, address, view.shape, view.dtype, False)


class _ViewRef(weakref.ref[NDArray]):
    """A weak reference that can be a member of a set although arrays have no hash."""

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class _AllRegionViews:
    """The :class:`RegionViews` of all regions of this process that arrays look at, weakly, by address."""

    # Regions that are alive cannot overlap, and an entry that died is replaced by the next region at its address or
    # dropped when the table has doubled. Nothing here is reached from a finalizer.

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.by_address: dict[int, weakref.ref[RegionViews]] = {}
        self._foreign: dict[int, weakref.ref[RegionViews]] = {}
        self._sorted: list[int] | None = None
        self._limit = self._foreign_limit = 64

    def make_room(self) -> None:
        """Make room for a region at an address where none was before. Called with the lock."""
        if len(self.by_address) >= self._limit:
            self.by_address = {at: ref for at, ref in self.by_address.items() if ref() is not None}
            self._limit = 2 * len(self.by_address) + 64
        self._sorted = None

    def of_foreign(self, region: Region) -> RegionViews:
        # Its memory is not ours to find, and several regions may begin at one address: known by the object alone.
        with self.lock:
            ref = self._foreign.get(id(region))
            views = None if ref is None else ref()
            if views is None or views.region is not region:
                views = RegionViews(region)
                if len(self._foreign) >= self._foreign_limit:
                    self._foreign = dict(filter(lambda known: known[1]() is not None, self._foreign.items()))
                    self._foreign_limit = 2 * len(self._foreign) + 64
                self._foreign[id(region)] = weakref.ref(views)
            return views

    def find(self, address: int, nbytes: int) -> tuple[Region, int] | None:
        with self.lock:
            if self._sorted is None:
                self._sorted = sorted(self.by_address)
            at = bisect_right(self._sorted, address) - 1
            views = self._alive(self._sorted[at]) if at >= 0 else None
        if views is None or views.region.is_closed:
            return None
        offset = address - views.region.address
        if offset + nbytes > views.region.nbytes:
            return None
        return views.where_shared(offset, nbytes) or views.region, offset

    def regions(self) -> list[Region]:
        with self.lock:
            refs = [*self.by_address.values(), *self._foreign.values()]
        alive = [ref() for ref in refs]
        return [views.region for views in alive if views is not None and not views.region.is_closed]

    def _alive(self, address: int) -> RegionViews | None:
        ref = self.by_address.get(address)
        return None if ref is None else ref()


_all_views = _AllRegionViews()

# For memory that somebody gives out in parts, by the address of its region: a function that is told, by the addresses
# of regions, where in them the arrays are that are to be published, and returns by address why one cannot be published
# as it is. Empty, or not named, if nothing else is in it, and nothing else will be. It is asked once for all of them.
handed_out: dict[int, Callable[[Mapping[int, Spans]], Mapping[int, str]]] = {}


def _after_fork_in_child() -> None:
    """Start anew: the lock may have been held by a thread that does not exist here, and the regions are inert."""
    global _all_views
    _all_views = _AllRegionViews()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def is_written(region: Region, offset: int, nbytes: int) -> bool:
    """Whether a page of a private region, within these bytes, was written in this process."""
    return cast("HostMemory", region.driver).mem_is_written(region.address + offset, nbytes)


def find(address: int, nbytes: int) -> tuple[Region, int] | None:
    """Return the open region, and the offset in it in bytes, if memory is ours: an array, or a view of one, looks at
    it. The caller holds on to what `address` came from meanwhile."""
    return _all_views.find(address, nbytes)


def known_regions() -> list[Region]:
    """Return the open regions of this process that an array, or a view of one, looks at; those of others last."""
    return _all_views.regions()


def close_when_unused(region: Region) -> None:
    """Close a region now if no array is on it, else together with its last array."""
    views = RegionViews.of(region)
    views.is_owned = True
    if not views.arrays:
        region.close()
