"""The memory of kvcached's tensors: addresses, and pages of memory put behind them one by one. See :mod:`.kvcached`."""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .. import driver as drivers
from ..driver.protocol import Driver
from ..errors import InternalError, UsageError
from ..lifetime import let_in, noted, shielded, unwinding, waiting
from ..memory import AddressReservation, MemoryMapping, PhysicalAllocation
from ..spec import HOST, Access, Location

_BASE = 2 << 20  # pages are multiples of this
_PATIENCE = 30.0  # seconds for another thread to finish an unmap that it works off


class _Pages:
    """Addresses of one tensor: behind each page there is memory of its own, or the page that all share."""

    def __init__(self, driver: Driver, where: Location, count: int, nbytes: int, shared: PhysicalAllocation) -> None:
        self.driver, self.where, self.count, self.nbytes, self.shared = driver, where, count, nbytes, shared
        self.own: dict[int, PhysicalAllocation] = {}  # by the page's number; some of it may be mapped no more
        self._mappings: dict[int, MemoryMapping] = {}
        self._behind: dict[int, PhysicalAllocation] = {}  # what they are of
        self._reservation = AddressReservation.reserve(driver, count * nbytes)
        try:
            for number in range(count):
                let_in()
                self.put(number, shared)
            self.open(range(count))
        except BaseException as error:
            with unwinding(error):
                self.close()
            raise

    @property
    def address(self) -> int:
        """Where the first page is."""
        return self._reservation.address

    def put(self, number: int, memory: PhysicalAllocation) -> None:
        """Map memory, with no access yet, in place of what is there. It can be called again after an error."""
        before = self._mappings.get(number)
        if before is not None:
            _unmap(before)
            del self._mappings[number], self._behind[number]
        self._mappings[number] = MemoryMapping.map(self._reservation, number * self.nbytes, memory, access=Access.NONE)
        self._behind[number] = memory

    def is_own(self, number: int) -> bool:
        """Whether memory of its own is mapped there: as the mappings have it, since an exchange may have failed."""
        return number in self.own and self._behind.get(number) is self.own[number]

    def drop(self, number: int) -> None:
        """Give the page's own memory back, if it is not mapped."""
        if number in self.own and not self.is_own(number):
            self.own[number].close()
            del self.own[number]

    def open(self, numbers: Iterable[int]) -> None:
        """Give the device access to pages, with one call for those that lie side by side."""
        for first, count in _runs(numbers):
            address = self.address + first * self.nbytes
            self.driver.mem_set_access(address, count * self.nbytes, Access.READ_WRITE, (self.where,))

    def close(self) -> None:
        """Unmap everything, and let go of the addresses."""
        for mapping in list(self._mappings.values()):
            mapping.close()
        for memory in list(self.own.values()):
            memory.close()
        self._reservation.close()


def _unmap(mapping: MemoryMapping) -> None:
    """Close a mapping, and wait for that where another thread works it off."""
    if mapping.is_closed:
        return
    handle = mapping.handle
    mapping.close()
    until = time.monotonic() + _PATIENCE
    while not handle.is_over:
        if time.monotonic() > until:
            raise InternalError(f"{handle.label} was not unmapped within {_PATIENCE:g} s")
        waiting(time.sleep, 0.0001)


