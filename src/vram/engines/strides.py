"""Tensors that are not contiguous, published with the strides that kernels rely on. For several adapters."""

from __future__ import annotations

from typing import Any


def flat(tensor: Any) -> tuple[Any, tuple[list[int], list[int]] | None]:
    """Return what to publish of a tensor, and the shape and strides to show it with; None if it is shown as it is. A
    tensor that is not contiguous is published as its memory, from the first element to the last."""
    if tensor.is_contiguous():
        return tensor, None
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1,), (1,)), (list(tensor.shape), list(tensor.stride()))
