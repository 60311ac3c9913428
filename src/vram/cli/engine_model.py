"""A decoder-only transformer in a few lines: what ``vram demo engine`` generates tokens with. It needs torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large a model is."""

    words: int
    width: int
    layers: int
    heads: int
    context: int
    dtype: str

    @classmethod
    def of(cls, device: str, nbytes: int) -> Sizes:
        """Return sizes of a model of about so many bytes: 32-bit numbers on the host, 16-bit ones on a GPU."""
        on_host = device == "host"
        words, width, itemsize = (4096, 256, 4) if on_host else (32_000, 2048, 2)
        layers = (nbytes // itemsize - 2 * words * width) // (12 * width * width)
        return cls(words, width, max(layers, 1), width // 64, 256, "float32" if on_host else "bfloat16")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor; those of all layers are one."""
        layers, width = self.layers, self.width
        return {
            "embed": (self.words, width),
            "positions": (self.context, width),
            "norms": (2 * layers + 1, width),
            "qkv": (layers, width, 3 * width),
            "out": (layers, width, width),
            "up": (layers, width, 4 * width),
            "down": (layers, 4 * width, width),
            "head": (width, self.words),
        }

    @property
    def cache(self) -> tuple[int, ...]:
        """The shape of the cache of keys and values."""
        return (self.layers, 2, self.context, self.heads, self.width // self.heads)


def fill(weights: Mapping[str, Any], seed: int) -> None:
    """Put random numbers into the weights, in place: the same for the same seed."""
    import torch

    for number, (name, tensor) in enumerate(sorted(weights.items())):
        generator = torch.Generator(tensor.device).manual_seed(1000 * seed + number)
        if name == "norms":
            tensor.fill_(1)
        else:
            spread = 1.0 if name in ("embed", "positions") else float(tensor.shape[-2]) ** -0.5
            tensor.normal_(std=spread, generator=generator)
    if any(tensor.is_cuda for tensor in weights.values()):
        torch.cuda.synchronize()


class Model:
    """The transformer, over weights and a cache wherever they are."""

    def __init__(self, sizes: Sizes, weights: Mapping[str, Any], cache: Any) -> None:
        self._sizes, self._weights, self._cache = sizes, weights, cache

    def generate(self, prompt: list[int], count: int) -> Iterator[int]:
        """Generate tokens, each the likeliest."""
        import torch

        tokens = torch.tensor(prompt, device=self._cache.device)
        at = 0
        for _ in range(count):
            with torch.no_grad():
                found = self._step(tokens, at).argmax()
            at += len(tokens)
            tokens = found.reshape(1)
            yield int(found)

    def _step(self, tokens: Any, start: int) -> Any:
        from torch.nn.functional import gelu, rms_norm, scaled_dot_product_attention

        weights, width, stop = self._weights, self._sizes.width, start + len(tokens)
        norms = iter(weights["norms"])
        x = weights["embed"][tokens] + weights["positions"][start:stop]
        for layer, cache in enumerate(self._cache):
            qkv = rms_norm(x, (width,), next(norms)) @ weights["qkv"][layer]
            queries, *new = qkv.view(len(tokens), 3, self._sizes.heads, -1).unbind(1)
            for part, old in zip(new, cache, strict=True):
                old[start:stop] = part
            query, key, value = (part.transpose(0, 1)[None] for part in (queries, *cache[:, :stop]))
            seen = scaled_dot_product_attention(query, key, value, is_causal=len(tokens) > 1)
            x = x + seen[0].transpose(0, 1).reshape(len(tokens), width) @ weights["out"][layer]
            x = x + gelu(rms_norm(x, (width,), next(norms)) @ weights["up"][layer]) @ weights["down"][layer]
        return rms_norm(x[-1], (width,), next(norms)) @ weights["head"]