def _runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield where each run of consecutive numbers begins, and how long it is."""
    first = count = 0
    for number in sorted(numbers):
        if count and number == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = number, 1
    if count:
        yield first, count


@dataclass(frozen=True, slots=True)
class _Change:
    """The change of one page."""

    pages: _Pages
    number: int
    before: PhysicalAllocation
    after: PhysicalAllocation


def _exchange(changes: Sequence[_Change]) -> None:
    """Put other memory behind pages: behind all of them, or none."""
    begun: list[_Change] = []
    try:
        for change in changes:
            begun.append(change)
            change.pages.put(change.number, change.after)
        _open(changes)
    except BaseException as error:
        # Each on its own: what cannot be taken back does not keep the others from it.
        for change in begun:
            with unwinding(error), noted(error):
                change.pages.put(change.number, change.before)
                change.pages.open([change.number])
        raise


def _open(changes: Sequence[_Change]) -> None:
    numbers: defaultdict[_Pages, list[int]] = defaultdict(list)
    for change in changes:
        numbers[change.pages].append(change.number)
    for pages, those in numbers.items():
        pages.open(those)


class _Shown:
    """The object that torch makes a tensor from: the tensor keeps it, and with it the addresses."""

    def __init__(self, pages: _Pages, itemsize: int) -> None:
        interface = {
            "shape": (pages.count * pages.nbytes // itemsize,),
            "typestr": f"{'|' if itemsize == 1 else '<'}i{itemsize}",
            "data": (pages.address, False),
            "strides": None,
            "version": 3,
        }
        name = "__array_interface__" if pages.where == HOST else "__cuda_array_interface__"
        setattr(self, name, interface)
        weakref.finalize(self, pages.close).atexit = False

    def tensor(self, device: str) -> Any:
        """Return a tensor over all pages."""
        import torch

        if hasattr(self, "__array_interface__"):
            import numpy as np

            return torch.from_numpy(np.asarray(self))
        return torch.as_tensor(self, device=device)


class _Group:
    """The tensors of one group of layers, whose pages are mapped together."""

    def __init__(self, device: str, page: int, contiguous: bool) -> None:
        self.device, self.page, self.contiguous = device, page, contiguous
        self.lock = threading.Lock()
        self.layers = 0
        self._unified = False
        self._asked: tuple[object, ...] = ()
        self._pages: list[_Pages] = []
        self._shared: PhysicalAllocation | None = None
        self._tensors: list[Any] = []

    def create(self, size: int, itemsize: int, device: str, layers: int, buffers: int, unified: bool) -> list[Any]:
        """Make the tensors; the same again for the same question."""
        asked = (size, itemsize, device, layers, buffers, unified)
        with self.lock:
            if self._tensors:
                if asked != self._asked:
                    raise UsageError(f"the KV tensors of this group were created as {self._asked}, not as {asked}")
                return list(self._tensors)
            if itemsize not in (1, 2, 4, 8):
                raise UsageError(f"an element of a KV tensor has 1, 2, 4 or 8 bytes, not {itemsize!r:.40}")
            if min(size, layers, buffers) < 1:
                raise UsageError(f"{size} bytes, {layers} layers and {buffers} buffers: each has to be at least 1")
            each = -(-size // self.page) * self.page
            page, total, count = self.page, each, layers
            if self.contiguous:  # one tensor, of pages that have the part of every layer in them
                page, total, count = self.page * layers * buffers, each * layers, 1
            halves = not self.contiguous and not unified
            if total % page or (halves and total % (2 * page)):
                raise UsageError(f"a KV tensor of {total} bytes is not whole pages of {(1 + halves) * page} bytes")
            where = _place(device)
            driver = drivers.get(where)
            shared = PhysicalAllocation.create(driver, page, where)
            made: list[_Shown] = []
            pages: list[_Pages] = []
            try:
                for _ in range(count):
                    pages.append(_Pages(driver, where, total // page, page, shared))
                    made.append(_Shown(pages[-1], itemsize))  # from here on it closes them
                self._tensors = [shown.tensor(device) for shown in made]
            except BaseException as error:
                with unwinding(error):
                    if len(made) < len(pages):
                        pages[-1].close()
                    shared.close()
                raise
            self._pages, self._shared = pages, shared
            self._unified, self._asked, self.layers = unified, asked, layers
            return list(self._tensors)

    def map(self, offsets: Iterable[int]) -> bool:
        """Put memory behind the pages at some offsets, in all layers. Mapped pages stay as they are."""
        with self.lock:
            shared = self._shared
            if shared is None:
                return False
            due = self._unmapped(offsets)
            try:
                for pages, number in due:
                    let_in()
                    pages.drop(number)
                    pages.own[number] = PhysicalAllocation.create(pages.driver, pages.nbytes, pages.where)
                _exchange([_Change(pages, number, shared, pages.own[number]) for pages, number in due])
            except BaseException as error:
                with unwinding(error):
                    for pages, number in due:
                        pages.drop(number)
                raise
            return True

    def _unmapped(self, offsets: Iterable[int]) -> list[tuple[_Pages, int]]:
        return [(pages, number) for pages, number in self._at(offsets) if not pages.is_own(number)]

    def unmap(self, offsets: Iterable[int]) -> bool:
        """Give the memory at some offsets back, in all layers. Unmapped pages stay as they are."""
        with self.lock:
            if self._shared is None:
                return False
            self._give_back(self._at(offsets), self._shared)
            return True

    def _give_back(self, spots: Iterable[tuple[_Pages, int]], shared: PhysicalAllocation) -> None:
        spots = list(spots)
        due = [(pages, number) for pages, number in spots if pages.is_own(number)]
        for driver, where in {(pages.driver, pages.where) for pages, _ in due}:
            driver.synchronize(where)  # a kernel that still runs there would fault, and lose the device
        _exchange([_Change(pages, number, pages.own[number], shared) for pages, number in due])
        for pages, number in spots:
            pages.drop(number)  # also what a failure left before

    def close(self) -> None:
        """Give all memory back; the addresses go with the last tensor."""
        with self.lock:
            shared, self._shared = self._shared, None
            if shared is None:
                return
            self.layers = 0
            try:
                self._give_back([(one, number) for one in self._pages for number in list(one.own)], shared)
            finally:
                shared.close()
                self._pages.clear()
                self._tensors.clear()  # the last of what keeps the addresses, unless somebody has a tensor

    def _at(self, offsets: Iterable[int]) -> list[tuple[_Pages, int]]:
        """Return which pages of which tensors lie at some offsets, each once."""
        found: dict[tuple[int, int], tuple[_Pages, int]] = {}
        for which, pages in enumerate(self._pages):
            halves = not self.contiguous and not self._unified  # keys in one half, values in the other
            last = (pages.count // 2 if halves else pages.count) - 1
            for offset in offsets:
                number, rest = divmod(offset, pages.nbytes)
                if rest or not 0 <= number <= last:
                    raise UsageError(
                        f"offset {offset!r:.40} is not one of a page: a multiple of {pages.nbytes}, at most "
                        f"{last * pages.nbytes}"
                    )
                found[which, number] = pages, number
                if halves:
                    found[which, number + pages.count // 2] = pages, number + pages.count // 2
        return list(found.values())


def _place(device: str) -> Location:
    """Return the place that torch calls so."""
    if device == "cpu":
        return HOST
    if device.partition(":")[0] != "cuda":
        raise UsageError(f"KV tensors are on a GPU, or for trials on the host ('cpu'), not on {device!r:.40}")
    if device == "cuda":
        import torch

        device = f"cuda:{torch.cuda.current_device()}"
    return drivers.visible(Location.parse(device))


class _State:
    """The settings of :func:`init_kvcached`, and the groups since."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.device = ""
        self.page = _BASE
        self.contiguous = True
        self.groups: dict[int, _Group] = {}

    def group(self, number: int) -> _Group:
        """Return a group, which begins when it is first asked for."""
        with self.lock:
            if not self.device:
                raise UsageError("kvcached is not initialized: call init_kvcached() first")
            found = self.groups.get(number)
            if found is None:
                found = self.groups[number] = _Group(self.device, self.page, self.contiguous)
            return found

    def close(self) -> None:
        """Forget all of it. It can be called again after an error."""
        with self.lock:
            self.device = ""
            groups = self.groups.copy()
        for number, group in groups.items():
            group.close()
            self.groups.pop(number, None)


