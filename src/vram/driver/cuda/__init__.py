"""NVIDIA's driver, through cuda-bindings. Nothing here loads libcuda before :class:`CudaDriver` is made."""

from __future__ import annotations

from .driver import CudaDriver

__all__ = ["CudaDriver"]
