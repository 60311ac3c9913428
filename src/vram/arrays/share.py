"""Share memory that is there already: look at it, and do what its kind allows, or say why nothing can be done."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .. import driver as drivers
from ..driver import visible
from ..errors import UsageError
from ..memory import Region
from ..memory.foreign import ForeignRegion, find_foreign, look_up, way_of
from ..spec import HOST, Access, Location, parse_size
from . import Array
from .create import asarray, empty
from .dtypes import as_dtype
from .gpu import CudaSource
from .numpy_on_use import np
from .route import COPY, ShareRoute, check_place, foreign_route, no_route, place_of, refusal, route_of
from .sources import Source, as_source
from .views import find

if TYPE_CHECKING:
    from .hints import ArrayLike


def share(obj: ArrayLike | tuple[int, int | str, str | Location]) -> Array:
    """Return an array over the memory of anything, without a copy, ready to be lent or sent (or published).

    The driver is asked how the memory was made; that decides how it will travel. Nothing is tried to see if it fails.

    Parameters
    ----------
    obj : Array, torch.Tensor, anything with __cuda_array_interface__ or DLPack, a view of vram memory, or a tuple
        The memory. A tuple is ``(address, nbytes, device)``; then the caller sees to it that the memory stays.

    Returns
    -------
    Array
        It keeps `obj` alive, and so do its slices and views. It cannot be resized. A vram array is returned as it is.

    Raises
    ------
    UnsupportedError
        If this memory cannot leave the process, with the reason and what to do instead.
    UsageError
        If it is no memory at all, or its elements do not lie one behind the other.

    Notes
    -----
    What another library allocated is that library's to use again: a caching allocator hands the memory of a tensor that
    is gone to the next one. The array keeps the tensor, but a keeper cannot: if you publish it, keep the array yourself
    for as long as anybody reads it. A vram array is returned unchecked: ask :func:`explain`.
    """
    if isinstance(obj, Array):
        return obj
    source = _look(obj)
    _check_dense(source, obj)
    if not source.nbytes:  # nothing to share: nothing can go wrong with memory of its own
        return empty(source.shape, source.dtype, device=place_of(source))
    ours = find(source.address, source.nbytes)
    if ours is not None:
        return Array(ours[0], source.dtype, source.shape, offset=ours[1], keeps=obj)
    if isinstance(source, Source):
        raise refusal(route_of(source, obj))
    region, offset = _foreign(source, obj)
    owner = source.owner
    return Array(region, source.dtype, source.shape, offset=offset, keeps=owner)


def over(obj: Any) -> Array:
    """Return an array over the memory of anything that a driver knows, for copies: also of GPU memory that cannot be
    shared. Else it raises as :func:`share` does."""
    source = None if isinstance(obj, Array) else _look(obj)
    if not isinstance(source, CudaSource) or not source.nbytes or find(source.address, source.nbytes) is not None:
        return share(obj)
    _check_dense(source, obj)
    access = Access.READ if source.readonly else Access.READ_WRITE
    driver = drivers.get(Location("cuda", source.gpu))
    region, offset = find_foreign(driver, source.address, source.nbytes, access=access)
    check_place(region.infos, source)
    return Array(region, source.dtype, source.shape, offset=offset, keeps=source.owner)


class Finder:
    """Finds the memory of many arrays of others at once: of each allocation the driver is asked once.
    Valid for one call, in which the caller keeps all arrays, so that what was found stays true."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._regions: list[ForeignRegion] = []

    def find(self, obj: Any) -> tuple[object, Source | CudaSource, tuple[Region, int]]:
        """Return what keeps the memory of an array, how it looks, and the region it lies in with the offset.
        Raises as :func:`share` does."""
        source = _look(obj)
        _check_dense(source, obj)
        if not source.nbytes:
            made = share(obj)
            return made, source, (made.region, made.offset)
        ours = find(source.address, source.nbytes)
        if ours is not None:
            return obj, source, ours
        if isinstance(source, Source):
            raise refusal(route_of(source, obj))
        at = bisect_right(self._starts, source.address) - 1
        if at >= 0:
            region = self._regions[at]
            offset = source.address - region.address
            right = Access.READ if source.readonly else Access.READ_WRITE
            if offset + source.nbytes <= region.nbytes and region.access is right:
                return obj, source, (region, offset)
        region, offset = _foreign(source, obj)
        at = bisect_right(self._starts, region.address)
        self._starts.insert(at, region.address)
        self._regions.insert(at, region)
        return obj, source, (region, offset)


