"""Tables are no arrays: the error says which line publishes their columns, and that line works."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import vram
from vram.arrays.sources import as_source
from vram.arrays.tables import is_table
from vram.errors import UsageError


class Column:
    """As pandas' Series: an array with a name and a type."""

    def __init__(self, values: object) -> None:
        self._values = np.asarray(values)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._values.dtype

    def to_numpy(self) -> np.ndarray[Any, Any]:
        return self._values

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return self._values


class Table:
    """As pandas' DataFrame, as far as anybody looks at it here."""

    index = range(3)

    def __init__(self, columns: dict[Any, object]) -> None:
        self._columns = {name: Column(values) for name, values in columns.items()}

    @property
    def columns(self) -> list[Any]:
        return list(self._columns)

    @property
    def dtypes(self) -> list[np.dtype[Any]]:
        return [column.dtype for column in self._columns.values()]

    def __getitem__(self, name: Any) -> Column:
        return self._columns[name]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._columns)

    def to_numpy(self) -> np.ndarray[Any, Any]:
        columns = [column.to_numpy() for column in self._columns.values()]
        return np.stack([column.astype(np.result_type(*columns)) for column in columns], axis=1)

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return self.to_numpy()


CITIES = np.array(["x", "y", None], object)


def refused(value: Any) -> str:
    with pytest.raises(UsageError) as caught:
        vram.publish("numbers", value)
    return str(caught.value)


def line_of(said: str) -> str:
    """Return the line that an error tells to write."""
    found = re.search(r"vram\.publish\(.*\)$", said)
    assert found is not None, said
    return found[0]


def test_what_is_a_table() -> None:
    assert is_table(Table({"a": [1, 2]}))
    assert not any(map(is_table, (np.zeros(3), {"a": 1}, [1], "text", None, np.zeros(2, [("a", "i4")]))))


def test_a_table_instead_of_a_mapping_gets_the_line_to_write(kept: vram.Keeper) -> None:
    table = Table({"a": [1, 2, 3], "b": [0.5, 1.5, 2.5]})
    said = refused(table)
    assert said.endswith(
        "Table is a table; publish its columns (without its index): "
        "vram.publish('numbers', {c: table[c].to_numpy() for c in table.columns})"
    )
    eval(line_of(said), {"vram": vram, "table": table})
    with vram.attach("numbers") as lease:
        found = {name: array.numpy().tolist() for name, array in lease.items()}
    assert found == {"a": [1, 2, 3], "b": [0.5, 1.5, 2.5]}


def test_columns_that_no_array_holds_are_named_and_left_out_of_the_line(kept: vram.Keeper) -> None:
    table = Table({"a": [1, 2, 3], "city": CITIES})
    said = refused(table)
    assert "(without its index and what cannot be shared, column 'city' (object))" in said
    assert eval(line_of(said), {"vram": vram, "table": table}).arrays == 1


def test_columns_whose_names_are_no_text_get_names_that_are(kept: vram.Keeper) -> None:
    table = Table({0: [1, 2], 1: [3, 4]})
    said = refused(table)
    assert "{str(c): table[c].to_numpy() for c in table.columns}" in said


def test_of_many_columns_some_are_named(kept: vram.Keeper) -> None:
    table = Table({"a": [1, 2, 3], **{f"city{n}": CITIES for n in range(9)}})
    said = refused(table)
    assert "columns 'city0' (object), 'city1' (object)" in said
    assert "and 3 more)" in said
    assert eval(line_of(said), {"vram": vram, "table": table}).arrays == 1


def test_a_table_among_arrays_gets_the_line_too_and_is_named(kept: vram.Keeper) -> None:
    table = Table({"a": [1, 2, 3], "city": CITIES})
    said = refused({"x": np.zeros(3), "people": table})
    assert said.startswith("array 'people': a ")
    assert said.endswith("""**{f"table/{c}": table[c].to_numpy() for c in table.columns if c not in ['city']}""")
    items = {"table": table}
    assert list(eval(said[said.index("**{") + 2 :], items)) == ["table/a"]


def test_a_table_that_numpy_makes_one_array_of_is_that_array() -> None:
    source = as_source(Table({"a": [1, 2, 3], "b": [4, 5, 6]}))
    assert source.shape == (3, 2)
