"""PyTorch views. torch stays optional: nothing here imports it before a tensor is asked for."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedError, UsageError
from .dtypes import TORCH_SHELL, as_dtype, from_torch_dtype, is_plain, packed_name
from .numpy_on_use import np
from .views import NDArray, claimed_writable

if TYPE_CHECKING:
    import torch

# Element types that numpy lacks go to torch as integers of the same size, and are viewed as their type there. torch
# shares the storage between the two, and with it the pin. Signed, since torch knew those first.
_CARRIER = {1: "int8", 2: "int16", 4: "int32"}


def tensor(
    view: Callable[[str, np.dtype[Any], bool], NDArray],
    dtype: np.dtype[Any],
    *,
    full: bool = False,
    gpu: int | None = None,
    ready: Callable[[int], None] | None = None,
) -> torch.Tensor:
    """Return a tensor over an array's memory, which it keeps alive; see :meth:`Array.torch`. `view` makes a numpy (or
    device) view for (holder, dtype, full); `ready` has a stream wait for the work that fills the memory."""
    from .dlpack import capsule  # loads ctypes

    torch = import_torch()
    wanted = to_torch_dtype(dtype)
    shown = dtype if is_plain(dtype) else np.dtype(_CARRIER[dtype.itemsize])
    # torch knows no read-only memory, and its older releases refuse a capsule that says so: this one does not.
    made = torch.utils.dlpack.from_dlpack(capsule(claimed_writable(view("torch tensor", shown, full)), shown, gpu=gpu))
    if gpu is not None and ready is not None:
        ready(torch.cuda.current_stream(gpu).cuda_stream or 1)
    return made if made.dtype == wanted else made.view(wanted)


def check_writable(writable: object) -> bool:
    """Return whether tensors get memory of their own; raises UsageError for what is neither "copy" nor None."""
    if writable not in (None, "copy"):
        raise UsageError(
            f'writable must be "copy", for tensors with memory of their own, or None, not {writable!r:.40}'
        )
    return writable is not None


class Tensors:
    """Many tensors over one flat array of bytes: one view of the memory for each element type, and parts of that.
    Each part keeps what `whole` keeps."""

    def __init__(self, whole: torch.Tensor) -> None:
        self._whole: Any = whole
        self._typed: dict[np.dtype[Any] | str, Any] = {}  # a packed type is equal to uint8, and its name is not
        self._steps: dict[tuple[int, ...], tuple[int, ...]] = {}

    def part(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return the tensor at an offset in bytes; None where torch cannot show it as a part of the whole."""
        if offset % dtype.itemsize:
            return None
        kind = packed_name(dtype) or dtype
        typed = self._typed.get(kind)
        if typed is None:
            room = self._whole.numel() // dtype.itemsize * dtype.itemsize
            typed = self._typed[kind] = self._whole[:room].view(to_torch_dtype(dtype))
        steps = self._steps.get(shape)
        if steps is None:
            steps = self._steps[shape] = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        made: torch.Tensor = typed.as_strided(shape, steps, offset // dtype.itemsize)
        return made


def to_torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Return torch's word for an element type; ``torch.uint8`` for a packed type (several elements a byte) that torch
    lacks. Raises UnsupportedError if the installed torch has none, or torch is not installed."""
    torch = import_torch()
    packed = packed_name(dtype)
    if packed is not None:
        found = getattr(torch, packed, torch.uint8)
    else:
        named = dtype.isnative and not TORCH_SHELL.fullmatch(dtype.name)
        found = getattr(torch, dtype.name, None) if named else None
    if not isinstance(found, torch.dtype):
        raise UnsupportedError(
            f"a tensor of {dtype}", "a torch type of that name", f"torch {torch.__version__}, which has none",
            "Use .numpy()",
        )  # fmt: skip
    return found


def is_tensor(value: object) -> bool:
    """Whether a value is a torch tensor. Does not import torch: who has a tensor did."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def array_of(tensor: torch.Tensor) -> NDArray:
    """Return a numpy view of a tensor's memory, which it keeps alive, in `ml_dtypes`' types where numpy has none.
    Raises UsageError if the tensor is not on the host, not strided, or of a type that numpy cannot show."""
    torch = import_torch()
    if tensor.device.type != "cpu":
        raise UsageError(f"the tensor is on {tensor.device}, neither on the host nor on a CUDA GPU; give tensor.cpu()")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise UsageError(f"the tensor is {tensor.layout}, {tensor.dtype}; only dense, strided ones have plain memory")
    dtype = from_torch_dtype(tensor.dtype)
    plain = tensor.detach().resolve_conj().resolve_neg()
    if not is_plain(dtype):
        plain = plain.view(getattr(torch, _CARRIER[dtype.itemsize]))
    shown: NDArray = plain.numpy()
    return shown if shown.dtype == dtype and packed_name(dtype) is None else shown.view(as_dtype(dtype))


def import_torch() -> Any:
    """Return torch. Raises UnsupportedError where it is not installed."""
    try:
        import torch
        import torch.utils.dlpack
    except ImportError:
        raise UnsupportedError(
            "a torch tensor", "PyTorch", "no such package", "Install it: pip install '.[torch]' in a clone of vram"
        ) from None
    return torch
