"""Tables of named columns, such as a pandas or polars DataFrame: what is one, and what to say of one that is no array.

None of these libraries is a dependency, nor loaded here: those that are known are known by name (:mod:`.frames` has
their columns), and of others a table is what looks like one.
"""

from __future__ import annotations

from typing import Any

from ..errors import UsageError
from .dtypes import as_dtype, dtype_name
from .numpy_on_use import np

_SHOWN = 6  # columns
_FRAMES = {
    ("pandas", "DataFrame"): "pandas",
    ("polars", "DataFrame"): "polars",
    ("pyarrow", "Table"): "arrow",
    ("pyarrow", "RecordBatch"): "arrow",
}


def is_table(value: object) -> bool:
    """Whether a value is a table: a two-dimensional thing with columns of types of their own."""
    return all(hasattr(type(value), word) for word in ("columns", "dtypes", "to_numpy", "__getitem__"))


def is_frame(value: object) -> str:
    """Return which library a table is of: ``"pandas"``, ``"polars"`` or ``"arrow"``; empty if it is of none."""
    for kind in type(value).__mro__:
        found = _FRAMES.get((kind.__module__.partition(".")[0], kind.__qualname__))
        if found is not None:
            return found
    return ""


def columns_of(table: Any) -> str:
    """Say, as the beginning of an error, what a table is and how its columns become arrays."""
    kind = type(table)
    refused = _refused(table)
    left_out = "its index" if hasattr(kind, "index") else ""
    if refused:
        shown = ", ".join(f"{name!r:.40} ({dtype:.40})" for name, dtype in list(refused.items())[:_SHOWN])
        more = f" and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
        left_out = f"{left_out} and " if left_out else ""
        left_out += f"what cannot be shared, column{'s' * (len(refused) > 1)} {shown}{more}"
    without = f" (without {left_out})" if left_out else ""
    return f"a {kind.__module__.partition('.')[0]} {kind.__qualname__} is a table; publish its columns{without}"


def each_column(table: Any, name: str = "table", prefix: str = "") -> str:
    """Return what makes the items of a mapping out of the columns of a table that is called `name`."""
    refused = [str(column) if isinstance(column, str) else column for column in _refused(table)]
    text = all(isinstance(column, str) for column in table.columns)
    key = f'f"{prefix}{{c}}"' if prefix else "c" if text else "str(c)"
    condition = f" if c not in {refused!r}" if refused and len(refused) <= _SHOWN else ""
    if len(refused) > _SHOWN:
        condition = f' if {name}[c].dtype.kind in "biufc"'
    return f"{key}: {name}[c].to_numpy() for c in {name}.columns{condition}"


def _refused(table: Any) -> dict[Any, str]:
    """Return the columns whose elements no array has, with their types."""
    found = {}
    for column in table.columns:
        values = table[column]
        try:
            dtype_name(as_dtype(np.asarray(values).dtype))
        except (UsageError, TypeError, ValueError):
            found[column] = str(getattr(values, "dtype", "unknown"))
    return found
