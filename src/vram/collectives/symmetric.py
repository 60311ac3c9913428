"""Memory of the same size on every rank of a group, which each rank has mapped of all."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from ..arrays import Array
from ..arrays.create import empty
from ..arrays.dtypes import dtype_name
from ..arrays.shapes import as_shape, nbytes_of
from ..errors import ClosedError, ProtocolError, UnsupportedError, UsageError, VramError
from ..lifetime import Owned, own, shielded, unwinding
from ..memory import Region
from ..memory.ahead import make_ahead
from ..sharing.channel import MAX_FDS
from ..sharing.descriptor import MemoryDescriptor
from ..sharing.mapping import describe_allocations, extend_memory, map_memory
from ..spec import HOST
from .spoke import Spoke
from .votes import Offer, agree, use_offers

if TYPE_CHECKING:
    import numpy as np

Resize: TypeAlias = "weakref.WeakMethod[Callable[[SymmetricBuffer, int], None]]"
_ROUNDING = 1 << 30  # bytes by which memory of one rank may be longer than another's, for pieces of another size


def make_buffer(
    spoke: Spoke, call: str, shape: Any, dtype: object, device: str, capacity: Any, chunk: Any, shares_gpus: bool,
    number: int, resize: Resize, deadline: float,
) -> SymmetricBuffer:  # fmt: skip
    """Make an array on all ranks, and map those of the others; see :meth:`Group.symmetric`."""
    about, failure, array, rows, nbytes = "", None, None, None, 0
    regions: dict[int, Region] = {}

    def use(rank: int, memory: MemoryDescriptor, fds: Sequence[int]) -> None:
        regions[rank] = map_peer(memory, fds, cast("Array", array), nbytes, spoke.rank, rank)

    try:
        try:
            lengths = as_shape(shape)
            if 0 in lengths:
                raise UsageError(f"a symmetric buffer has at least one element, and not the shape {lengths}")
            if lengths:
                rows, begin = lengths[0], (0, *lengths[1:])
                array = empty(begin, dtype, device=device, capacity=rows if capacity is None else capacity, chunk=chunk)
            else:
                array = empty((), dtype, device=device, capacity=capacity, chunk=chunk)
            shares = " that ranks share" if shares_gpus else ""
            kind = "host" if array.region.location == HOST else f"a GPU{shares}"
            about = f"{dtype_name(array.dtype)} {list(lengths)} on {kind}, capacity {list(array.capacity)}"
            nbytes = nbytes_of(lengths, array.dtype)
        except VramError as error:
            failure = error
        _grow(spoke, call, about, failure, array, rows, nbytes, use, deadline, apart=not shares_gpus)
        return SymmetricBuffer(cast("Array", array), regions, spoke.rank, number, spoke.name, resize)
    except BaseException as error:
        with unwinding(error):
            for region in regions.values():
                region.close()
            if array is not None:
                array.close()
        raise


def resize_buffer(spoke: Spoke, buffer: SymmetricBuffer, rows: int, deadline: float) -> None:
    """Grow a buffer on all ranks; see :meth:`SymmetricBuffer.resize`."""
    array, failure = buffer.array, None
    before, sizes = len(array), buffer.sizes()
    if rows < before:
        failure = UsageError(f"a symmetric buffer of {before} rows cannot shrink to {rows}: make another")
    about, nbytes = f"buffer {buffer.number} to {rows} rows", array.nbytes // before * rows
    try:
        _grow(spoke, "resize", about, failure, array, rows, nbytes, buffer.learn, deadline)
    except BaseException as error:
        with unwinding(error):
            buffer.forget(sizes)
            array.resize(before)
        raise
    buffer._look_again()


def _grow(
    spoke: Spoke, call: str, about: str, failure: VramError | None, array: Array | None, rows: int | None, nbytes: int,
    use: Callable[[int, MemoryDescriptor, Sequence[int]], None], deadline: float, *, apart: bool = False,
) -> None:  # fmt: skip
    """Have an array of all ranks grow to so many rows (None: it has them), and `use` map what the others' have more.
    Its own memory is made, and then mapped while the others hear of it."""
    memory: MemoryDescriptor | None = None
    fds: list[int] = []
    late: VramError | None = None

    def map_own() -> None:
        nonlocal late
        try:
            if array is not None and rows is not None and failure is None:
                array.resize(rows)
        except VramError as error:
            late = error

    def map_others() -> None:
        found = [(_memory_of(offer, rank), fds) for rank, (offer, fds) in enumerate(said)]
        if apart:
            check_gpus([memory.device for memory, _ in found])
        for rank, (memory, fds) in enumerate(found):
            if rank != spoke.rank:
                use(rank, memory, fds)

    try:
        if array is not None and failure is None:
            memory, fds = _describe(array, 0 if rows is None else len(array.region.layout), nbytes)
    except VramError as error:
        failure = error
    said = agree(spoke, call, about, failure, memory, fds, deadline=deadline, meanwhile=map_own)
    problem = use_offers(said, map_others)
    agree(spoke, "mapped", "", late or problem, deadline=deadline)


def _describe(array: Array, first: int, nbytes: int) -> tuple[MemoryDescriptor, list[int]]:
    """Make the memory by which an array grows to so many bytes, and describe all that it has then, with descriptors
    from segment `first` on, lent. Raises UsageError if these are more than one vote has room for."""
    made = make_ahead(array.region, nbytes)
    held = (*array.region.segments(0, array.region.nbytes)[0], *made)
    if len(held) - first > MAX_FDS:
        raise UsageError(
            f"{len(held) - first} pieces of memory at once; a group exchanges at most {MAX_FDS}: choose a larger chunk="
        )
    return describe_allocations(array.region, held, 0, nbytes), [one.export() for one in held[first:]]


def _memory_of(offer: Offer, rank: int) -> MemoryDescriptor:
    if offer.memory is None:
        raise ProtocolError(f"rank {rank} said nothing of the memory that it made")
    offer.memory.check()
    return offer.memory


def map_peer(
    descriptor: MemoryDescriptor, fds: Sequence[int], like: Array, nbytes: int, own_rank: int, rank: int
) -> Region:
    """Map the whole memory of another rank, with room for what it may grow by.
    Raises UnsupportedError, naming both ranks, if this rank's GPU cannot reach the other's."""
    location = like.region.location
    room = like.region.capacity + _ROUNDING  # what it says could take all addresses that this process has
    if (
        (descriptor.device == "host") != (location == HOST)
        or descriptor.nbytes < nbytes
        or max(descriptor.capacity, sum(segment.nbytes for segment in descriptor.segments)) > room
    ):
        raise ProtocolError("the memory that another rank described is not what it agreed on")
    try:
        return map_memory(descriptor, fds, access="rw", growing=True, user=None if location == HOST else location)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"a group of rank {own_rank} on {location} and rank {rank} on {descriptor.device}", error.needs, error.have,
            "Have the ranks on GPUs that are peers and that all their processes see (nvidia-smi topo -p2p r says "
            'which are), or on the host: device="host"',
        ) from error  # fmt: skip


def check_gpus(devices: Sequence[str]) -> None:
    """Refuse a GPU that several ranks name; `devices` are those of all ranks, by rank."""
    for rank, device in enumerate(devices):
        first = devices.index(device)
        if first != rank and device != "host":
            raise UsageError(
                f"ranks {first} and {rank} of the group are both on {device}: give each rank a GPU of its own, such as "
                f'device=f"cuda:{{rank}}", or say that they share it: Group(..., share_gpus=True)'
            )


class SymmetricBuffer(Owned):
    """An array on every rank of a group, of one shape and type: its own, and those of the others, mapped here.

    Made by :meth:`Group.symmetric`. The other ranks see at once what a rank writes to its own memory:
    :meth:`Group.barrier`, and the collectives, tell them when it is there.

    Closing it lets go of it here; memory of other ranks stays theirs, and what they have mapped of ours stays mapped.
    """

    __slots__ = ("_flat", "_group_name", "_peers", "_rank", "_regions", "_resize", "array", "number")

    def __init__(
        self, array: Array, regions: dict[int, Region], rank: int, number: int, group_name: str, resize: Resize
    ) -> None:
        self.array = array
        self.number = number
        self._rank, self._group_name = rank, group_name
        self._regions = regions
        self._resize = resize
        self._peers: tuple[Array, ...] = ()
        self._flat: list[np.ndarray[Any, Any]] = []
        self._look_again()
        self._claim = own(
            f"symmetric buffer {number} of the group {group_name}", partial(_close, array, regions, self._flat)
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape on every rank."""
        return self.array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the elements."""
        return self.array.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the array of one rank."""
        return self.array.nbytes

    @property
    def peers(self) -> tuple[Array, ...]:
        """The arrays of all ranks, by rank; that of this rank is :attr:`array`.

        Raises
        ------
        ClosedError
            If this was closed.
        """
        self.handle  # noqa: B018  (the check)
        return self._peers

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where in this process the arrays of all ranks begin, by rank: they never change."""
        return tuple(array.address for array in self.peers)

    @shielded
    def resize(self, rows: int) -> None:
        """Grow on all ranks, in place: every rank calls it, with the same number.

        All addresses stay. Arrays and views taken before show the rows that they have; :attr:`array` and :attr:`peers`
        show all.

        Parameters
        ----------
        rows : int
            The new length of the first dimension, not below the present one.

        Raises
        ------
        UsageError
            If the ranks do not agree, or the buffer would shrink.
        CapacityError
            Past the capacity that it was made with.
        PeerError
            If a rank could not, naming it; then the buffer is on every rank as it was.
        """
        self.handle  # noqa: B018  (the check)
        resize = self._resize()
        if resize is None:
            raise ClosedError(f"the group {self._group_name!r} is gone: a buffer grows with all its ranks, or not")
        resize(self, rows)

    def is_of(self, group: object) -> bool:
        """Whether this was made by a group."""
        resize = self._resize()
        return resize is not None and getattr(resize, "__self__", None) is group

    def flat(self, rank: int) -> np.ndarray[Any, Any]:
        """Return the elements of a rank in one dimension."""
        self.handle  # noqa: B018  (the check)
        if not self._flat:
            self._flat += [array.numpy().reshape(-1) for array in self._peers]
        return self._flat[rank]

    def sizes(self) -> dict[int, int]:
        """Return how many bytes of the other ranks are mapped here."""
        return {rank: region.nbytes for rank, region in self._regions.items()}

    def learn(self, rank: int, memory: MemoryDescriptor, fds: Sequence[int]) -> None:
        """Map what the memory of another rank has grown by: the last of its segments. Descriptors are lent."""
        region = self._regions[rank]
        extend_memory(region, memory.segments[len(region.layout) :], fds)
        if region.nbytes < self.array.nbytes:
            raise ProtocolError(f"rank {rank} says that its memory has grown, and it is shorter than that of this rank")

    def forget(self, sizes: Mapping[int, int]) -> None:
        """Let go of what the others have grown by: some rank could not, and so it is given back on all."""
        for rank, region in self._regions.items():
            if region.nbytes > sizes[rank]:
                region.shrink(sizes[rank])

    def _look_again(self) -> None:
        """Have the arrays of the others show what that of this rank does."""
        own_array = self.array
        peers = {rank: Array(region, own_array.dtype, own_array.shape) for rank, region in self._regions.items()}
        peers[self._rank] = own_array
        del self._flat[:]
        self._peers = tuple(peers[rank] for rank in sorted(peers))

    @shielded
    def close(self, *, strict: bool = False) -> None:
        """Let go of it here. Idempotent, and for this rank alone."""
        del self._flat[:]  # views of ours keep nobody from anything
        self._peers = ()
        super().close(strict=strict)

    def __repr__(self) -> str:
        if self.is_closed:
            return f"<SymmetricBuffer {self.number} of {self._group_name}, closed>"
        shape = "x".join(map(str, self.shape))
        return f"<SymmetricBuffer {self.number} of {self._group_name}, {self.dtype} {shape}, {len(self._peers)} ranks>"


def _close(array: Array, regions: dict[int, Region], flat: list[Any]) -> None:
    del flat[:]
    array.close()
    for region in regions.values():
        region.close()
