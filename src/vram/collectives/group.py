"""Groups of processes of one machine that set up memory together, and compute on it."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ..arrays.dtypes import dtype_name
from ..errors import BusyError, PeerGoneError, UsageError, VramError
from ..keeper.paths import check_platform
from ..lifetime import Owned, close_all, own, shielded, take, unwinding
from . import host
from .kernels import KINDS, OPS
from .meeting import check_group, connect, from_environment, from_torch_group, make_hub, meeting_path, seconds
from .on_gpu import Library, OnGpu, is_on_gpu
from .registration import register
from .routes import Routes, read_routes
from .signals import Signals, make_page
from .spoke import Spoke, gave_up_error, until
from .staging import MEET, Staging, about_of
from .symmetric import SymmetricBuffer, make_buffer, resize_buffer
from .votes import DisagreementError, Offer, agree, close_said, encode

if TYPE_CHECKING:
    import numpy as np

    from ..arrays.hints import ArrayLike

_T = TypeVar("_T")
_TIMEOUT = 30.0  # seconds


class Group(Owned):
    """Processes of one machine, numbered from 0, that make the same calls in the same order.

    Every rank makes it, with its own number. They meet at a path; who comes first waits, rank 0 included. Once they
    have met, nothing is left at the path, and each rank hears of the death of another at once. A rank that is missing,
    late, failing or dead is an error that names it, on every rank, within the timeout: no call waits for ever.

    A context manager. For one thread at a time; others wait for their turn.

    Parameters
    ----------
    name : str
        The name of the group: groups of different names of one user meet at different paths.
    rank : int
        The number of this process, from 0.
    size : int
        How many processes there are, at most 64.
    at : str or os.PathLike, optional
        The path where they meet, in a directory that exists; by default one of this user's that goes by `name`.
    timeout : float
        Seconds that calls of this group wait for other ranks, unless they are told otherwise.
    routes : Routes, str or os.PathLike, optional
        The file with the table by which all-reduces on GPUs choose their way, which a clone of vram measures (``python
        -m benchmarks allreduce --tune``); by default that in the environment's ``VRAM_ROUTES``, or else what is built
        in. All ranks have the same.
    share_gpus : bool
        Whether ranks may be on one GPU, as for a trial: their kernels wait for one another and take turns, which is
        slow. Without it two ranks that name one GPU, which most often is a mistake, are refused.

    Attributes
    ----------
    name, rank, size, timeout
        As given.
    pids : tuple of int
        The processes, by rank; 0 for one that the process of rank 0 cannot see (another PID namespace).

    Raises
    ------
    WaitTimeoutError
        If some did not come in time, naming them.
    UsageError
        If the ranks do not agree about the group, or this rank has come already.
    BusyError
        If another group meets at the path.
    PeerGoneError
        If the process of rank 0 ended meanwhile.

    Examples
    --------
    >>> with vram.Group("sums", rank=0, size=1) as group:
    ...     buffer = group.symmetric(4, "float32", device="host")
    ...     buffer.array.numpy()[:] = 1
    ...     group.all_reduce(buffer)
    ...     buffer.array.numpy().tolist()
    [1.0, 1.0, 1.0, 1.0]
    """

    __slots__ = (
        "_agree", "_buffers", "_lock", "_on_gpu", "_routes", "_share_gpus", "_signals", "_spoke", "_staging", "_wakes",
        "name", "rank", "size", "timeout",
    )  # fmt: skip

    @shielded
    def __init__(
        self,
        name: str = "group",
        *,
        rank: int,
        size: int,
        at: str | os.PathLike[str] | None = None,
        timeout: float = _TIMEOUT,
        routes: Routes | str | os.PathLike[str] | None = None,
        share_gpus: bool = False,
    ) -> None:
        check_platform()
        self._share_gpus = bool(share_gpus)
        self._routes = read_routes(routes)
        self.name, self.rank, self.size = check_group(name, rank, size)
        self.timeout = seconds(timeout)
        deadline = time.monotonic() + self.timeout
        self._buffers = 0
        self._lock = threading.RLock()
        self._on_gpu: OnGpu | None = None
        path, is_chosen = meeting_path(self.name, at)
        signals: list[Signals | OnGpu] = []
        fds: list[int] = []
        spoke: Spoke | None = None
        try:
            hub = None if rank else make_hub(path, is_chosen, self.name, size)
            channel = connect(path, is_chosen, deadline, self.name) if hub is None else hub.channel
            self._spoke = spoke = Spoke(channel, self.name, rank, size, partial(_wake, signals), hub)
            self._agree = partial(agree, spoke)
            spoke.open()
            spoke.form(until(deadline))
            page = make_page(fds)
            said = spoke.vote(encode(Offer("signals", "")), fds, until(deadline))
            try:
                pages = {other: fds[0] for other, (_, fds) in enumerate(said) if other != rank and fds}
                self._signals = Signals(rank, size, page, pages, spoke.gone, self.name)
                signals.append(self._signals)
                self._staging = Staging(rank, size, self.name, self._signals, self._make_staging)
                self._agree("mapped", "", deadline=deadline)
            finally:
                close_said(said)
            self._wakes = signals
            self._claim = own(f"rank {rank} of the group {self.name}", spoke.close)
        except BaseException as error:
            with unwinding(error):
                if spoke is not None:
                    spoke.close()
                    spoke.join()
            raise
        finally:
            close_all(fds)

    @classmethod
    @shielded
    def from_env(
        cls,
        *,
        timeout: float = _TIMEOUT,
        routes: Routes | str | os.PathLike[str] | None = None,
        share_gpus: bool = False,
    ) -> Group:
        """Make the group of the processes that ``torchrun`` (or whatever sets the same variables) has started here.

        It reads ``RANK``, ``WORLD_SIZE`` and ``LOCAL_WORLD_SIZE``, and meets by ``MASTER_PORT``,
        ``TORCHELASTIC_RUN_ID`` and ``TORCHELASTIC_RESTART_COUNT``.

        Raises
        ------
        UsageError
            If a variable is missing or no number, or the processes are on several machines.
        """
        name, rank, size = from_environment()
        return cls(name, rank=rank, size=size, timeout=timeout, routes=routes, share_gpus=share_gpus)

    @classmethod
    @shielded
    def from_torch(
        cls,
        group: object = None,
        *,
        timeout: float = _TIMEOUT,
        routes: Routes | str | os.PathLike[str] | None = None,
        share_gpus: bool = False,
    ) -> Group:
        """Make the group of the processes of a ``torch.distributed`` group, with its ranks.

        Each of them calls it. The name is exchanged by torch first, which waits as long as torch does.

        Parameters
        ----------
        group : torch.distributed.ProcessGroup, optional
            By default that of all processes.
        timeout : float
            As that of :class:`Group`.
        routes, share_gpus : Routes, str or os.PathLike, optional; bool
            As those of :class:`Group`.

        Raises
        ------
        UsageError
            If torch's groups are not initialised, or it has processes of other machines or users.
        UnsupportedError
            If there is no torch.
        """
        name, rank, size = from_torch_group(group)
        return cls(name, rank=rank, size=size, timeout=timeout, routes=routes, share_gpus=share_gpus)

    # -- who is there ---------------------------------------------------------------------------------------------
    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of all ranks."""
        return self._spoke.pids

    @property
    def gone(self) -> tuple[int, ...]:
        """The ranks that have left, or whose processes have ended: known as soon as their connection has."""
        return tuple(sorted(self._spoke.gone))

    def check(self) -> None:
        """Raise :class:`PeerGoneError` if a rank is gone, and what a call on a GPU ran into. Does not wait.

        Raises
        ------
        PeerGoneError
            Naming the ranks.
        WaitTimeoutError
            If a rank did not come to a call on a GPU in time.
        """
        self.handle  # noqa: B018  (the check)
        self._spoke.check()
        if self._on_gpu is not None:
            self._on_gpu.check()

    def statistics(self) -> dict[str, int]:
        """Return how often each kernel was put on a stream of a GPU or into a graph, and a library handed over to."""
        return {} if self._on_gpu is None else self._on_gpu.counts()

    def explain(
        self, nbytes: int, dtype: str = "bfloat16", op: Literal["sum", "min", "max"] = "sum", *, symmetric: bool = False
    ) -> str:
        """Say which way an all-reduce on GPUs takes, and by which table.

        Parameters
        ----------
        nbytes : int
            Bytes of the array.
        dtype : str
            The type of its elements.
        op : {"sum", "min", "max"}
            The operation.
        symmetric : bool
            Whether source and target are symmetric buffers.

        Returns
        -------
        str
            For people: its words may change.
        """
        if dtype not in KINDS or op not in OPS or type(nbytes) is not int or nbytes < 0:
            raise UsageError(f"no {op!r:.40} of {nbytes!r:.40} bytes of {dtype!r:.40} is computed on GPUs")
        return self._gpu().explain(dtype, op, nbytes, symmetric)

    @shielded
    def hand_over(self, library: Library | None, *, timeout: float | None = None) -> None:
        """Have all-reduces on GPUs be done by another library where the table says so: by default above 64 MiB.

        Every rank calls it. Sums of another library need not have the bits of ours.

        Raises what :meth:`symmetric` does.

        Parameters
        ----------
        library : Library or None
            Such as :class:`vram.engines.nccl.Nccl`; None: hand over no longer.
        timeout : float, optional
            Seconds to wait for the others; by default those of the group.
        """
        self._turn(partial(self._hand_over, library), timeout)

    def _hand_over(self, library: Library | None, deadline: float) -> None:
        about = "nothing" if library is None else library.name
        close_said(self._agree("hand_over", about, deadline=deadline))
        self._gpu().library = library

    # -- arrays of graphs -----------------------------------------------------------------------------------------
    @shielded
    def register_captured(self, *, timeout: float | None = None) -> tuple[str, ...]:
        """Have graphs reach the arrays of all ranks where they are, for calls that were captured with any arrays.

        Of calls that are large, so that it pays: what :meth:`explain` calls shares for symmetric buffers. Before this,
        and where memory cannot be reached, a graph copies such arrays through memory of the group, a piece at a time.
        Every rank calls it, after it has captured the same calls, and before it launches the graph again: nothing of
        a graph may be on its way. The memory has to stay what it is for as long as a graph is launched.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for the others; by default those of the group.

        Returns
        -------
        tuple of str
            Why some are copied through memory of the group, each reason once; empty if none is.

        Raises
        ------
        UsageError
            If the ranks have not captured as many such calls.
        PeerError
            If a rank could not, naming it; then all go through memory of the group as before.
        WaitTimeoutError, PeerGoneError
            If ranks do not come in time, or are gone.
        """
        return self._turn(lambda deadline: register(self._on_gpu, self._agree, deadline), timeout)

    # -- set-up ---------------------------------------------------------------------------------------------------
    @shielded
    def symmetric(
        self,
        shape: int | Sequence[int],
        dtype: object = "float32",
        *,
        device: str,
        capacity: int | Sequence[int] | None = None,
        chunk: int | str | None = None,
        timeout: float | None = None,
    ) -> SymmetricBuffer:
        """Make an array of zeros on every rank, of one shape and type, and map those of all ranks in each.

        Every rank calls it with the same arguments. All have it afterwards, or none has.

        Parameters
        ----------
        shape, dtype, device, capacity, chunk
            As those of :func:`vram.empty`. The device is ``"host"`` on all ranks, or a GPU on each: every rank has
            its own (see `share_gpus`). One process may drive several, with a group in a thread for each. Ranks may
            differ in which GPU, and in `chunk`.
        timeout : float, optional
            Seconds to wait for the others; by default those of the group.

        Returns
        -------
        SymmetricBuffer

        Raises
        ------
        UsageError
            If the ranks do not agree, or for arguments that cannot be, or two ranks name one GPU (see `share_gpus`).
        UnsupportedError
            If the GPU of this rank cannot reach that of another one, naming both.
        PeerError
            If another rank could not, naming it and saying why.
        WaitTimeoutError, PeerGoneError
            If ranks do not come in time, or are gone.
        """
        return self._turn(partial(self._make, shape, dtype, device, capacity, chunk), timeout)

    def _make(
        self,
        shape: Any,
        dtype: object,
        device: str,
        capacity: Any,
        chunk: Any,
        deadline: float,
        call: str = "symmetric",
    ) -> SymmetricBuffer:
        made = make_buffer(
            self._spoke, call, shape, dtype, device, capacity, chunk, self._share_gpus, self._buffers,
            weakref.WeakMethod(self._grow), deadline,
        )  # fmt: skip
        self._buffers += 1
        return made

    def _make_staging(self, nbytes: int, deadline: float) -> SymmetricBuffer:
        return self._make(nbytes, "uint8", "host", None, None, deadline, "staging")

    def _grow(self, buffer: SymmetricBuffer, rows: int) -> None:
        self._turn(partial(resize_buffer, self._spoke, buffer, rows), None)

    # -- collectives ----------------------------------------------------------------------------------------------
    @shielded
    def barrier(self, *, device: str | None = None, stream: object = None, timeout: float | None = None) -> None:
        """Wait until all ranks have come here. All ranks see what the others wrote before.

        Parameters
        ----------
        device : str, optional
            A GPU, such as ``"cuda:0"``, of which a stream waits then, and not this process: what is put on it
            afterwards comes after what all ranks have put on theirs before.
        stream : object, optional
            As that of :meth:`all_reduce`.
        timeout : float, optional
            Seconds to wait for the others; by default those of the group.

        Raises
        ------
        WaitTimeoutError
            If some did not come in time, naming them.
        PeerGoneError
            If one that has not come is gone, or has given up: its call was too late, or was ended by Ctrl-C.
        """
        if device is not None:
            self._turn(partial(self._compute, OnGpu.barrier, device, stream), timeout)
            return
        _check_no_stream(stream)
        self._turn(partial(self._staging.come, MEET), timeout)

    @shielded
    def all_reduce(
        self,
        buffer: SymmetricBuffer | ArrayLike,
        op: Literal["sum", "min", "max"] = "sum",
        *,
        out: SymmetricBuffer | ArrayLike | None = None,
        stream: object = None,
        timeout: float | None = None,
    ) -> None:
        """Combine the arrays of all ranks, element by element: afterwards every rank has the same result, bit for bit.

        Elements are combined in the order of the ranks; floats of 16 bits are summed in 32, and no sum is -0.0.

        Parameters
        ----------
        buffer : SymmetricBuffer or array
            The contribution of this rank: a symmetric buffer, for which nothing is copied but results, or any
            contiguous array of the host (numpy, torch on the CPU, vram), which goes through memory of the group. Or one
            of a GPU (torch, CuPy, vram): then this puts a kernel on a stream and returns, and the group's timeout is
            how long that waits for other ranks. Nothing compares there what the ranks call, and what goes wrong is
            raised by a later call, or by :meth:`check`.
        op : {"sum", "min", "max"}
            The operation. With a NaN among them, a minimum or maximum is one.
        out : SymmetricBuffer or array, optional
            Where the result goes, of the same shape and type; by default into `buffer`.
        stream : object, optional
            Of a GPU: a number, or an object of torch, CuPy or cuda.core; by default the legacy default stream. It may
            be captured into a graph, once the group has made a call of that type and operation.
        timeout : float, optional
            Seconds to wait for the others; by default those of the group.

        Raises
        ------
        UsageError
            For an operation, type or array that cannot be; or, on every rank, if the ranks do not agree. Nothing has
            changed then.
        WaitTimeoutError, PeerGoneError
            As those of :meth:`barrier`. The result is undefined then, and the group can be used no more.
        """
        if is_on_gpu(buffer):
            self._check_of_group(buffer, out)
            self._turn(partial(self._compute, OnGpu.all_reduce, buffer, op, out, stream), timeout)
            return
        _check_no_stream(stream)
        source = self._flat(buffer)
        host.check(op, dtype_name(source.dtype))
        target = self._flat(buffer if out is None else out, writable=True)
        if (target.dtype, target.shape) != (source.dtype, source.shape):
            raise UsageError(
                f"out is {target.dtype} with {target.size} elements, and the buffer {source.dtype} with {source.size}"
            )
        host.check_apart(source, target)
        into = buffer if out is None else out
        if isinstance(buffer, SymmetricBuffer) and isinstance(into, SymmetricBuffer):
            self._turn(partial(self._staging.reduce_shares, buffer, into, op), timeout)
        else:
            self._turn(partial(self._staging.reduce, source, target, op), timeout)

    @shielded
    def all_reduce_norm(
        self,
        buffer: SymmetricBuffer | ArrayLike,
        residual: SymmetricBuffer | ArrayLike,
        weight: SymmetricBuffer | ArrayLike,
        *,
        out: SymmetricBuffer | ArrayLike | None = None,
        total: SymmetricBuffer | ArrayLike | None = None,
        epsilon: float = 1e-6,
        stream: object = None,
        timeout: float | None = None,
    ) -> None:
        """Sum up over all ranks, add a residual, and normalize each row by its root mean square (RMSNorm).

        A decoding layer does this after attention and after its feed-forward part, here in one kernel on a GPU. The sum
        over the ranks is that of :meth:`all_reduce`, bit for bit; so is `total`, of :meth:`all_reduce` and an addition.
        The normalized rows have the same bits on all ranks.

        Raises what :meth:`all_reduce` does.

        Parameters
        ----------
        buffer : SymmetricBuffer or array
            The contribution of this rank: rows of float32, float16 or bfloat16. On a GPU rows are of a multiple of 16
            bytes, at most 32 KiB, and all arrays begin at multiples of 16.
        residual : SymmetricBuffer or array
            The addend to the sum: as `buffer`, and the same on all ranks.
        weight : SymmetricBuffer or array
            One row, with which each is multiplied in the end.
        out : SymmetricBuffer or array, optional
            Where the normalized rows go; by default into `buffer`.
        total : SymmetricBuffer or array, optional
            Where the sum with the residual goes; by default into `residual`.
        epsilon : float
            Added to the mean of the squares.
        stream, timeout : object, float, optional
            As those of :meth:`all_reduce`.
        """
        if is_on_gpu(buffer):
            given = (buffer, residual, weight, out, total)
            self._check_of_group(*given)
            self._turn(partial(self._compute, OnGpu.all_reduce_norm, *given, epsilon, stream), timeout)
            return
        _check_no_stream(stream)
        source, before, scale = self._flat(buffer), self._flat(residual), self._flat(weight)
        epsilon = host.check_norm(dtype_name(source.dtype), source.size, scale.size, epsilon)
        target = self._flat(buffer if out is None else out, writable=True)
        into = self._flat(residual if total is None else total, writable=True)
        for one in (before, target, into):
            host.check_out(one, source, source.size)
        host.check_out(scale, source, scale.size)
        reduced = source.copy()
        self._turn(partial(self._staging.reduce, source, reduced, "sum"), timeout)
        target[:], into[:] = host.normalize(reduced, before, scale, epsilon)

    @shielded
    def broadcast(
        self, buffer: SymmetricBuffer | ArrayLike, root: int = 0, *, stream: object = None, timeout: float | None = None
    ) -> None:
        """Copy the array of one rank to those of all.

        Raises what :meth:`all_reduce` does.

        Parameters
        ----------
        buffer : SymmetricBuffer or array
            As that of :meth:`all_reduce`; of any element type. On a GPU a symmetric buffer.
        root : int
            The rank that has the array.
        stream : object, optional
            As that of :meth:`all_reduce`.
        timeout : float, optional
            Seconds to wait for the others; by default those of the group.
        """
        if type(root) is not int or not 0 <= root < self.size:
            raise UsageError(f"root {root!r:.40} is no rank of a group of {self.size}")
        if is_on_gpu(buffer):
            self._check_of_group(buffer)
            self._turn(partial(self._compute, OnGpu.broadcast, buffer, root, stream), timeout)
            return
        _check_no_stream(stream)
        array = self._flat(buffer, writable=self.rank != root)
        about = about_of("broadcast", root, array.dtype, array.nbytes)
        self._turn(
            partial(self._staging.move, about, array, 1, partial(host.take_root, array, root, self.rank)), timeout
        )

    @shielded
    def all_gather(
        self,
        source: SymmetricBuffer | ArrayLike,
        out: ArrayLike,
        *,
        stream: object = None,
        timeout: float | None = None,
    ) -> None:
        """Put the arrays of all ranks behind one another, by rank, into an array of each rank.

        Raises what :meth:`all_reduce` does.

        Parameters
        ----------
        source : SymmetricBuffer or array
            As that of :meth:`all_reduce`; of any element type.
        out : array
            Of the same element type, with as many elements as all of them together.
        stream : object, optional
            As that of :meth:`all_reduce`; on a GPU the source is a symmetric buffer.
        timeout : float, optional
            Seconds to wait for the others; by default those of the group.
        """
        if is_on_gpu(source):
            self._check_of_group(source)
            self._turn(partial(self._compute, OnGpu.all_gather, source, out, stream), timeout)
            return
        _check_no_stream(stream)
        array, into = self._flat(source), self._flat(out, writable=True)
        host.check_out(into, array, array.size * self.size)
        host.check_apart(array, into, self.rank * array.nbytes)
        rows = into.reshape(self.size, -1)
        about = about_of("all_gather", array.dtype, array.nbytes)
        self._turn(partial(self._staging.move, about, array, 1, partial(host.take_all, rows)), timeout)

    @shielded
    def reduce_scatter(
        self,
        source: SymmetricBuffer | ArrayLike,
        out: ArrayLike,
        op: Literal["sum", "min", "max"] = "sum",
        *,
        stream: object = None,
        timeout: float | None = None,
    ) -> None:
        """Combine the arrays of all ranks as :meth:`all_reduce` does, and give each rank its part of the result.

        Raises what :meth:`all_reduce` does.

        Parameters
        ----------
        source : SymmetricBuffer or array
            As that of :meth:`all_reduce`, with as many elements as there are ranks, times some number.
        out : array
            Of the same element type, with that number of elements: the first rank gets the first of them.
        op : {"sum", "min", "max"}
            The operation.
        stream : object, optional
            As that of :meth:`all_reduce`; on a GPU the source is a symmetric buffer.
        timeout : float, optional
            Seconds to wait for the others; by default those of the group.
        """
        if is_on_gpu(source):
            self._check_of_group(source)
            self._turn(partial(self._compute, OnGpu.reduce_scatter, source, out, op, stream), timeout)
            return
        _check_no_stream(stream)
        array, into = self._flat(source), self._flat(out, writable=True)
        host.check(op, dtype_name(array.dtype))
        host.check_out(array, into, into.size * self.size)
        host.check_apart(array, into, -self.rank * into.nbytes)
        about = about_of("reduce_scatter", op, array.dtype, array.nbytes)
        self._turn(
            partial(self._staging.move, about, array, self.size, partial(host.take_reduced, into, op, self.rank)),
            timeout,
        )

    @shielded
    def all_to_all(
        self,
        source: SymmetricBuffer | ArrayLike,
        out: ArrayLike,
        *,
        stream: object = None,
        timeout: float | None = None,
    ) -> None:
        """Send the n-th part of the array of each rank to rank n, which puts them behind one another, by rank.

        Raises what :meth:`all_reduce` does.

        Parameters
        ----------
        source : SymmetricBuffer or array
            As that of :meth:`all_reduce`; of any element type, with equal parts for all ranks.
        out : array
            Of the same element type and as many elements.
        stream : object, optional
            As that of :meth:`all_reduce`; on a GPU the source is a symmetric buffer.
        timeout : float, optional
            Seconds to wait for the others; by default those of the group.
        """
        if is_on_gpu(source):
            self._check_of_group(source)
            self._turn(partial(self._compute, OnGpu.all_to_all, source, out, stream), timeout)
            return
        _check_no_stream(stream)
        array, into = self._flat(source), self._flat(out, writable=True)
        host.check_out(into, array, array.size)
        host.check_apart(array, into)
        if array.size % self.size:
            raise UsageError(f"{array.size} elements have no {self.size} equal parts")
        about = about_of("all_to_all", array.dtype, array.nbytes)
        rows = into.reshape(self.size, -1)
        self._turn(
            partial(self._staging.move, about, array, self.size, partial(host.take_parts, rows, self.rank)), timeout
        )

    def _check_of_group(self, *given: SymmetricBuffer | ArrayLike | None) -> None:
        """Refuse symmetric buffers of another group."""
        if any(isinstance(one, SymmetricBuffer) and not one.is_of(self) for one in given):
            raise UsageError(
                f"the buffer is none of the group {self.name!r}: give its array, which is of this rank alone"
            )

    def _gpu(self) -> OnGpu:
        if self._on_gpu is None:
            self._on_gpu = OnGpu(self.rank, self.size, self.timeout, self.name, self._routes, self._share_gpus)
            self._wakes.append(self._on_gpu)
        return self._on_gpu

    def _compute(self, act: Callable[..., None], *given: Any) -> None:
        """Make a call on a GPU. The last thing given is when the set-up that it may need has to be over."""
        *arguments, deadline = given
        self._spoke.check()
        on_gpu = self._gpu()
        on_gpu.check()
        on_gpu.make = lambda nbytes, device: self._make(nbytes, "uint8", device, None, None, deadline, "workspace")
        on_gpu.agree = lambda words: close_said(self._agree("kernels", words, deadline=deadline))
        act(on_gpu, *arguments)

    def _flat(self, given: SymmetricBuffer | ArrayLike, *, writable: bool = False) -> np.ndarray[Any, Any]:
        """Return the elements of this rank's array in one dimension, in its own memory."""
        self._check_of_group(given)
        return host.flat(given, self.rank, writable=writable)

    # -- one call of this rank ------------------------------------------------------------------------------------
    def _turn(self, act: Callable[[float], _T], timeout: float | None) -> _T:
        """Make a call, which is told its deadline, while no other thread makes one."""
        self.handle  # noqa: B018  (the check)
        patience = self.timeout if timeout is None else seconds(timeout)
        if self._lock._is_owned():  # type: ignore[attr-defined]  # typeshed has it not
            raise BusyError(f"a call of the group {self.name!r} is under way in this thread: not from a signal handler")
        deadline = time.monotonic() + patience
        if not self._lock.acquire(blocking=False):
            take(self._lock)  # its calls end with deadlines of their own
        try:
            return self._guarded(act, deadline)
        finally:
            self._lock.release()

    def _guarded(self, act: Callable[[float], _T], deadline: float) -> _T:
        """Make a call, and say so to the others if this rank cannot go on: they are not to wait for it."""
        signals = self._signals
        if signals.has_given_up:
            raise gave_up_error(signals.blamed, self.name)
        before = signals.arrived
        try:
            return act(deadline)
        except DisagreementError:
            raise
        except BaseException as error:
            # All ranks get the result of a vote, and nothing has begun before this rank voted.
            is_ours = not isinstance(error, VramError)
            if is_ours or signals.arrived != before:
                ranks = error.ranks if isinstance(error, PeerGoneError) else ()
                signals.give_up(ranks[0] if ranks else self.rank)
            if is_ours:
                self._spoke.leave()  # those who wait in a vote hear of it, too
            raise

    # -- the end --------------------------------------------------------------------------------------------------
    @shielded
    def close(self, *, strict: bool = False) -> None:
        """Leave the group. Buffers stay until they are closed; the other ranks hear of it. Idempotent."""
        if self._claim.handle.is_open:  # and not that of a parent's, in a forked child
            is_free = not self._lock._is_owned() and self._lock.acquire(blocking=False)  # type: ignore[attr-defined]
            if is_free:
                self._lock.release()
            else:
                self._signals.give_up(self.rank)  # a call is under way: in another thread, or a signal handler's
        self._staging.close()
        if self._on_gpu is not None:
            self._on_gpu.close()
        super().close(strict=strict)
        if self.is_closed:
            self._spoke.join()

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"without {', '.join(map(str, self.gone))}" if self.gone else "complete"
        return f"<Group {self.name!r}, rank {self.rank} of {self.size}, {state}>"


def _wake(signals: list[Signals | OnGpu]) -> None:
    for one in signals:
        one.wake()


def _check_no_stream(stream: object) -> None:
    if stream is not None:
        raise UsageError("a call on memory of the host has no stream: leave stream= out")
