"""Jobs of joblib attach what they read by its name, whatever the size of the array.

A job gets a name and a part. Its worker attaches the entry, which copies nothing, and lets go of it with the job.
"""

from __future__ import annotations

import sys

import numpy as np
from joblib import Parallel, delayed

import vram

ROWS, JOBS = 100_000, 8


def norms_of(name: str, part: slice) -> float:
    """Return the largest norm among some rows."""
    with vram.attach(name) as lease:
        return float(np.linalg.norm(lease["rows"].numpy()[part], axis=1).max())


def main() -> None:
    """Look for the longest of 100,000 rows, in as many parts as there are jobs."""
    rows = np.random.default_rng(5).standard_normal((ROWS, 64), dtype="float32")
    parts = [slice(start, start + ROWS // JOBS) for start in range(0, ROWS, ROWS // JOBS)]
    with vram.private_keeper():  # the default keeper of the workers, too: they are children of this process
        vram.publish("rows", {"rows": rows})
        found = Parallel(n_jobs=2)(delayed(norms_of)("rows", part) for part in parts)
    longest = float(np.linalg.norm(rows, axis=1).max())
    is_right = max(found) == longest
    print(f"{len(found)} jobs; the longest row has {max(found):.3f}, which is {'right' if is_right else 'WRONG'}")
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
