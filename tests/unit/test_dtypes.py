"""Element types: what users write, what the wire says, and what is refused (S7: a peer's word is looked up only)."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram.arrays import dtypes
from vram.arrays.dtypes import as_dtype, carrier, dtype_name, dtype_of, is_plain
from vram.errors import UsageError

EXTENDED = [name for name in dtypes._EXTENDED if hasattr(ml_dtypes, name)]
NAMED = [*dtypes._BUILTIN, *(n for n in dtypes._LONGEST if hasattr(np, n)), *dtypes._TIMES, *EXTENDED]


def test_every_name_comes_back_as_it_went() -> None:
    for name in (*NAMED, "S1", "S40", "U7", "V16"):
        dtype = dtype_of(name)
        assert dtype_name(dtype) == name
        assert as_dtype(name) == dtype == as_dtype(dtype)
        assert dtype.itemsize > 0


@pytest.mark.parametrize(
    ("given_as", "name"),
    [
        ("f4", "float32"),
        ("<i8", "int64"),
        (float, "float64"),
        (bool, "bool"),
        (np.uint16, "uint16"),
        (ml_dtypes.bfloat16, "bfloat16"),
        ("torch.bfloat16", "bfloat16"),
        (np.longlong, "int64"),
        ("datetime64[ns]", "datetime64[ns]"),
    ],
)
def test_what_users_may_write(given_as: object, name: str) -> None:
    assert dtype_name(as_dtype(given_as)) == name


@pytest.mark.parametrize(
    ("given_as", "says"),
    [
        ("float33", "did you mean 'float32'"),
        ("", "is not known"),
        ("x" * 500, "is not known"),
        ("not a type,", "is not known"),
        (None, "must be named"),
        (object, "Python objects"),
        ("O", "Python objects"),
        (np.dtype([("a", "i4"), ("b", "O")]), "Python objects"),
        (np.dtype(("f4", (3,))), "shape of its own"),
        ("S", "has no size"),
        ("U0", "has no size"),
        (3.5, "not an element type"),
        (int("7"), "not an element type"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_a_remedy(given_as: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        as_dtype(given_as)


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="numpy 2 has variable-length strings, this has not")
def test_variable_length_strings_are_refused() -> None:
    """They are pointers into the heap of one process."""
    with pytest.raises(UsageError):
        as_dtype(np.dtypes.StringDType())


def test_structures_are_for_this_process_only() -> None:
    dtype = as_dtype([("x", "f4"), ("y", "i2")])
    assert dtype.itemsize == 6
    with pytest.raises(UsageError, match="fields as arrays"):
        dtype_name(dtype)


def test_a_foreign_byte_order_is_for_this_process_only() -> None:
    dtype = as_dtype(">f4")
    with pytest.raises(UsageError, match="astype"):
        dtype_name(dtype)


def test_what_a_peer_may_not_name() -> None:
    names = ("", "O", "object", "f4,i4", "float32 ", "Float32", "<f4", "S", "S0", "S-1", "U999999999", "V1e3", "(2,)f4")
    for name in (*names, "U" * 99, "S\u0661", "S1\n"):
        with pytest.raises(UsageError, match="not known to this version"):
            dtype_of(name)


@given(st.text(max_size=40) | st.binary(max_size=8) | st.integers() | st.none())
def test_any_word_of_a_peer_is_a_type_or_a_typed_error(word: object) -> None:
    """S7, and I11: nothing a stranger says ends the process."""
    try:
        dtype = dtype_of(word)  # type: ignore[arg-type]
    except UsageError:
        return
    assert not dtype.hasobject
    assert dtype_name(dtype) == word


def test_a_stranger_does_not_fill_the_cache() -> None:
    before = dtypes._named.cache_info().currsize
    for number in range(100):
        with pytest.raises(UsageError):
            dtype_of(f"float{number * 1000 + 7}")
    assert dtypes._named.cache_info().currsize == before


def test_the_carrier_has_the_same_size() -> None:
    for name in NAMED:
        dtype = dtype_of(name)
        assert carrier(dtype).itemsize == dtype.itemsize
        assert is_plain(dtype) is (name not in EXTENDED)


def test_a_torch_type_is_read_without_importing_torch() -> None:
    """torch is optional; who has a torch.dtype has imported it."""

    class dtype:
        def __init__(self, name: str) -> None:
            self.name = name

        def __repr__(self) -> str:
            return f"torch.{self.name}"

    dtype.__module__ = "torch"
    assert as_dtype(dtype("float8_e5m2")) == np.dtype(ml_dtypes.float8_e5m2)
    assert as_dtype(dtype("int32")) == np.dtype("int32")
    with pytest.raises(UsageError, match=r"view the tensor as torch\.uint8"):
        as_dtype(dtype("qint8"))


def test_ml_dtypes_is_loaded_for_its_own_types_only() -> None:
    code = (
        "import sys; from vram.arrays.dtypes import as_dtype, dtype_of; as_dtype('float32'); dtype_of('int8')\n"
        "assert 'ml_dtypes' not in sys.modules and 'torch' not in sys.modules\n"
        "as_dtype('bfloat16'); assert 'ml_dtypes' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
