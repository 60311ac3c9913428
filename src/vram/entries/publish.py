"""Publish arrays under a name: zero copy where the memory can be shared, one packed copy where it cannot."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..arrays.tables import columns_of, each_column, is_frame, is_table
from ..errors import UsageError
from ..keeper.client import KeeperClient
from ..keeper.messages import Claimed
from ..keeper.rules import MAX_MANIFEST
from ..lifetime import shielded
from ..memory import Region
from ..sharing.descriptor import ArrayEntry, encode_manifest
from ..spec import format_count, format_size
from .keepers import as_notes, check_flags, connect
from .loaded import Loaded
from .manifests import sealed_copy, sealed_size
from .placement import Placement

if TYPE_CHECKING:
    from ..arrays.hints import ArrayLike, ModuleLike, TableLike
    from ..keeper.private import Keeper
    from .update import Writer


@dataclass(frozen=True, slots=True, repr=False)
class Published:
    """The result of :func:`publish`.

    Attributes
    ----------
    name, version : str, int
        The name to attach.
    arrays, nbytes : int
        How many arrays, and the bytes of all of them.
    copied : dict of str to str
        The arrays that were copied, and why each could not be shared as it was. Empty means zero copy.
    """

    name: str
    version: int
    arrays: int
    nbytes: int
    copied: dict[str, str] = field(default_factory=dict)

    @property
    def zero_copy(self) -> bool:
        """Whether not one byte was copied."""
        return not self.copied

    def __repr__(self) -> str:
        arrays = f"{format_count(self.arrays, 'array')}, {format_size(self.nbytes)}"
        reasons = [f"{count:,} copied: {reason}" for reason, count in Counter(self.copied.values()).items()]
        return f"<Published {self.name!r} version {self.version}, {'; '.join([arrays, *reasons])}>"


@shielded
def publish(
    name: str,
    arrays: Mapping[str, ArrayLike] | ModuleLike | TableLike,
    *,
    meta: Mapping[str, str] | None = None,
    writable: bool = False,
    ttl: float | None = None,
    consume: bool = False,
    whole: bool = False,
    updatable: bool = False,
    swap: bool = False,
    keeper: Keeper | str | os.PathLike[str] | None = None,
) -> Published:
    """Publish arrays as a new version of an entry, in one step: a reader sees all of it or none.

    The keeper holds the memory from then on; this process may exit. Publishing a name again retires the version
    before it, which is freed with its last lease. For example::

        vram.publish("model", {"w": weights}, meta={"revision": "7"})

    Parameters
    ----------
    name : str
        1 to 200 characters of ``A-Z a-z 0-9 . _ / @ : + -``, with no part between slashes that is empty or dots. In
        front there may be ``~uid/``: only the user of that uid may publish there.
    arrays : mapping of str to array, a module, or a table
        vram arrays, and numpy or torch views of all of one, are shared as they are. Slices, and whatever else shares
        its memory with what is not published, are copied, unless `whole`; other numpy arrays, torch CPU tensors and
        buffers are, too. Copies are made once and packed, into new memory, which comes in units of 2 MiB: so it counts
        against quotas, and a thousand small arrays take 2 MiB in one mapping, and 2 GiB in a thousand entries. Of a
        DataFrame of pandas or polars, or a table of Arrow, each column is put there once, with the index, and readers
        get a table of it by :meth:`Lease.table`. It is read-only. Of a ``torch.nn.Module``, the parameters and
        persistent buffers are published by the names of its ``state_dict``, and readers get a module on them by
        :meth:`Lease.module`.
    meta : mapping of str to str, optional
        Up to 4 KiB that readers can require with ``expect=``.
    writable : bool
        False seals the memory: from then on nobody can write to it, this process and its existing views included. (On
        a GPU, whose memory no kernel seals, each process's mapping is read-only, which is no security boundary.)
        Where a vram array shares its memory with others, all of them are sealed. A write through a pointer taken
        before, such as a torch tensor's, kills the process with SIGSEGV. True lets readers ask for ``access="rw"``, and
        nothing orders what is written with what is read: a reader may see half of a write. See `updatable` for arrays
        that are replaced, and :class:`vram.Ring` for frames.
    ttl : float, optional
        Seconds after which the version is retired.
    consume : bool
        Take the arrays out of the mapping, freeing each source as soon as it is copied, so that the peak stays at
        one copy. Arrays shared without a copy are closed. If publishing fails, what was copied is in the mapping as
        vram arrays. The tensors of a module are moved instead: from then on the module is on the published memory,
        in evaluation mode, without gradients, and nothing may write to it.
    whole : bool
        Share memory as it is also where there is more in it than these arrays. Memory goes as whole allocations, and
        everybody who may attach the entry can read all of them: the rest of the array that a slice is of, rows from
        before a shrink, other tensors of the same allocator. By default such arrays are copied, and rows that a shrink
        left behind the end of an array, where nobody uses them, are zeroed. Bytes written later to memory that
        was published with ``writable=True`` are seen in any case, also beyond the arrays.
    updatable : bool
        Keep the memory writable for this process, and for no other, so that :func:`vram.update` can put new bytes into
        it under its readers, who see them between two of their sections (:meth:`Lease.reading`). Memory that has
        left this process before is copied, since others may be able to write to it. A forked child shares this
        process's mapping. Once this process is gone, only a new publication replaces it. No kernel seals memory of a
        GPU: there, "no other" is what readers map, and no security boundary. It is not sent over channels or queues:
        attach it there.
    swap : bool
        With `updatable`: keep the arrays twice, so that an update writes the ones that are not being read, and then
        readers move on. Readers never wait, and none of them sees an update that was not finished. The publisher waits
        only for readers that are still in a section of the version before the current one. It takes twice the memory,
        which counts against quotas, and arrays have two addresses that take turns: readers ask for them inside of each
        section, or see :attr:`Lease.slots`. A block of :func:`vram.update` writes what it asks for as a whole.
    keeper : Keeper, str or PathLike, optional
        The keeper to give it to; see :func:`vram.attach`.

    Returns
    -------
    Published
        The version, and which arrays were copied and why.

    Raises
    ------
    UsageError
        For a bad name, a mapping of something else than arrays, too many segments. It names the array. For a table with
        a column that has no memory to share, such as one of Python objects, it names the column and says what to do; no
        column is left out without being asked. For a table of another library it says which line publishes its columns.
    AccessDeniedError
        If the name belongs to another user.
    QuotaError
        If the keeper's quota does not allow it.
    OutOfMemoryError
        If a copy is needed and there is no room for it.
    UnsupportedError
        With `updatable` where the kernel lacks ``membarrier``.
    BusyError
        If memory of the host is to be read-only, and something else can write to it: another process that has it
        mapped, a forked child, or a device that it is pinned for. A process that it was sent to has it mapped until
        that process ends, or closes its end of the channel. The error says what to do.
    """
    client, notes = connect(keeper), as_notes(meta)
    writable, consume, whole, updatable, swap = check_flags(
        writable=writable, consume=consume, whole=whole, updatable=updatable, swap=swap
    )
    return publish_to(
        client, name, arrays, meta=notes, writable=writable, ttl=ttl, consume=consume, whole=whole, close=True,
        updatable=updatable, swap=swap,
    )  # fmt: skip


def publish_to(
    client: KeeperClient, name: str, arrays: Mapping[str, object] | ModuleLike | TableLike, *, meta: dict[str, str],
    writable: bool, ttl: float | None, consume: bool, whole: bool = False, close: bool = False,
    claim: Claimed | None = None, updatable: bool = False, swap: bool = False,
) -> Published:  # fmt: skip
    """Publish over a connection; see :func:`publish`. `claim` is the claim on the name that this fulfils.
    With `consume`, `close` also closes the vram arrays that are taken out of the mapping."""
    table = None
    if not isinstance(arrays, Mapping):
        found = arrays_in(arrays, writable=writable, updatable=updatable or swap, moves=consume)
        if found is None:
            raise UsageError(_no_mapping(name, arrays))
        table, arrays = arrays if is_frame(arrays) else None, found
    if consume and (table is not None or not isinstance(arrays, MutableMapping)):
        kind = type(arrays if table is None else table).__name__
        raise UsageError(f"consume=True takes the arrays out of the mapping as it goes; a {kind} is fixed")
    sources = arrays if consume and isinstance(arrays, MutableMapping) else None
    if updatable or swap:
        check_writers(writable=writable, updatable=updatable, swap=swap)
    with Placement(arrays, writable, sources, close, whole=whole, updatable=updatable, swap=swap) as plan:
        publish_plan = _publish_updatable if updatable else publish_planned
        version = publish_plan(client, name, plan, writable=writable, meta=meta, ttl=ttl, claim=claim)
        plan.done(client.path, name, version)
        if plan.held or client.placed:
            from .park import remember  # few publish what is on a GPU

            remember(client, name, version, plan.held)
    copied = {item.name: item.reason for item in plan.packed if item.nbytes}
    return Published(name, version, len(plan.items), plan.nbytes, copied)


def arrays_in(
    given: object, *, writable: bool, updatable: bool, moves: bool = False
) -> MutableMapping[str, Any] | None:
    """Return the arrays of a module or of a table, by name; None if it is neither. With `moves`, those of a module that
    are replaced become its memory."""
    from ..arrays.modules import ModuleTensors, is_module  # few publish modules or tables
    from .tables import arrays_of

    if is_module(given):
        return ModuleTensors(given, moves=moves)
    return arrays_of(given, writable=writable, updatable=updatable) if is_frame(given) else None


def check_writers(*, writable: bool, updatable: bool, swap: bool = False) -> None:
    """Raise :class:`UsageError` for what both its publisher alone and everybody is to write, or nobody, and twice."""
    if updatable and writable:
        raise UsageError("writable=True lets readers write, and updatable=True this process alone: choose one of them")
    if swap and not updatable:
        raise UsageError("swap=True keeps a second slot for vram.update to write: it needs updatable=True")


def _no_mapping(name: object, given: object) -> str:
    if is_table(given):
        return f"{columns_of(given)}: vram.publish({name!r:.80}, {{{each_column(given)}}})"
    kind = type(given).__name__
    return f'publish takes a mapping of names to arrays, and this is of type {kind}; one array is {{"name": array}}'


def publish_loaded(
    client: KeeperClient, name: str, region: Region, arrays: dict[str, ArrayEntry], *, meta: dict[str, str],
    writable: bool, ttl: float | None, updatable: bool, spare: Region | None = None, claim: Claimed | None = None,
) -> Published:  # fmt: skip
    """Publish a region that no other code looks at; the caller knows which array lies where.
    `spare`, of the same length, adds a second slot; `claim` is the claim on the name that this fulfils."""
    publish_plan, plan = _publish_updatable if updatable else publish_planned, Loaded(region, arrays, updatable, spare)
    version = publish_plan(client, name, plan, writable=writable, meta=meta, ttl=ttl, claim=claim)
    return Published(name, version, len(arrays), sum(entry.nbytes for entry in arrays.values()))


def _publish_updatable(
    client: KeeperClient, name: str, plan: Placement | Loaded, *, writable: bool, meta: dict[str, str],
    ttl: float | None, claim: Claimed | None,
) -> int:  # fmt: skip
    """As :func:`publish_planned`, and keep what it takes to update it in place."""
    from .update import Writer  # few update in place

    with Writer() as writer:
        version = publish_planned(client, name, plan, writable=writable, meta=meta, ttl=ttl, claim=claim, writer=writer)
        writer.published(client, name, version)
    return version


def publish_planned(
    client: KeeperClient, name: str, plan: Placement | Loaded, *, writable: bool, meta: dict[str, str],
    ttl: float | None, claim: Claimed | None, writer: Writer | None = None,
) -> int:  # fmt: skip
    """Give the keeper what was planned; return the version. With a `writer`, it is updated in place."""
    with contextlib.ExitStack() as made:
        manifest, segments = plan.manifest()
        if writer is not None:
            segments.append(writer.segment)
        inline = encode_manifest(manifest)
        extra = inline if len(inline) > MAX_MANIFEST else b""
        # The next steps cannot be taken back (a seal) or cost a copy: a refusal comes before them (I4).
        if extra or plan.is_to_be_asked_for:
            client.offer(
                name,
                sum([segment.size for segment in segments]) + (sealed_size(extra) if extra else 0),
                handles=len(segments) + bool(extra),
                meta=meta,
                ttl=ttl,
                claim=claim,
            )
        if isinstance(plan, Placement):
            plan.copy()
        plan.synchronize()
        manifest_fd = made.enter_context(sealed_copy(extra)).export() if extra else None
        try:
            if writer is None:
                if not writable:
                    plan.freeze()
                fds = plan.descriptors()
            else:
                fds = writer.guarded(plan, segments)
            return client.publish(
                name,
                segments,
                fds,
                manifest=b"" if extra else inline,
                manifest_fd=manifest_fd,
                writable=writable,
                meta=meta,
                ttl=ttl,
                claim=claim,
                updatable=writer is not None,
            )
        except BaseException as error:
            if isinstance(plan, Placement) and not writable and plan.is_frozen:
                error.add_note("the arrays that were to be shared in place are read-only from now on all the same")
            raise
