"""All-reduces of torch tensors by a :class:`~vram.Group`: as vLLM's tensor parallelism calls them, or in compiled code.

:class:`CustomAllreduce` has the methods of vLLM's class of that name, so that it can be put in its place
(``vllm.distributed.device_communicators.custom_all_reduce``). A tensor needs no registration, also in a CUDA graph:
each rank pushes what it has to the others. Large ones that were met in a capture are registered after it, and are then
read where they are. :func:`all_reduce` and
:func:`all_reduce_norm` are operators of torch, which ``torch.compile`` keeps as they are.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import Any

import torch

from ..collectives import Group
from ..collectives.kernels import WIDEST_ROW
from ..errors import UsageError
from .nccl import Nccl

__all__ = ["CustomAllreduce", "all_reduce", "all_reduce_norm"]

_MAX_SIZE = 64 << 20  # bytes: above, NCCL is about as fast
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_groups: dict[str, Group] = {}  # of each CustomAllreduce that is not closed: operators take words, and no objects
_numbers = itertools.count()


@torch.library.custom_op("vram::all_reduce", mutates_args=())  # type: ignore[untyped-decorator]
def _all_reduce(tensor: torch.Tensor, group: str) -> torch.Tensor:
    out = torch.empty_like(tensor)
    _group_of(group).all_reduce(tensor, out=out, stream=_stream_of(tensor))
    return out


def _group_of(name: str) -> Group:
    found = _groups.get(name)
    if found is None:
        raise UsageError(f"there is no group {name!r} (any more): it was closed, or is of another process")
    return found


def _stream_of(tensor: torch.Tensor) -> object:
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


@_all_reduce.register_fake  # type: ignore[untyped-decorator]
def _(tensor: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(tensor)


def all_reduce(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """Return the sum of the tensors of all ranks, on the current stream.

    Parameters
    ----------
    tensor : torch.Tensor
        Contiguous, on the host or the group's GPU.
    group : str
        A name as of :attr:`CustomAllreduce.name`.

    Returns
    -------
    torch.Tensor
        A new one.

    Raises
    ------
    UsageError, WaitTimeoutError, PeerGoneError
        As :meth:`vram.Group.all_reduce`.
    """
    found: torch.Tensor = _all_reduce(tensor, group)
    return found


@torch.library.custom_op("vram::all_reduce_norm", mutates_args=())  # type: ignore[untyped-decorator]
def _all_reduce_norm(
    tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    out, total = torch.empty_like(tensor), torch.empty_like(residual)
    _group_of(group).all_reduce_norm(
        tensor, residual, weight, out=out, total=total, epsilon=epsilon, stream=_stream_of(tensor)
    )
    return out, total


@_all_reduce_norm.register_fake  # type: ignore[untyped-decorator]
def _(
    tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(tensor), torch.empty_like(residual)


def all_reduce_norm(
    tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum up over all ranks, add a residual, and normalize the last dimension (RMSNorm), on the current stream.

    Parameters
    ----------
    tensor, residual : torch.Tensor
        Of one shape, contiguous, on the host or the group's GPU.
    weight : torch.Tensor
        Of the last dimension.
    epsilon : float
        Added to the mean of the squares.
    group : str
        A name as of :attr:`CustomAllreduce.name`.

    Returns
    -------
    tuple of torch.Tensor
        The normalized sum, and the sum with the residual: new tensors.

    Raises
    ------
    UsageError, WaitTimeoutError, PeerGoneError
        As :meth:`vram.Group.all_reduce_norm`.
    """
    found: tuple[torch.Tensor, torch.Tensor] = _all_reduce_norm(tensor, residual, weight, epsilon, group)
    return found


