"""A table of vectors that grows where it is, while another process searches it.

The table has addresses for a million rows from the start and takes memory as it grows; no row is ever copied.
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection

import numpy as np

import vram

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "host"  # or "cuda:0"
WIDTH, BATCH = 64, 20_000


def search(questions: Connection) -> None:
    """Find the nearest row to each question, among as many as there are."""
    with vram.attach("vectors", growing=True, timeout=60.0) as lease:
        while (question := questions.recv()) is not None:
            lease.refresh()
            rows = lease["rows"].to_host()  # on the host `.numpy()` is the same without a copy
            questions.send((len(rows), int(np.argmax(rows @ question))))


def main() -> None:
    """Add vectors in batches, and ask for one of the newest each time."""
    generator = np.random.default_rng(1)
    with vram.private_keeper():
        table = vram.empty((0, WIDTH), "float32", device=DEVICE, capacity=(1_000_000, WIDTH))
        table.resize(1)
        vram.publish("vectors", {"rows": table}, writable=True)  # among processes that trust each other
        ours, theirs = multiprocessing.Pipe()
        reader = multiprocessing.get_context("spawn").Process(target=search, args=(theirs,))
        reader.start()
        theirs.close()
        where = table.address
        for _ in range(4):
            batch = generator.standard_normal((BATCH, WIDTH), dtype="float32")
            batch /= np.linalg.norm(batch, axis=1, keepdims=True)
            start = len(table)
            table.resize(start + BATCH)
            table[start : start + BATCH] = batch
            vram.publish("vectors", {"rows": table}, writable=True)  # the same memory, with more behind it
            ours.send(batch[BATCH // 2])
            rows, found = ours.recv()
            print(f"{rows} rows at 0x{table.address:x}, {table.nbytes >> 20} MiB: found row {found}")
            assert (rows, found) == (len(table), start + BATCH // 2) and table.address == where
        ours.send(None)
        reader.join()


if __name__ == "__main__":
    main()
