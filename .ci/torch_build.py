"""Exit 0 if the torch that pip would install here is a build without CUDA; otherwise say on one line what it is."""

from __future__ import annotations

import json
import subprocess
import sys


def main(requirement: str) -> int:
    """Ask pip, without installing anything."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed"]
    try:
        done = subprocess.run([*command, "--report", "-", requirement], capture_output=True, text=True, timeout=90)
    except subprocess.TimeoutExpired:
        print(f"the package index did not answer about {requirement} within 90 s")
        return 1
    if done.returncode:
        print(f"{requirement} cannot be had: {(done.stderr.strip().splitlines() or ['pip failed'])[-1]}")
        return 1
    found = json.loads(done.stdout)["install"][0]
    libraries = [need for need in found["metadata"].get("requires_dist", []) if need.startswith(("nvidia", "cuda"))]
    if libraries:
        print(f"{requirement} is to be had only with CUDA ({len(libraries)} packages of libraries)")
        return 1
    print(f"{requirement}: {found['metadata']['version']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
