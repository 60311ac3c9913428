"""``--load-format vram`` in a vLLM that the adapter was not written for: vLLM's own loader, and nothing is shared."""

from __future__ import annotations

import copy
from typing import Any

from vllm.model_executor.model_loader.default_loader import DefaultModelLoader


class PlainLoader(DefaultModelLoader):  # type: ignore[misc]
    """vLLM's loader for the format ``auto``, without the adapter's options."""

    def __init__(self, load_config: Any, *args: Any, **kwargs: Any) -> None:
        plain = copy.copy(load_config)
        plain.load_format = "auto"
        plain.model_loader_extra_config = {}
        super().__init__(plain, *args, **kwargs)
