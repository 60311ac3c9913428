"""A lease on one version of an entry: its arrays, mapped into this process without a copy."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from ..arrays import Array
from ..arrays.views import close_when_unused, part_of_view
from ..errors import BusyError, NotFoundError, PeerGoneError, UsageError, VramError
from ..keeper.client import Attachment, KeeperClient
from ..lifetime import Owned, shielded
from ..spec import Location, check_timeout, format_count, format_size
from .by_name import array_on
from .keepers import TIMEOUT, check_flag
from .mapped import leases, map_version, parts, wire_access
from .questions import asked

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ..arrays.hints import ModuleLike
    from .asleep import Rows
    from .news import News
    from .reading import Page, Section

_M = TypeVar("_M", bound="ModuleLike")


class Lease(Owned, Mapping[str, Array]):
    """One version of an entry, attached: a mapping of names to arrays.

    Made by :func:`attach`. Closing it gives the version back; numpy and torch views that are still alive keep their
    memory, and the keeper is told when the last of them is gone. Losing the keeper does not disturb what is mapped.
    """

    __slots__ = (
        "_arrays", "_asleep", "_attachment", "_client", "_is_growing", "_manifest", "_news", "_only", "_pages",
        "_regions", "_return", "_revoked", "_since", "_user", "_words", "access",
    )  # fmt: skip
    _is_shared = False  # whether other leases are on the same mapping

    def __init__(
        self, client: KeeperClient, attachment: Attachment, access: str, *, user: Location | None = None,
        stream: int | None = None, timeout: float | None = None, growing: bool = False,
        only: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        self._manifest, self._regions, self._return, claim, update = map_version(
            client, attachment, access, user=user, stream=stream, timeout=timeout, growing=growing, only=only
        )
        self.access = access
        self._is_growing, self._only = growing, only
        self._user = user
        self._client = client
        self._attachment = attachment
        self._arrays: dict[str | tuple[int, str], Array] = {}  # by name; of two slots by the slot's number and the name
        self._news: dict[None, News] = {}  # one, once anybody listens: setdefault has one winner, without a lock
        self._revoked = False
        # The words of its publisher, if that updates it in place, and the update that was the last when it was mapped.
        self._words: memoryview | None
        self._words, self._since = update or (None, 1)
        self._pages: list[Page] = []  # one, once there was a section; the same list for all leases on one mapping
        self._asleep: Rows | None = None
        self._claim = claim
        leases[id(self)] = self

    # -- what it is ---------------------------------------------------------------------------------------------
    @property
    def name(self) -> str:
        """The entry's name."""
        return self._attachment.name

    @property
    def version(self) -> int:
        """The version that is attached; only :meth:`refresh` changes it."""
        return self._attachment.version

    @property
    def owner(self) -> int:
        """The uid of the user who published it, as the keeper verified it; of a lender, the one who lends."""
        return self._attachment.owner

    @property
    def meta(self) -> dict[str, str]:
        """The notes of its publisher."""
        return dict(self._attachment.meta)

    @property
    def nbytes(self) -> int:
        """Bytes of memory mapped under this lease."""
        return sum(region.mapped for region in self._regions)

    @property
    def _leased(self) -> Attachment:
        """The grant of this lease. Raises AsleepError if it was given back as it fell asleep."""
        self._return.lease_id  # noqa: B018
        return self._attachment

    # -- Mapping ------------------------------------------------------------------------------------------------
    def __getitem__(self, name: str) -> Array:
        """Return the array of that name, without a copy."""
        array = self._arrays.get(name)
        if array is None:
            is_here = self._manifest.slots > 1 and name in self._manifest.arrays
            return self._array_in(self.slot if is_here else 0, name)
        self.handle  # noqa: B018  (closed leases say so)
        return array

    def _array_in(self, slot: int, name: str) -> Array:
        """Return an array of one of two slots, or of the only one; the same each time."""
        self.handle  # noqa: B018
        manifest, leased = self._manifest, self._attachment
        key = name if manifest.slots == 1 else (slot, name)
        array = self._arrays.get(key)
        if array is None:
            if (entry := manifest.arrays.get(name)) is None:
                raise NotFoundError(f"{self._described()} has no array {name!r:.80}; it has {_some(tuple(self))}")
            region = self._regions[entry.memory + (manifest.memories_of_a_slot if slot else 0)]
            whose = self._client.path, leased.name, leased.version
            array = self._arrays.setdefault(key, array_on(region, manifest, *whose, name, self.access, slot))
            if self._manifest is not manifest:  # another thread went on to a version in which it may be longer
                self._arrays.pop(key, None)
                return self[name]
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifest.arrays)

    def __len__(self) -> int:
        return len(self._manifest.arrays)

    @property
    def array(self) -> Array:
        """The one array of what holds one.

        Raises UsageError if there are several: ask by name.
        """
        if len(self) != 1:
            raise UsageError(f"{len(self)} arrays are here; ask by name: {_some(tuple(self))}")
        return self[next(iter(self))]

    def numpy(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return all arrays as numpy arrays over the same memory.

        With ``access="r"`` those that lie in one memory keep it together: by one view of all its bytes.
        """
        self.handle  # noqa: B018  (closed leases say so)
        if self.access != "r" or len(self) <= len(self._regions):  # each in a memory of its own, or nearly
            return {name: self[name].numpy() for name in self}
        return parts(self, Array.numpy, part_of_view, Array.numpy)

    def torch(self, *, writable: Literal["copy"] | None = None) -> dict[str, torch.Tensor]:
        """Return all arrays as torch tensors over the same memory, as :meth:`Array.torch` does.

        On the host a write to a tensor over read-only memory is private to this process; what is not written stays
        shared. On a GPU such a write ends the context of the process: there, ask for a copy.

        Parameters
        ----------
        writable : "copy", optional
            Return tensors with memory of their own, from torch: as much again as :attr:`nbytes`.

        Raises
        ------
        UnsupportedError
            If torch is not installed, or has no such element type.
        UsageError
            For another value of `writable`.
        """
        from ..arrays.torch import Tensors, check_writable  # torch stays optional

        self.handle  # noqa: B018  (closed leases say so)
        show = functools.partial(Array.torch, writable=writable if check_writable(writable) else None)
        return parts(self, lambda whole: Tensors(show(whole)), Tensors.part, show)

    def module(self, make: Callable[[], _M] | _M) -> _M:
        """Return a module of torch whose parameters and persistent buffers are this memory, without a copy.

        As in ``vram.attach("llama").module(lambda: AutoModelForCausalLM.from_config(config))``: in evaluation mode,
        without gradients, read-only as what :meth:`torch` returns. It keeps the memory without the lease.

        Parameters
        ----------
        make : callable or torch.nn.Module
            Makes the module as the published one was made: its parameters take no memory, buffers that are not
            persistent are moved to where the arrays are. A module is put onto this memory.

        Raises
        ------
        MismatchError
            If the module has other tensors, or of other shapes; it names them. Of tied ones, one has to be there.
        UsageError
            If something would have no values, since it is not published and was made on meta; it is named.
        """
        from ..arrays.modules import module_over  # few leases are on modules

        return cast("_M", module_over(make, self.torch(), self._described()))

    def table(self, library: Literal["pandas", "polars", "arrow"] | None = None, *, check: bool = False) -> Any:
        """Return what was published as a table as one again: its columns are the memory itself, and read-only.

        The table keeps the memory, as views do. Columns in a form that Arrow and the library do not have in common are
        copied: see the how-to on tables.

        Parameters
        ----------
        library : {"pandas", "polars", "arrow"}, optional
            The library of the table; by default that of the library that it was published from.
        check : bool
            Look at every offset, code and character that the library would believe, at a cost by the row, as is done in
            any case for what another user has published.

        Raises
        ------
        UsageError
            If it is no table, or a column has no counterpart in that library, or for another library than these.
        UnsupportedError
            If the library is not installed, or the memory is on a GPU.
        ProtocolError
            If its publisher described it wrongly; it names the column.
        """
        self.handle  # noqa: B018  (closed leases say so)
        from .tables import table_on  # with what knows pandas and the others: most leases are on no table

        return table_on(self._client, self._attachment, self._manifest, self.numpy, library, check)

    # -- newer versions -----------------------------------------------------------------------------------------
    @asked
    def is_stale(self) -> bool:
        """Ask whether the entry was published again, or removed, since: :meth:`upgrade` attaches what there is now.

        Once another keeper serves at the path of the one that granted this lease this is True: what that one has is
        other memory, also under the same name and number.

        Raises
        ------
        PeerGoneError
            If the keeper is gone, as long as no other serves at its path; the error says how to start one.
        """
        self.handle  # noqa: B018
        with contextlib.suppress(PeerGoneError):
            return self._client.is_stale(self._leased)
        from .following import reconnect  # few keepers end

        reconnect(self)
        return True

    @shielded
    def fileno(self) -> int:
        """Return a descriptor to wait on: readable once this version is stale or revoked, or the keeper is gone.

        It belongs to the lease. Do not read from it; ask :meth:`is_stale` and :meth:`is_revoked`.

        Raises
        ------
        PeerGoneError
            If the keeper that granted this lease was gone before this was first called.
        QuotaError
            If this process watches 1,024 versions at that keeper already.
        """
        self.handle  # noqa: B018
        news = self._hears()
        if news.signal is None:
            news.signal = self._client.signal((self._leased.name, self.version))
        return news.signal.fileno()

    @shielded
    def upgrade(self, *, timeout: float | None = 0.0) -> Lease:
        """Attach the newest version of the same entry, with the same access. This lease stays as it is.

        Parameters
        ----------
        timeout : float or None
            Seconds to wait for a keeper, and for the name to be published, both together; None waits for ever.

        Raises
        ------
        NotFoundError, WaitTimeoutError
            If the entry was removed, and did not come back within `timeout` seconds.
        PeerGoneError
            If no keeper serves at the path, and none came within `timeout` seconds; the error says how to start one.
        """
        self.handle  # noqa: B018
        from .following import reconnect  # as in is_stale

        client, left = reconnect(self, check_timeout(timeout))
        newest = client.attach(self.name, access=wire_access(self.access), timeout=left)
        return Lease(
            client, newest, self.access, user=self._user, timeout=left, growing=self._is_growing, only=self._only
        )

    @shielded
    def refresh(self) -> tuple[str, ...]:
        """Go on to the newest version of the entry, if that is this one with more behind it.

        For arrays that were made with a `capacity`, published with ``writable=True``, grown, and published again. The
        added memory is mapped behind the addresses that there are. Arrays and views from before stay valid and show the
        rows that they had: ask this lease for its arrays again to see all. The version before is given back.

        Returns
        -------
        tuple of str
            The names of the arrays that have more rows now. Empty if there is no newer version, or none of its arrays
            is longer.

        Raises
        ------
        MismatchError
            If the newest version is something else than this one with more behind it, such as other or fewer rows, a
            copy, or another user's: :meth:`upgrade` attaches it.
        CapacityError
            If it does not fit behind the addresses that there are: attach with ``growing=True``.
        NotFoundError
            If the entry was removed.
        AsleepError
            If memory of this lease is asleep.
        PeerGoneError
            If the keeper is gone, and no other serves at its path.

        Nothing has changed then.

        Examples
        --------
        >>> vectors = vram.zeros((2, 4), device="host", capacity=1_000_000)
        >>> receipt = vram.publish("vectors", {"x": vectors}, writable=True)
        >>> lease = vram.attach("vectors", growing=True)
        >>> vectors.resize(900_000)
        >>> receipt = vram.publish("vectors", {"x": vectors}, writable=True)
        >>> lease.refresh(), len(lease["x"])
        (('x',), 900000)
        """
        self.handle  # noqa: B018
        from .following import refresh  # few leases are on what grows

        return refresh(self)

    # -- updates in place -----------------------------------------------------------------------------------------
    @property
    def updatable(self) -> bool:
        """Whether its publisher, and nobody else, may put new bytes into it: read it inside :meth:`reading`."""
        return self._words is not None

    @property
    def slots(self) -> tuple[Mapping[str, Array], ...]:
        """The arrays of each slot: two mappings of what was published with ``swap=True``, else one.

        Addresses in a slot never change, so that a CUDA graph that reads one can be captured for each, anywhere, and
        launched inside of a section: ``graphs[lease.slot]``. Their bytes are of one version there only.
        """
        if self._manifest.slots == 1:
            return (self,)
        from .swap import slots  # few leases are on what has several

        return slots(self)

    @property
    def slot(self) -> int:
        """Which of :attr:`slots` the calling thread's section is in, 0 or 1, until it ends; 0 where there is one.

        Inside of the section ``lease["w"]``, :meth:`numpy` and :meth:`torch` are of this slot.

        Raises UsageError if there are two, and this thread is in no section of this lease (:meth:`reading`).
        """
        self.handle  # noqa: B018
        if self._manifest.slots == 1:
            return 0
        from .swap import current

        return current(self)

    @property
    def torn(self) -> bool:
        """Whether an update was begun and never finished, so that the bytes are of no one version.

        The next complete update by the same process mends it, or a new publication, which :meth:`upgrade` attaches.

        Raises PeerGoneError if an update is under way, and the keeper is gone.
        """
        if self._words is None:
            return False
        from .reading import is_torn

        return is_torn(self._client, self._attachment, self._words)

    def reading(self, *, stream: object = None, timeout: float | None = TIMEOUT) -> Section:
        """Return a section for a ``with`` block: inside it no byte of the entry changes.

        ``with lease.reading() as version:`` waits until no update is under way, and keeps the publisher from beginning
        one until the block ends. `version` is 1 for what was published, and 1 more for each update since. Keep sections
        short: the publisher waits for them. They nest; each thread has its own; none calls the keeper.

        Of what was published with ``swap=True`` a section waits for nobody: it is in the slot that is current where it
        begins (:attr:`slot`), and keeps only the update after the next one waiting. Where memory of a GPU is in the
        entry, the block's end waits for the work of this process on that GPU, or only for that on `stream`.

        Parameters
        ----------
        stream : int or object, optional
            The one stream by which the block reads memory of a GPU: its number, or an object of torch, CuPy, Numba or
            cuda.core. It may not capture a graph, which reads when it is launched: there the section belongs.
        timeout : float or None
            Seconds to wait for an update that is under way; None waits for ever.

        Raises
        ------
        UsageError
            If it was not published with ``updatable=True``, or this lease is a private copy (``access="cow"``); if
            `stream` is not a stream, or captures.
        UnsupportedError
            If the kernel has no ``membarrier``, or keeps it from this process; with `stream`, for memory of the host.
        BusyError
            When the block is entered: in what interrupted this thread while it entered another section of this lease.
        CapacityError
            If 512 threads of this process have had sections of this lease, and live.
        PeerGoneError
            At the first section, if the keeper is gone.

        When the block is entered: TornError if the last update was not finished, WaitTimeoutError if one is still under
        way after `timeout` seconds, PeerGoneError if the keeper went away meanwhile.

        When it ends: TornError or PeerGoneError if the lease was over before, so that the publisher did not wait for
        this section. DriverError if the GPU cannot be waited for, such as while a graph is captured: the section has
        not ended then, and keeps the publisher out until the lease is closed.
        """
        self.handle  # noqa: B018
        for page in self._pages:
            if page.is_given:
                return page.section(stream, timeout)
        from .reading import page_of

        return page_of(self).section(stream, timeout)

    @shielded
    def wait(self, *, newer_than: int, timeout: float | None = None) -> int:
        """Wait until an update after the one of a number is complete, and return the number of the newest.

        Parameters
        ----------
        newer_than : int
            The number that the last section returned; 0 returns at once.
        timeout : float or None
            Seconds; None waits for ever.

        Raises
        ------
        UsageError, TornError, WaitTimeoutError
            If it was not published with ``updatable=True``; if the update was not finished; if there was none in time.
        NotFoundError
            If the entry was published anew or removed, so that this version is updated no more: see :meth:`upgrade`.
        PeerGoneError
            If the publisher is gone, or the keeper: nobody updates it any more.
        """
        self.handle  # noqa: B018
        from .reading import wait_for

        return wait_for(self, newer_than, check_timeout(timeout))

    # -- asleep ---------------------------------------------------------------------------------------------------
    def sleep(self, *, release: bool = False) -> int:
        """Give the memory back to whoever keeps it, until :meth:`wake`, and return how many bytes were mapped.

        Addresses stay, and so do arrays, tensors and captured graphs, which must not be used meanwhile. The keeper
        keeps the version. Its owner may park it (:func:`vram.park`) once all its readers sleep.

        Parameters
        ----------
        release : bool
            Give the lease back, too: the version may be gone when this wakes, on the newest one.

        Raises
        ------
        BusyError
            If a section is open, a tensor over it was written to on the host, or somebody else in this process holds
            the memory. Nothing has changed then.
        AsleepError
            If it is asleep already.
        UsageError
            If it is a private copy, of a follower, on a ring, or borrowed memory that has no descriptor.
        """
        from .asleep import put_to_sleep  # few leases sleep

        return put_to_sleep([self], release=check_flag(release, "release"))

    def wake(
        self, *, newest: bool = False, timeout: float | None = TIMEOUT, wait_for_memory: float | None = 0.0
    ) -> int:
        """Map the version that it was on, at the same addresses, and return its number. Awake, it stays as it is.

        A parked version is brought back first. If anything fails, all of it is still asleep.

        Parameters
        ----------
        newest : bool
            Go on to the newest version of the same user and layout: arrays, places in memory, sizes of segments.
        timeout, wait_for_memory : float or None
            As in :func:`vram.attach`, in seconds.

        Raises
        ------
        MismatchError
            If that version has another layout; it says what differs.
        NotFoundError, PeerGoneError
            If the version is gone, or the keeper that keeps it: wake with ``newest=True`` once it is published again.
        """
        from .asleep import wake

        checked = check_timeout(timeout), check_timeout(wait_for_memory, "wait_for_memory")
        wake([self], newest=check_flag(newest, "newest"), timeout=checked[0], patience=checked[1])
        return self.version

    # -- when it is wanted back ---------------------------------------------------------------------------------
    @asked
    def is_revoked(self) -> bool:
        """Ask whether the owner asked the readers of this version to let go (:func:`revoke`).

        Mapped memory stays valid all the same. The end of the keeper revokes nothing, and another one that serves at
        its path has no say in this memory: then it is False.

        Raises
        ------
        PeerGoneError
            If the keeper is gone, as long as no other serves at its path; the error says how to start one.
        """
        if not self._revoked:
            self.handle  # noqa: B018
            try:
                self._revoked = self._client.is_revoked(self._leased)
            except PeerGoneError:
                from .following import reconnect  # as in is_stale

                reconnect(self)
        return self._revoked

    @shielded
    def on_revoke(self, callback: Callable[[Lease], object]) -> None:
        """Have ``callback(lease)`` called once when the owner asks for this version back (:func:`revoke`).

        It is called from a thread of the library, named ``vram: revoked leases``: one for all leases of the process;
        at once, if the version was revoked before. It may close the lease, or only make a note for the loop that uses
        the memory: nothing is taken away from under it. An exception of it goes to :func:`threading.excepthook`.

        Closing or dropping the lease ends the listening; a callback that has begun goes on. A keeper that is gone has
        revoked nothing. Several callbacks are called in the order they came.

        Parameters
        ----------
        callback : callable
            Takes this lease; what it returns is ignored.

        Raises
        ------
        UsageError
            If it cannot be called.
        PeerGoneError
            If the keeper that granted this lease is gone.
        QuotaError
            If this process watches 1,024 versions at that keeper already.
        """
        self.handle  # noqa: B018
        self._hears().listen(self, _tell_of_revoke, callback)

    @shielded
    def on_grow(self, callback: Callable[[Lease], object]) -> None:
        """Have ``callback(lease)`` called when there is a newer version that is this one with more behind it.

        It is called once for the version that this lease is on, at once if there is such a version already, and again
        after each :meth:`refresh`, which it may call itself. It is not called for a version that is something else (but
        for one of another user's with many arrays, of which :meth:`refresh` says so). Everything else that
        :meth:`on_revoke` says of its callbacks holds here, too.

        Parameters and errors are those of :meth:`on_revoke`.
        """
        self.handle  # noqa: B018
        from .following import tell_of_growth  # few leases are on what grows

        self._hears().listen(self, tell_of_growth, callback, of_all=True)

    def _described(self) -> str:
        return f"{self.name!r} version {self.version}" + (f", attached with only={self._only}," if self._only else "")

    def _hears(self) -> News:
        from .news import News  # few leases hear anything

        return self._news.setdefault(None, News())

    # -- the end ------------------------------------------------------------------------------------------------
    @shielded
    def close(self, *, strict: bool = False, wait: bool = False) -> None:
        """Unmap what no view uses any more and give the version back.

        The keeper is told after the unmap, without waiting for its answer; by the last view, if some are alive.

        Parameters
        ----------
        strict : bool
            Refuse, and change nothing, while views are alive.
        wait : bool
            Return only when the keeper has acknowledged it, which is quick; unless views are alive.

        Raises
        ------
        BusyError
            Only if `strict`, naming the views.
        """
        if self.is_closed:
            return
        if strict:
            self._refuse_while_viewed()
        if self._news:
            self._hears().close()
        if not wait:
            self._unmap()
            return
        self._return.keep_back()
        try:
            self._unmap()
            if self._return.is_due:
                # A keeper that is gone has nothing to be told. Nor could it be said in the middle of another call.
                with contextlib.suppress(VramError):
                    self._client.release([self._return.lease_id])
                    self._return.take()
        finally:
            self._return.send_on()  # also where waiting for the answer was ended

    def _unmap(self) -> None:
        for region in reversed(self._regions):
            close_when_unused(region)  # closed with its last array: slices that are alive keep it open, to be handed on
        for array in list(self._arrays.values()):
            array.close()
        self._arrays.clear()
        self._claim.release()

    def _refuse_while_viewed(self) -> None:
        others: list[str] = []
        for region in self._regions:
            others += region.pinned_by(excluding=[array.pin for array in list(self._arrays.values())])
        for page in self._pages:
            others += page.inside()
        if others:
            raise BusyError(f"{self.name!r} version {self.version} is still in use", tuple(others))

    @shielded
    def keep_only(self, name: str) -> Array:
        """Give up the lease object and return one of its arrays, which holds the version until it is dropped."""
        array = self[name]
        self._arrays.clear()  # what is in there is closed
        self.close()
        return array

    @shielded
    def keep_all(self) -> dict[str, Array]:
        """Give up the lease object and return its arrays, which hold the version until the last of them is dropped."""
        arrays = {name: self[name] for name in self}
        self._arrays.clear()
        self.close()
        return arrays

    def __eq__(self, other: object) -> bool:
        return self is other  # a thing to close, not a value, though it is a mapping

    def __hash__(self) -> int:
        return id(self)

    def _ipython_key_completions_(self) -> list[str]:
        return [] if self.is_closed else list(self)

    def _repr_html_(self) -> str:
        from ..markup import table

        entries = {} if self.is_closed else self._manifest.arrays
        facts = ["closed"] if self.is_closed else [format_count(len(entries), "array"), format_size(self.nbytes)]
        rows = ((name, one.dtype, " x ".join(map(str, one.shape)) or "-", format_size(one.nbytes))
                for name, one in entries.items())  # fmt: skip
        title, header = f"Lease on {self.name} version {self.version}", ("array", "type", "shape", "size")
        return table(title, header if entries else (), rows, facts=[self.access, *facts], count=len(entries))

    def __repr__(self) -> str:
        size = "asleep" if self._asleep is not None else f"{self.nbytes} bytes"
        state = "closed" if self.is_closed else f"{format_count(len(self), 'array')}, {size}"
        return f"<Lease {self.name!r} version {self.version}, {self.access}, {state}>"


def _tell_of_revoke(callback: Callable[[Lease], object], lease: Lease) -> None:
    lease._revoked = True
    if not lease.is_closed:
        callback(lease)


def _some(names: tuple[str, ...]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")
