"""PyTorch, where it is there and sees the GPU; a rival that is not says so in a line."""

from __future__ import annotations

import importlib.util
from typing import Any

from ..spec import Location
from .bare_calls import ordinal_of

__all__ = ["torch_on"]


def torch_on(location: Location, notes: list[str]) -> Any:
    """Return torch, or None and a note why it is not measured."""
    if importlib.util.find_spec("torch") is None:
        notes.append("torch did not run: it is not installed")
        return None
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        notes.append(f"torch did not run: torch {torch.__version__} sees no GPU")
        return None
    if ordinal_of(location) >= torch.cuda.device_count():
        notes.append(f"torch did not run: it does not see {location}")
        return None
    torch.cuda.init()
    return torch
