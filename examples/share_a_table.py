"""One process reads a DataFrame, all others have it at once: its columns are shared memory, and copied by nobody.

It takes pandas, and pyarrow (the extra "tables"). With polars it is the same, but for the first function.
"""

from __future__ import annotations

import multiprocessing
import sys
import time

import numpy as np
import pandas as pd

import vram

ROWS = 500_000


def load() -> pd.DataFrame:
    """What takes long, such as pd.read_parquet: done by one process, for all."""
    chance = np.random.default_rng(5)
    return pd.DataFrame(
        {
            "when": pd.date_range("2026-01-01", periods=ROWS, freq="s", tz="Europe/Berlin"),
            "price": chance.random(ROWS),
            "city": pd.Categorical.from_codes(chance.integers(0, 3, ROWS), ["Berlin", "Kyoto", "Lima"]),
            "note": pd.array(["as agreed", None] * (ROWS // 2), dtype="str"),
        }
    )


def mean_price(keeper: str, city: str) -> tuple[str, float, float]:
    """In a worker: attach the table and look at some of its rows."""
    start = time.perf_counter()
    with vram.attach("trades", keeper=keeper) as lease:
        trades = lease.table()  # a DataFrame, read-only; table("polars") would be one of polars
    took = time.perf_counter() - start
    return city, float(trades.loc[trades["city"] == city, "price"].mean()), took


def main() -> None:
    """Publish a table, and let a pool of workers look at it."""
    with vram.private_keeper() as kept:
        with vram.attach_or_publish("trades", load, keeper=kept) as lease:
            table = lease.table()
            print(f"{len(table)} rows in {lease.nbytes >> 20} MiB: {', '.join(table.columns)}")
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            found = pool.starmap(mean_price, [(kept.path, city) for city in table["city"].cat.categories])
        for city, price, took in found:
            print(f"{city}: {price:.3f} (attached within {took * 1e3:.0f} ms)")
            assert price == table.loc[table["city"] == city, "price"].mean()


if __name__ == "__main__":
    sys.exit(main())
