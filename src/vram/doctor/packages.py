"""Installed packages that this library can use, by their metadata: none is imported."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from .finding import Finding

# The use of each package. A package with several names is published under each: the first that is installed counts.
_OPTIONAL = (
    (("numpy",), "arrays on the host"),
    (("torch",), "vram.TorchPool, tensors"),
    (("cupy-cuda13x", "cupy-cuda12x", "cupy"), "arrays on GPUs"),
    (("jax",), "arrays on GPUs"),
    (("safetensors",), "vram.publish_file"),
    (("cuda-core",), "kernels of collectives"),
    (("nixl", "nixl-cu13", "nixl-cu12"), "bytes between machines"),
    (("ray",), "Ray actors"),
    (("vllm",), "its adapter"),
    (("sglang",), "its adapter"),
    (("torch-memory-saver", "torch_memory_saver"), "what its adapter stands in for"),
)

# `pip install nixl` alone brings torch and the libraries of two CUDA releases along.
_HOW = {"nixl": "pip install --no-deps nixl nixl-cu13", "torch": "pip install torch, of your CUDA release"}


def examine() -> list[Finding]:
    """Say which of them are there."""
    return [_finding(names, purpose) for names, purpose in _OPTIONAL]


def _finding(names: tuple[str, ...], purpose: str) -> Finding:
    for name in names:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if name == "torch" and found.endswith("+cpu"):
            return Finding(
                area="packages", check=name, verdict="limited",
                said=f"{name} {found}, a build for the CPU: tensors on the host, and no vram.TorchPool",
                remedy=_HOW[name],
            )  # fmt: skip
        return Finding(area="packages", check=names[0], verdict="ok", said=f"{name} {found}: {purpose}")
    return Finding(
        area="packages",
        check=names[0],
        verdict="absent",
        said=f"not installed: {purpose}",
        remedy=_HOW.get(names[0], f"pip install {names[0]}"),
    )
