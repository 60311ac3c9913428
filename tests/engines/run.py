"""Run an engine's own tests against its adapter: ``make test-engines``.

    python tests/engines/run.py torch_memory_saver --package DIR --tests DIR

`package` is where its package was installed, without its dependencies; it is read and not run. `tests` is the
directory of its tests, from a checkout of its repository (its wheel and its sdist have none). They run unchanged, with
this Python.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRELOAD = "it needs a library that is preloaded and sees each cudaMalloc (TMS_INIT_ENABLE)"
LIBRARY = "it is about where the package has its compiled libraries, and there are none here"
LEFT_OUT = {
    "test_examples.py::test_cpu_backup_preload_backend_from_env": PRELOAD,
    "test_examples.py::test_training_engine": PRELOAD,
    "test_examples.py::test_cuda_vmm_granularity": PRELOAD,
    "test_examples.py::test_nested_region": PRELOAD,
    "test_configure_subprocess.py": LIBRARY,
    "test_utils.py::test_get_binary_path_from_package_uses_unsuffixed_rocm_binary": LIBRARY,
    "test_utils.py::test_get_binary_path_from_package_keeps_cuda_suffix_selection": LIBRARY,
    "test_merge_cuda_wheels.py": "it is about how the package's wheels are built",
}


def main() -> int:
    """Return 0 if all that could run did, and passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=["torch_memory_saver"])
    parser.add_argument("--package", type=Path, help="where the package was installed")
    parser.add_argument("--tests", type=Path, help="the directory of its tests")
    parser.add_argument("--select", default="", help="as pytest's -k")
    given = parser.parse_args()
    wrong = compare(given.package / given.engine) if given.package else []
    if given.package:
        print("\n".join(wrong) or f"{given.engine}: methods and parameters are those of the package")
    missing = "no directory of them was given (TMS_TESTS=)" if given.tests is None else lacks()
    if missing:
        print(f"{given.engine}: its own tests did not run here: {missing}")
        return 1 if wrong else 0
    return run(given.tests.resolve(), given.select) or (1 if wrong else 0)


def compare(package: Path) -> list[str]:
    """Say which methods of the package's class are not in ours, or take other parameters."""
    theirs = methods(package / "entrypoint.py")
    ours = methods(ROOT / "src/vram/engines/torch_memory_saver.py")
    return [
        f"TorchMemorySaver.{name} takes {parameters} there, and {ours.get(name, 'is missing')} here"
        for name, parameters in theirs.items()
        if not name.startswith("_") and ours.get(name) != parameters
    ]


def methods(file: Path) -> dict[str, list[str]]:
    """Return what the methods of the class TorchMemorySaver take: names, and defaults as they are written."""
    tree = ast.parse(file.read_text())
    values = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TorchMemorySaver")
    taken: dict[str, list[str]] = {}
    for node in found.body:
        if not isinstance(node, ast.FunctionDef) or any(".setter" in ast.unparse(one) for one in node.decorator_list):
            continue
        names = [argument.arg for argument in node.args.args]
        defaults = [
            ast.unparse(values.get(value.id, value) if isinstance(value, ast.Name) else value)
            for value in node.args.defaults
        ]
        first = len(names) - len(defaults)
        taken[node.name] = names[:first] + [f"{n}={d}" for n, d in zip(names[first:], defaults, strict=True)]
    return taken


def lacks() -> str:
    """Say what this machine lacks to run them; empty if nothing."""
    try:
        import torch
    except ImportError:
        return "there is no torch"
    return "" if torch.cuda.is_available() else "torch sees no GPU"


def run(tests: Path, select: str) -> int:
    """Run them, print how many passed, and why others are left out; return 0 if none failed."""
    shims = ROOT / "src/vram/engines/shims"
    paths = [
        shims,
        ROOT / "src",
        tests,
        Path(__file__).parent,
        *filter(None, os.environ.get("PYTHONPATH", "").split(":")),
    ]
    arguments = [argument for name in LEFT_OUT for argument in ("--deselect", name)]
    done = subprocess.run(
        # Without our settings; and where the tests are ends pytest's search for others.
        [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", tests, "--confcutdir", tests,
         "-p", "exit_codes", "-q", "-rfEs", "--tb=short", "--durations=0", "-k", select, *arguments,
         "test_examples.py", "test_utils.py"],
        cwd=tests, env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    print(done.stdout)
    for name, reason in LEFT_OUT.items():
        print(f"left out: {name}: {reason}")
    print("torch_memory_saver's tests: " + ", ".join(re.findall(r"\d+ \w+(?=, | in )", done.stdout[-200:])))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