_state = _State()


@shielded
def init_kvcached(dev_str: str, page_size: int = 0, contiguous_layout: bool = True) -> None:
    """Begin: say where the tensors will be, how large pages are, and whether all layers are in one tensor.

    Parameters
    ----------
    dev_str : str
        torch's name of the GPU; "cpu" for the host.
    page_size : int
        Bytes, a multiple of 2 MiB; 0 leaves it.
    contiguous_layout : bool
        One tensor with all layers of a block side by side, or a tensor for each layer.

    Raises
    ------
    UsageError
        For a size that cannot be.
    """
    if type(page_size) is not int or page_size < 0 or page_size % _BASE:
        raise UsageError(f"page_size is a multiple of {_BASE} bytes, not {page_size!r:.40}")
    _state.close()
    with _state.lock:
        _state.device, _state.page, _state.contiguous = dev_str, page_size or _state.page, bool(contiguous_layout)


@shielded
def shutdown_kvcached() -> None:
    """Give the memory of all tensors back. Their addresses stay as long as they do, and read as zeros."""
    _state.close()


@shielded
def create_kv_tensors(
    size: int,
    dtype_size: int,
    dev_str: str,
    num_layers: int,
    num_kv_buffers: int = 2,
    group_id: int = 0,
    unified_pool: bool = False,
) -> list[Any]:
    """Make the tensors of a group of layers, with no memory of their own yet.

    Parameters
    ----------
    size : int
        Bytes of one layer, rounded up to whole pages.
    dtype_size : int
        Bytes of an element: the tensors are flat, of integers.
    dev_str : str
        Where.
    num_layers, num_kv_buffers : int
        How many; of the latter 2 for keys and values, 1 for both in one.
    group_id : int
        Groups are mapped on their own.
    unified_pool : bool
        Keys and values lie interleaved in one block, rather than each in a half of the tensor.

    Returns
    -------
    list of torch.Tensor
        One for each layer; with the contiguous layout, one.

    Raises
    ------
    UsageError
        For sizes that are not whole pages, or if the group has other tensors already.
    OutOfMemoryError, AddressSpaceError
        If there is not enough.
    """
    group = _state.group(group_id)
    return group.create(size, dtype_size, dev_str, num_layers, num_kv_buffers, bool(unified_pool))


def kv_tensors_created(group_id: int = 0) -> bool:
    """Return whether the tensors of a group are there."""
    return _state.group(group_id).layers > 0


@shielded
def map_to_kv_tensors(offsets: list[int], group_id: int = 0) -> bool:
    """Put memory behind pages, in all layers: behind all of them, or none.

    Parameters
    ----------
    offsets : list of int
        Where the pages are in each tensor, in bytes; of the halves for keys and values, in the first.
    group_id : int
        Of which tensors.

    Returns
    -------
    bool
        False if there are no tensors yet.

    Raises
    ------
    UsageError
        For what is no page's offset.
    OutOfMemoryError
        If there is not enough. Nothing has changed then.
    """
    return _state.group(group_id).map(offsets)


@shielded
def unmap_from_kv_tensors(offsets: list[int], group_id: int = 0) -> bool:
    """Give the memory of pages back, in all layers; as :func:`map_to_kv_tensors`. Waits for the device."""
    return _state.group(group_id).unmap(offsets)


def available_bytes() -> tuple[int, int]:
    """Return the bytes that are left where the tensors are, and all there are."""
    where = _place(_state.device or "cuda")
    return drivers.get(where).mem_info(where)
