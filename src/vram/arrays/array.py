"""Array: a shape and an element type on a region's memory."""

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..driver.protocol import Driver
from ..errors import BusyError, CapacityError, ClosedError, RangeError, UsageError
from ..lifetime import shielded, unwinding
from ..memory import Pin, Region
from ..spec import Location
from . import streams
from .dtypes import as_dtype
from .protocols import Viewable
from .shapes import as_length, as_shape, capacity_rows, nbytes_of, part_of
from .views import NDArray, RegionViews

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    import numpy as np


class Reducer(Protocol):
    """Where an array can be had again. Set by :mod:`vram.entries` on what was published or attached."""

    def reduce(self, array: Array, /) -> tuple[Any, ...] | None:
        """Return what pickle should store, or None if the array is not what was published any more."""


class Array(Viewable):
    """A C-contiguous array on the memory of a region: elements of one type, at an address that never changes.

    Made by :func:`vram.empty` and its like, by attaching, or by slicing. It computes nothing itself: :meth:`numpy`
    and :meth:`torch` show it to those who do, without a copy. Such a view keeps the memory on its own, and so does
    every slice of it; :meth:`close` under live views takes effect with the last of them (invariant I6).

    Several threads may use one array; changes of its size wait for one another. :func:`copy.copy` and
    :func:`copy.deepcopy` return an array on memory of its own, at the same place.

    Parameters
    ----------
    region : Region
        The memory. An array holds it without owning it, unless `owns_growth`.
    dtype : str, numpy.dtype, type or torch.dtype
        The type of the elements.
    shape : int or sequence of int
        The lengths of the dimensions.
    offset : int
        Where in the region it begins, in bytes.
    owns_growth : bool
        The region belongs to this array: :meth:`resize` changes the region's size, and closing the last array on the
        region closes the region.
    capacity : int, optional
        Rows up to which it may be resized, or be shown with ``full=True``; by default what the region has room for
        if `owns_growth`, else no more than there are.
    provenance : object, optional
        Where it can be had again, for pickling.
    keeps : object, optional
        Anything else that has to live as long as this array, its slices and views, such as the owner of memory that is
        not ours.

    Raises
    ------
    RangeError
        If it does not lie within the region.
    """

    __slots__ = (
        "__weakref__",
        "_capacity",
        "_dtype",
        "_lost",
        "_offset",
        "_pin",
        "_row_nbytes",
        "_shape",
        "_size_lock",
        "_views",
        "provenance",
    )

    _views: RegionViews | None
    _lost: Exception | None

    def __init__(
        self,
        region: Region,
        dtype: object,
        shape: int | Sequence[int],
        *,
        offset: int = 0,
        owns_growth: bool = False,
        capacity: int | None = None,
        provenance: Reducer | None = None,
        keeps: object = None,
    ) -> None:
        self._views = None  # so that an array whose construction failed owns nothing
        self._shown = self._stream = self._lost = None
        if not isinstance(region, Region):
            raise UsageError(f"an array lies on a vram.memory.Region, not on {region!r:.80}")
        if not isinstance(owns_growth, bool):
            raise UsageError(f"owns_growth must be True or False, not {owns_growth!r:.40}")
        kind = as_dtype(dtype)
        lengths = as_shape(shape)
        if owns_growth and not lengths:
            raise UsageError("an array without dimensions has no rows to grow by")
        self._dtype = kind
        self._shape = lengths
        self._offset = operator.index(offset)
        self._row_nbytes = nbytes_of(lengths[1:], kind)
        nbytes = self._row_nbytes * lengths[0] if lengths else self._row_nbytes
        if not self._row_nbytes:
            nbytes_of(lengths, kind)  # whose rows are empty: nothing above says that there are too many
        self._size_lock = threading.RLock() if owns_growth else None  # never taken by a finalizer
        self.provenance = provenance
        # The array that owns the region pins nothing: it must be able to shrink below itself.
        self._pin = None if owns_growth else region.pin(self._offset, self._offset + nbytes, "array", keeps=keeps)
        if owns_growth and not 0 <= self._offset <= self._offset + nbytes <= region.nbytes:
            raise RangeError(f"{nbytes} bytes at offset {offset} are not within the {region.nbytes} of the region")
        rows = lengths[0] if lengths else 1
        if capacity is None and owns_growth and self._row_nbytes:
            capacity = (region.capacity - self._offset) // self._row_nbytes
        if type(capacity) is not int:
            capacity = rows if capacity is None else as_length(capacity, "the capacity")
        self._capacity = capacity
        if not rows <= self._capacity or self._offset + self._capacity * self._row_nbytes > region.capacity:
            raise CapacityError(
                f"capacity of {capacity} rows: at least {rows} are there, and the region has room for "
                f"{region.capacity - self._offset} bytes of {self._row_nbytes} a row"
            )
        views = RegionViews.of(region)
        views.arrays.add(id(self))
        if owns_growth:
            views.is_grown = views.is_owned = True
        self._views = views

    @classmethod
    def create(
        cls,
        driver: Driver,
        location: Location | str,
        shape: int | Sequence[int],
        dtype: object,
        *,
        capacity: int | Sequence[int] | None = None,
        chunk: int | str | None = None,
        populate: bool = False,
        backing: Literal["zero"] | None = None,
    ) -> Self:
        """Make an array of zeros on memory of its own.

        Parameters
        ----------
        driver : Driver
            The driver that serves `location`.
        shape : int or sequence of int
            The lengths of the dimensions.
        dtype : str, numpy.dtype, type or torch.dtype
            The type of the elements.
        capacity : int or sequence of int, optional
            How many rows it may grow to: a number, or a shape whose other dimensions are those of `shape`. Costs
            addresses only. By default it cannot grow.
        chunk : int or str, optional
            Bytes by which memory is taken and given back; see :meth:`vram.memory.Region.create`.
        populate : bool
            Touch the pages at once rather than at first use.
        backing : "zero", optional
            The value of rows without memory; see :func:`vram.empty`.

        Raises
        ------
        UsageError
            For a dtype, shape or capacity that cannot be.
        OutOfMemoryError, AddressSpaceError
            If there is not enough of either.
        """
        kind = as_dtype(dtype)
        lengths = as_shape(shape)
        rows = (lengths[0] if lengths else 1) if capacity is None else capacity_rows(capacity, lengths)
        nbytes = nbytes_of(lengths, kind)
        region = Region.create(
            location,
            driver=driver,
            capacity=max(nbytes if capacity is None else nbytes_of((rows, *lengths[1:]), kind), 1),
            nbytes=nbytes,
            chunk=chunk,
            populate=populate,
            backing=backing,
            managed=True,
        )
        try:
            array = cls(region, kind, lengths, owns_growth=bool(lengths), capacity=rows)
        except BaseException as error:
            with unwinding(error):
                region.close()
            raise
        if array._views is not None:
            array._views.is_owned = True  # one without dimensions owns no growth, but the region as well
        return array

    @classmethod
    def lost(cls, dtype: object, shape: int | Sequence[int], error: Exception) -> Self:
        """Return an array without memory, whose every use raises `error`: for one that could not be unpickled."""
        array = cls.__new__(cls)
        array._views = array._shown = array._stream = array._pin = array._size_lock = array.provenance = None
        error.__cause__ = error.__context__ = None  # their frames hold what their callers had
        array._lost = error.with_traceback(None)
        try:
            array._dtype, array._shape, array._offset = as_dtype(dtype), as_shape(shape), 0
        except UsageError:  # neither is known here
            array._dtype, array._shape, array._offset = as_dtype("uint8"), (), 0
        array._row_nbytes = nbytes_of(array._shape[1:], array._dtype)
        array._capacity = array._shape[0] if array._shape else 1
        return array

    # -- what it is ---------------------------------------------------------------------------------------------
    @property
    def capacity(self) -> tuple[int, ...]:
        """The shape that it may grow to without moving."""
        return (self._capacity, *self._shape[1:]) if self._shape else ()

    @property
    def region(self) -> Region:
        """The region it lies on. Raises ClosedError once this array was closed."""
        return (self._views or self._open_views()).region

    @property
    def offset(self) -> int:
        """Where in the region it begins, in bytes."""
        return self._offset

    @property
    def address(self) -> int:
        """Where in this process it begins; the same for as long as anything looks at it (invariant I5)."""
        return self._open_views().region.address + self._offset

    @property
    def pin(self) -> Pin | None:
        """The pin that keeps the memory; None if the region belongs to this array."""
        return self._pin

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._views is None and self._lost is None

    def __len__(self) -> int:
        if not self._shape:
            raise UsageError("an array without dimensions has no length")
        return self._shape[0]

    def __repr__(self) -> str:
        from .summary import as_text  # few arrays are printed

        return as_text(self, self._views, self._lost)

    def _repr_html_(self) -> str:
        from .summary import as_html

        return as_html(self, self._views, self._lost, self.capacity)

    # -- its size -----------------------------------------------------------------------------------------------
    def resize(self, rows: int, *, after: object = None) -> None:
        """Set the length of the first dimension, in place: the address stays, and nothing is copied.

        Views taken before keep their shape; take a new one to see more. Rows that come into being are zero, except
        those that an earlier shrinking left in memory that was kept: unless it was published since, they come back.

        Parameters
        ----------
        rows : int
            The new length.
        after : optional
            Only to shrink an array on a GPU, or to grow one with ``backing="zero"``: an event, as a number or an object
            of torch or CuPy. The work that used what goes, zeros included, is done when it is. By default all work on
            the devices that may use the memory is waited for.

        Raises
        ------
        CapacityError
            Past the capacity, which was fixed at creation.
        BusyError
            When shrinking while a view or a slice shows what would go; nothing has changed then (invariant I6).
        UsageError
            If the region does not belong to this array, as with slices and what was attached.
        OutOfMemoryError
            If there is not enough; nothing has changed then.
        """
        resize_rows({self: rows}, after)

    # -- views, which protocols.py gives out ---------------------------------------------------------------------
    def _view(
        self,
        holder: str,
        dtype: np.dtype[Any],
        full: bool = False,
        *,
        show: Callable[[RegionViews, Pin, int, tuple[int, ...], np.dtype[Any]], NDArray] = RegionViews.view,
    ) -> NDArray:
        """Return a root view with a pin of its own. `dtype` has its item size; `show` is how RegionViews makes it."""
        views, pin, shape, start = self._views or self._open_views(), self._pin, self._shape, self._offset
        if full and shape:
            shape = (self._capacity, *shape[1:])
            kept = views.region.pin(start, start + self._capacity * self._row_nbytes, holder, full=True)
        else:
            stop = start + (shape[0] if shape else 1) * self._row_nbytes
            if pin is not None:
                kept = pin.subpin(start, stop, holder)
            else:
                try:
                    kept = views.region.pin(start, stop, holder)
                except RangeError:
                    if self._shape is shape:
                        raise
                    return self._view(holder, dtype, show=show)  # another thread shrank it meanwhile
        return show(views, kept, start, shape, dtype)

    # -- parts --------------------------------------------------------------------------------------------------
    def __getitem__(self, key: int | slice) -> Array:
        """Return a row, or a run of rows, as an array over the same memory."""
        row, shape = part_of(key, self._shape)
        return self._part(self._offset + row * self._row_nbytes, shape)

    def _part(self, offset: int, shape: tuple[int, ...]) -> Array:
        views, pin = self._open_views(), self._pin
        stop = offset + nbytes_of(shape, self._dtype)
        array = Array.__new__(Array)
        array._views = array._shown = array._lost = None
        array._stream = self._stream
        array._dtype, array._shape, array._offset = self._dtype, shape, offset
        array._row_nbytes = nbytes_of(shape[1:], self._dtype)
        array._capacity = shape[0] if shape else 1
        array._size_lock, array.provenance = None, self.provenance
        # From this array's own pin, which works after the region object was closed, too.
        array._pin = views.region.pin(offset, stop, "slice") if pin is None else pin.subpin(offset, stop, "slice")
        views.arrays.add(id(array))
        array._views = views
        return array

    def __iter__(self) -> Iterator[Array]:
        return (self[row] for row in range(len(self)))

    # -- the end ------------------------------------------------------------------------------------------------
    @shielded
    def close(self, *, strict: bool = False) -> None:
        """Give the memory up. Live views keep it until the last of them is gone. Idempotent.

        Parameters
        ----------
        strict : bool
            Refuse, and change nothing, while anything else looks at this memory.

        Raises
        ------
        BusyError
            Only if `strict`, naming the views.
        """
        views, pin, self._lost = self._views, self._pin, None
        if views is None:
            return
        if strict:
            if pin is None:
                views.region.close(strict=True)
            else:
                others = pin.others()
                if others:
                    raise BusyError(f"{self!r} is still in use", others)
        self._views = None
        if pin is not None:
            pin.release()
        views.leave(id(self))

    def _open_views(self) -> RegionViews:
        views = self._views
        if views is None:
            if self._lost is not None:
                raise copy.copy(self._lost)  # whoever catches it may add to it
            raise ClosedError(f"the array of {self._dtype} {self._shape} was closed")
        return views

    def __enter__(self) -> Self:
        self._open_views()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            with unwinding(error):
                self.close()

    if not TYPE_CHECKING:  # to which any name would be one

        def __getattr__(self, name: str) -> Any:
            # Asked for what there is not, by libraries that look what this is, too: those names begin with underscores.
            import numpy

            words = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_") and hasattr(numpy.ndarray, name):
                words += ": it is memory alone; array.numpy(), .torch() or .cupy() is the same memory, to compute with"
            raise AttributeError(words)

    def __del__(self) -> None:
        # The pin and the region let go on their own; an id, though, may be given to another object.
        views = getattr(self, "_views", None)  # not if it was not made whole
        if views is not None:
            views.arrays.discard(id(self))

    def __copy__(self) -> Array:
        """Return an array on memory of its own with the same elements, as :func:`copy.copy` does of a numpy array."""
        region, nbytes = self._open_views().region, self.nbytes
        capacity = self._capacity if self._pin is None else None
        made = Array.create(region.driver, region.location, self._shape, self._dtype, capacity=capacity)
        try:
            kept = region.pin(self._offset, self._offset + nbytes, "copy")
            try:
                if nbytes:
                    region.synchronize()
                    region.driver.copy(made.address, region.address + self._offset, nbytes)
            finally:
                kept.release()
        except BaseException as error:
            with unwinding(error):
                made.close()
            raise
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Array:
        return self.__copy__()

    def __reduce__(self) -> tuple[Any, ...]:
        made = self.provenance.reduce(self) if self.provenance is not None else None
        if made is None and self.region.is_private:
            raise UsageError(
                'this array is a private copy (access="cow") that was written to, in no memory that others could map. '
                ".copy() gives a numpy array that pickles with its contents"
            )
        if made is None:
            raise UsageError(
                "plain pickle cannot carry shared memory: publish the array and attach it by name, or send it "
                "through a multiprocessing Queue, Pipe or Pool or a vram.ArrayChannel, which pass it without a copy. "
                ".copy() gives a numpy array that pickles with its contents"
            )
        return made


