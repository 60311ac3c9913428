"""NCCL as what a :class:`~vram.Group` hands large all-reduces over to: that of ``torch.distributed``.

Where multicast objects must not be made, set ``NCCL_NVLS_ENABLE=0`` before NCCL starts.
"""

from __future__ import annotations

from typing import Any

from ..arrays.gpu import CudaSource
from ..errors import UnsupportedError, UsageError

__all__ = ["Nccl"]


class Nccl:
    """A process group of ``torch.distributed`` with the backend NCCL, of the same ranks as the group.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        By default that of all processes.

    Raises
    ------
    UsageError
        If it has no NCCL.
    UnsupportedError
        If there is no torch.

    Examples
    --------
    >>> group.hand_over(Nccl(torch.distributed.group.WORLD))  # doctest: +SKIP
    """

    def __init__(self, group: Any = None) -> None:
        try:
            import torch
            import torch.distributed as dist
        except ImportError:
            raise UnsupportedError(
                "NCCL of torch.distributed",
                "torch",
                "no such package",
                "Install it: pip install '.[torch]' in a clone of vram",
            ) from None
        if not dist.is_available() or not dist.is_initialized():
            raise UsageError("torch.distributed is not initialised: call torch.distributed.init_process_group before")
        backend = str(dist.get_backend(group))
        if "nccl" not in backend:
            raise UsageError(f"that group of torch's has the backend {backend}, and not nccl")
        self._torch, self._dist, self._group = torch, dist, group
        self._name = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))} of torch {torch.__version__}"

    @property
    def name(self) -> str:
        """The name of the library, with its version."""
        return self._name

    def all_reduce(self, source: CudaSource, target: CudaSource, op: str, stream: int) -> None:
        """Put an all-reduce on a stream, copied to its target first."""
        torch, dist = self._torch, self._dist
        which = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}[op]
        into = self._tensor(target)
        is_default = stream in (0, 1)  # the legacy one
        device = torch.device("cuda", target.gpu)
        where = torch.cuda.default_stream(device) if is_default else torch.cuda.ExternalStream(stream, device)
        with torch.cuda.stream(where):
            if source.address != target.address:
                into.copy_(self._tensor(source))
            dist.all_reduce(into, op=which, group=self._group)

    def _tensor(self, source: CudaSource) -> Any:
        """Return memory of a GPU as a tensor of one dimension: by bytes, since the interface has no bfloat16."""
        dtype = getattr(self._torch, source.dtype.name)
        return self._torch.as_tensor(_Bytes(source), device=f"cuda:{source.gpu}").view(dtype)


class _Bytes:
    def __init__(self, source: CudaSource) -> None:
        self.owner = source
        self.__cuda_array_interface__ = {
            "data": (source.address, False), "shape": (source.nbytes,), "typestr": "|u1", "version": 3, "strides": None,
            "stream": None,
        }  # fmt: skip