class CustomAllreduce:
    """A group with the methods that vLLM's tensor parallelism calls.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        Of processes of one machine, such as vLLM's CPU group (gloo): they meet through it.
    device : torch.device, str or int
        Where tensors are: this rank's GPU, or ``"cpu"``.
    max_size : int
        Bytes above which a tensor is left to others.
    dtype : torch.dtype
        Of the tensors: what is needed for it is loaded here, on all ranks, so that a graph can be captured afterwards.
    nccl : torch.distributed.ProcessGroup, optional
        Of the same ranks, with the backend NCCL: what is large for :meth:`all_reduce` is handed over to it.
    routes, share_gpus : str or os.PathLike, optional; bool
        As those of :class:`vram.Group`.

    Attributes
    ----------
    disabled : bool
        Never: what keeps it from being made is raised.
    name : str
        A tensor as :func:`all_reduce` takes it.
    """

    def __init__(
        self,
        group: Any,
        device: torch.device | str | int,
        max_size: int = _MAX_SIZE,
        *,
        dtype: torch.dtype = torch.bfloat16,
        timeout: float = 30.0,
        nccl: Any = None,
        routes: str | os.PathLike[str] | None = None,
        share_gpus: bool = False,
    ) -> None:
        self.device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        self.max_size = max_size
        self.disabled = False
        self._group = Group.from_torch(group, timeout=timeout, routes=routes, share_gpus=share_gpus)
        self.name = f"{self._group.name}-{next(_numbers)}"
        _groups[self.name] = self._group
        try:
            if nccl is not None:
                self._group.hand_over(Nccl(nccl))
            self.custom_all_reduce(torch.zeros(8, dtype=dtype, device=self.device))
        except BaseException:
            self.close()
            raise

    def should_custom_ar(self, inp: torch.Tensor) -> bool:
        """Whether a tensor is one for this: on its device, contiguous, of floats, and not too large."""
        return (
            not self.disabled
            and inp.device.type == self.device.type
            and inp.dtype in _DTYPES
            and inp.is_contiguous()
            and 0 < inp.numel() * inp.element_size() <= self.max_size
        )

    def custom_all_reduce(self, input: torch.Tensor) -> torch.Tensor | None:
        """Return the sum over all ranks as a new tensor; None for what :meth:`should_custom_ar` leaves to others."""
        return all_reduce(input, self.name) if self.should_custom_ar(input) else None

    def all_reduce(
        self, inp: torch.Tensor, *, out: torch.Tensor | None = None, registered: bool = False
    ) -> torch.Tensor:
        """Sum a tensor up, into `out` if there is one. Whether it was registered makes no difference here."""
        if out is None:
            return all_reduce(inp, self.name)
        self._group.all_reduce(inp, out=out, stream=_stream_of(inp))
        return out

    def should_normalize(self, inp: torch.Tensor) -> bool:
        """Whether a tensor is one for :meth:`all_reduce_norm`: as :meth:`should_custom_ar`, with rows that it takes."""
        width = inp.shape[-1] * inp.element_size() if inp.dim() else 0
        is_fit = inp.device.type == "cpu" or (width % 16 == 0 and inp.data_ptr() % 16 == 0 and width <= WIDEST_ROW)
        return self.should_custom_ar(inp) and is_fit

    def all_reduce_norm(
        self, inp: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float = 1e-6
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what :func:`all_reduce_norm` does."""
        return all_reduce_norm(inp, residual, weight, epsilon, self.name)

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Go round the capture of a CUDA graph, on all ranks; at its end :meth:`register_graph_buffers` is called."""
        yield
        self.register_graph_buffers()

    def register_graph_buffers(self) -> tuple[str, ...]:
        """Have graphs reach large tensors of all ranks where they are, on all ranks.

        Small ones need it not: each rank pushes what it has. Tensors of torch's caching allocator are of cudaMalloc, or
        of its expandable segments where those can leave the process.

        Returns
        -------
        tuple of str
            Why some are copied through memory of the group; see :meth:`vram.Group.register_captured`, also for what is
            raised.
        """
        return self._group.register_captured()

    def statistics(self) -> dict[str, int]:
        """Return how often which kernel was launched, and how often NCCL: see :meth:`vram.Group.statistics`."""
        return self._group.statistics()

    def check(self) -> None:
        """Raise what went wrong on a GPU; see :meth:`vram.Group.check`."""
        self._group.check()

    def close(self) -> None:
        """Leave the group. Graphs that were captured with it are of no use any more. Idempotent."""
        self.disabled = True
        _groups.pop(self.name, None)
        self._group.close()