@shielded
def resize_rows(rows: Mapping[Array, object], after: object = None) -> None:
    """Set the lengths of arrays, all or none: :meth:`Array.resize` and :func:`vram.resize`, which say the rest."""
    from ..memory import resize  # which whoever only attaches does without

    plans: dict[Region, tuple[Array, int]] = {}
    for array, wanted in rows.items():
        region = array._open_views().region
        if array._size_lock is None:
            what = "no dimension to resize" if not array._shape else "memory of others: resize the array that made it"
            raise UsageError(f"{array!r} has {what}, or copy it into one of your own (vram.asarray)")
        count = as_length(wanted, "rows")
        if count > array._capacity:
            raise CapacityError(
                f"cannot resize to {count} rows: the capacity is {array._capacity}, fixed at creation, of {array!r}. "
                f"Make an array with more and copy, or ask for more from the start: it costs addresses only"
            )
        region.handle  # noqa: B018  (before the lock: in a forked child nobody would ever release it)
        if plans.setdefault(region, (array, count))[0] is not array:
            raise UsageError(f"{array!r} lies on the memory of another array of this call: resize one of the two")
    event = None if after is None else streams.as_event(after)
    locks: list[Any] = [plans[region][0]._size_lock for region in sorted(plans, key=operator.attrgetter("address"))]
    resize.under(locks, _resize_rows, resize.resize_regions, plans, event)


def _resize_rows(
    resize_regions: Callable[..., None], plans: Mapping[Region, tuple[Array, int]], event: int | None
) -> None:
    changes = [(array, array._shape, (count, *array._shape[1:])) for array, count in plans.values()]
    sizes = {region: array._offset + count * array._row_nbytes for region, (array, count) in plans.items()}
    done: list[bool] = []

    def show() -> None:
        done.append(True)
        for array, _, shape in changes:
            array._shape = shape

    try:
        for array, before, shape in changes:
            # Smaller shapes first, so that no other thread takes a view of rows that go.
            array._shape = min(before, shape)
        resize_regions(sizes, after=event, then=show)
    except BaseException:
        if not done:  # what failed after that has come about all the same
            for array, before, _ in changes:
                array._shape = (before[0], *before[1:])  # another object, which tells _view to look again
        raise