def explain(obj: ArrayLike | tuple[int, int | str, str | Location]) -> ShareRoute:
    """Say how memory would reach another process, or why it cannot. Changes nothing.

    Parameters
    ----------
    obj : Array, torch.Tensor, anything with __cuda_array_interface__, DLPack or a buffer, or a tuple
        The memory, as :func:`share` takes it.

    Raises
    ------
    UsageError
        If it is no memory at all.
    """
    return route_of(_look(obj), obj)


def copy(
    obj: ArrayLike | complex | Sequence[Any] | tuple[int, int | str, str | Location],
    *,
    device: str | Location | None = None,
) -> Array:
    """Return a new array of vram memory with the contents of anything: it can be published and outlives its maker.

    Parameters
    ----------
    obj : object
        As :func:`share` takes it, and also what :func:`vram.asarray` takes.
    device : str, optional
        Where to; by default where it is.

    Raises
    ------
    UsageError
        If it is no array, or on a GPU and not contiguous (its own library can make it so).
    OutOfMemoryError
        If there is not enough.
    """
    if isinstance(obj, tuple) and _is_span(obj):
        span = _span(obj)
        if isinstance(span, Source):
            obj = span.view
        else:
            check_place(look_up(drivers.get(place_of(span)), span.address, span.nbytes), span)
            obj = _OnGpu(span)
    if isinstance(obj, Array):
        place: Location | str = obj.device
    else:
        place = place_of(as_source(obj)) if not isinstance(obj, (list, tuple, int, float)) else HOST
    wanted = visible(Location.parse(place if device is None else device))
    made = asarray(obj, device=wanted)
    if made is not obj:
        return made
    array = empty(made.shape, made.dtype, device=wanted)
    try:
        if made.nbytes:
            if made.region.asleep is not None:
                raise made.region.sleeps()
            made.region.synchronize()
            made.region.driver.copy(array.address, made.address, made.nbytes)
    except BaseException:
        array.close()
        raise
    return array


def _foreign(source: CudaSource, obj: object) -> tuple[ForeignRegion, int]:
    driver = drivers.get(Location("cuda", source.gpu))
    access = Access.READ if source.readonly else Access.READ_WRITE
    region, offset = find_foreign(driver, source.address, source.nbytes, access=access)
    check_place(region.infos, source)
    if way_of(region) is None:
        raise refusal(foreign_route(region.infos, source, obj))
    return region, offset


def _check_dense(source: Source | CudaSource, obj: object) -> None:
    if not source.contiguous:
        raise UsageError(
            f"the elements of this {type(obj).__name__} do not lie one behind the other; share what it is a view of, "
            f"or copy it: vram.copy(...) (on a GPU, after .contiguous())"
        )
    as_dtype(source.dtype)


def _look(obj: object) -> Source | CudaSource:
    return _span(obj) if isinstance(obj, tuple) and _is_span(obj) else as_source(obj)


def _is_span(obj: tuple[object, ...]) -> bool:
    return len(obj) == 3 and isinstance(obj[2], (str, Location)) and isinstance(obj[0], int)


def _span(obj: Any) -> Source | CudaSource:
    """Look at ``(address, nbytes, device)``."""
    address, size, device = obj
    place, nbytes = visible(Location.parse(device)), parse_size(size, what="nbytes")
    if not 0 < address < 1 << 64:
        raise UsageError(f"{address:#x} is no address")
    if place != HOST:
        if not isinstance(place.id, int):
            raise UsageError(f"{place} is memory of the host that a GPU works on; name the GPU")
        return CudaSource(address, nbytes, np.dtype(np.uint8), (nbytes,), True, place.id, obj)
    if nbytes and find(address, nbytes) is None:
        raise refusal(no_route("other", "host", nbytes, 0, 0, "no vram memory is there", COPY))
    return Source(np.asarray(_At(address, nbytes)) if nbytes else np.empty(0, np.uint8))


class _OnGpu:
    """Memory of a GPU by its address, for those who take arrays."""

    def __init__(self, span: CudaSource) -> None:
        data = (span.address, True)
        self.__cuda_array_interface__ = {"version": 3, "data": data, "shape": span.shape, "typestr": "|u1"}


class _At:
    """Memory of the host by its address, for numpy to look at."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"version": 3, "data": (address, True), "shape": (nbytes,), "typestr": "|u1"}
