"""Tables by column: a DataFrame published and attached; against copying it, pickling it, and a file of parquet."""

from __future__ import annotations

import contextlib
import importlib.util
import pickle
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import vram
from vram.bench.children import own_keeper, workplace
from vram.bench.measure import Figure, Result, Row, in_turns
from vram.spec import format_size

_TITLE = "A DataFrame, published and attached by column"
_ROW = 8 * 8 + 1 + 8 + 32  # bytes of a row: eight numbers, a code, and text of 32 bytes with its offset


def on_host(quick: bool) -> Result:
    """Measure tables of numbers, categories and text; what is read is one number of each column."""
    if missing := [name for name in ("pandas", "pyarrow") if importlib.util.find_spec(name) is None]:
        return Result("tables", _TITLE, [], [f"nothing was measured: {' and '.join(missing)} not installed"])
    total, small, rounds = (8 << 20, 1 << 20, 2) if quick else (1 << 30, 1 << 20, 5)
    with contextlib.ExitStack() as stage:
        keeper, directory = stage.enter_context(own_keeper()), stage.enter_context(workplace())
        table = _table(total // _ROW)
        rows = _published(table, keeper, rounds)
        vram.publish("large", table, keeper=keeper)
        vram.publish("small", _table(small // _ROW), keeper=keeper)
        file = directory / "table.parquet"
        table.to_parquet(file)
        pickled = pickle.dumps(table, pickle.HIGHEST_PROTOCOL)
        del table
        rows += _attached(file, pickled, keeper, rounds)
    notes = [
        f"{format_size(total)}: eight columns of numbers and points in time, a category, text of 32 bytes. The file of "
        "parquet is in the page cache, compressed as pandas does by default"
    ]
    return Result("tables", _TITLE, rows, notes)


def _table(rows: int) -> Any:
    import pandas as pd
    import pyarrow as pa

    chance = np.random.default_rng(1)
    text = pa.Array.from_buffers(
        pa.large_string(),
        rows,
        [
            None,
            pa.py_buffer(np.arange(0, 32 * (rows + 1), 32)),
            pa.py_buffer(chance.integers(97, 123, 32 * rows, dtype=np.uint8)),
        ],
    )
    columns: dict[str, Any] = {f"float{n}": chance.random(rows) for n in range(4)}
    columns |= {f"int{n}": chance.integers(0, 10**6, rows) for n in range(3)}
    columns["time"] = np.arange(rows).view("datetime64[ns]")
    columns["kind"] = pd.Categorical.from_codes(chance.integers(0, 5, rows, dtype=np.int8), [*"abcde"])
    columns["text"] = pd.StringDtype("pyarrow", na_value=np.nan).__from_arrow__(text)
    return pd.DataFrame(columns, copy=False)


def _published(table: Any, keeper: str, rounds: int) -> list[Row]:
    cases: dict[str, Callable[[], float]] = {
        "copy": partial(_copy, table),
        "publish": partial(_publish, table, keeper),
        "pickle": partial(_timed, lambda: pickle.dumps(table, pickle.HIGHEST_PROTOCOL)),
    }
    values = in_turns(cases, rounds, warm=1)
    base = Row("publish: the bytes copied alone, by numpy into fresh shared memory", Figure.of(values["copy"], "s"))
    pickled = Row("publish: pickle.dumps", Figure.of(values["pickle"], "s"))
    ours = "publish: vram.publish of the DataFrame", Figure.of(values["publish"], "s")
    return [base, Row.held(*ours, base), pickled, Row.held(*ours, pickled)]


def _attached(file: Path, pickled: bytes, keeper: str, rounds: int) -> list[Row]:
    import pandas as pd

    cases: dict[str, Callable[[], float]] = {
        "small": partial(_attach, "small", keeper, False),
        "large": partial(_attach, "large", keeper, False),
        "checked": partial(_attach, "large", keeper, True),
        "pickle": partial(_timed, lambda: _look(pickle.loads(pickled))),
        "parquet": partial(_timed, lambda: _look(pd.read_parquet(file))),
    }
    values = in_turns(cases, rounds, warm=1)
    base = Row("attach: a table of 1 MiB", Figure.of(values["small"], "ms", scale=1e3))
    found = {name: Figure.of(seconds, "ms", scale=1e3) for name, seconds in values.items()}
    ours = "attach: the whole table", found["large"]
    pickle_loads, parquet = (
        Row("attach: pickle.loads", found["pickle"]),
        Row("attach: pd.read_parquet", found["parquet"]),
    )
    return [
        base,
        Row.held(*ours, base, at_most=1.25),
        pickle_loads,
        Row.held(*ours, pickle_loads),
        Row.held("attach: the whole table, all of it checked, as another user's is", found["checked"], pickle_loads),
        parquet,
        Row.held(*ours, parquet),
    ]


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    made = work()
    seconds = time.perf_counter() - begin
    del made
    return seconds


def _copy(table: Any) -> float:
    arrays = [table[name].array for name in table.columns]
    parts = [np.asarray(getattr(array, "codes", array)) for array in arrays[:-1]]
    parts += [np.frombuffer(one, np.uint8) for one in arrays[-1].__arrow_array__().chunk(0).buffers()[1:]]
    begin = time.perf_counter()
    with vram.empty(sum(part.nbytes for part in parts), "uint8", device="host") as memory:
        at, target = 0, memory.numpy()
        for part in parts:
            target[at : at + part.nbytes] = part.view(np.uint8)
            at += part.nbytes
        return time.perf_counter() - begin


def _publish(table: Any, keeper: str) -> float:
    begin = time.perf_counter()
    vram.publish("again", table, keeper=keeper)
    seconds = time.perf_counter() - begin
    vram.remove("again", keeper=keeper)
    return seconds


def _attach(name: str, keeper: str, check: bool) -> float:
    begin = time.perf_counter()
    with vram.attach(name, keeper=keeper) as lease:
        _look(lease.table(check=check))
        return time.perf_counter() - begin


def _look(table: Any) -> Any:
    for name in table.columns:
        _ = table[name].iloc[-1]
    return table
