"""Element types: what users may write, what a numpy dtype is called on the wire, and back.

numpy lacks bfloat16 and the 8-bit floats; those are `ml_dtypes`' own, loaded when the first one is named. Types of
which several elements share a byte are ``uint8`` to numpy, with their name in its metadata. Another process sends a
name, which is looked up in a table; nothing a peer says is ever evaluated by numpy.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from ..errors import UsageError
from .numpy_on_use import np

_BUILTIN = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_LONGEST = ("float128", "complex256")  # not on every machine: x86 and ARM differ in what these are
_UNITS = ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as")
_TIMES = tuple(f"{kind}[{unit}]" for kind in ("datetime64", "timedelta64") for unit in _UNITS)
_EXTENDED = (
    *("bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn"),
    *("complex32", "bcomplex32", "int1", "int2", "int4", "uint1", "uint2", "uint4"),
)
# Two elements in a byte, by torch's name for it, and four in three bytes, for which nobody has one.
_PACKED = ("float4_e2m1fn_x2", "float6_e2m3fn_packed", "float6_e3m2fn_packed")
_SIZED = re.compile(r"([SUV])([1-9][0-9]{0,7})")  # 10**8 characters of 4 bytes still fit the C int that numpy keeps
TORCH_SHELL = re.compile("u?int[1-7]")  # names that torch keeps for its compiler: nothing can be done with such tensors
_ELEMENTS = "vram"  # where in the metadata of a dtype the name is
_USER_DEFINED = 256  # NPY_USERDEF: numpy's own types are numbered below it
DLPACK_CPU, DLPACK_CUDA = 1, 2  # DLDeviceType
# DLDataTypeCode and bits, DLPack 1.1, for what numpy's own exporter cannot say.
_DLPACK = {
    "bfloat16": (4, 16),
    "complex32": (5, 32),
    "float8_e3m4": (7, 8),
    "float8_e4m3": (8, 8),
    "float8_e4m3b11fnuz": (9, 8),
    "float8_e4m3fn": (10, 8),
    "float8_e4m3fnuz": (11, 8),
    "float8_e5m2": (12, 8),
    "float8_e5m2fnuz": (13, 8),
    "float8_e8m0fnu": (14, 8),
}


def as_dtype(dtype: object) -> np.dtype[Any]:
    """Return the element type that a user means: a name (``"bfloat16"``), or a type of numpy, `ml_dtypes`, Python or
    torch. Raises UsageError for anything else, and for elements without a fixed size or with Python objects."""
    if isinstance(dtype, np.dtype):
        found = dtype  # as nearly always
    elif isinstance(dtype, str):
        name = dtype.removeprefix("torch.")
        known = _named(name)
        if known is not None:
            return known
        try:
            found = np.dtype(name)
        except (TypeError, ValueError, SyntaxError):
            import difflib  # takes milliseconds to load, for this mistake alone

            near = difflib.get_close_matches(name, _BUILTIN + _LONGEST + _EXTENDED, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else '; write e.g. "float32", "int64" or "bfloat16"'
            raise UsageError(f"dtype {dtype[:64]!r} is not known{hint}") from None
    elif dtype is None:
        raise UsageError('dtype must be named, e.g. "float32"; None would mean float64 to numpy alone')
    elif type(dtype).__module__ == "torch" and type(dtype).__name__ == "dtype":
        return from_torch_dtype(dtype)
    else:
        try:
            found = np.dtype(dtype)  # type: ignore[call-overload]
        except (TypeError, ValueError):
            raise UsageError(f"dtype {dtype!r} is not an element type that numpy or ml_dtypes knows") from None
    _check(found)
    return found


def packed_name(dtype: np.dtype[Any]) -> str | None:
    """Return the name of a type of which several elements share a byte; None for any other."""
    said = dtype.metadata
    return None if said is None else said.get(_ELEMENTS)


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of an element type on the wire, which :func:`dtype_of` reads back.
    Raises UsageError for a structured type, a foreign byte order, and any other type without a name."""
    said = dtype.metadata
    return _name(dtype) if said is None else said.get(_ELEMENTS) or _name(dtype)


@functools.lru_cache(maxsize=256)  # numpy takes microseconds to say a name, and there are few
def _name(dtype: np.dtype[Any]) -> str:
    name = dtype.str[1:] if dtype.kind in "SUV" and is_plain(dtype) else dtype.name
    if dtype.isnative and _known(name) == dtype:
        return name
    if dtype.fields is not None:
        remedy = "publish its fields as arrays of their own"
    elif not dtype.isnative:
        remedy = f"convert it with .astype({dtype.newbyteorder('=').name!r}) first"
    else:
        remedy = "convert it with .astype(...) first"
    raise UsageError(f"dtype {dtype} has no name that other processes know; {remedy}")


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the element type that a peer named. The name is looked up, never interpreted.
    Raises UsageError for a name that is not in the table of this version."""
    dtype = _known(name) if isinstance(name, str) and len(name) <= 32 else None
    if dtype is None:
        raise UsageError(f"dtype {str(name)[:64]!r} is not known to this version")
    return dtype


def from_torch_dtype(dtype: object) -> np.dtype[Any]:
    """Return numpy's (or `ml_dtypes`') word for a ``torch.dtype``, without an import of torch.
    Raises UsageError if there is none: quantized types."""
    name = str(dtype).removeprefix("torch.")
    found = None if TORCH_SHELL.fullmatch(name) else _named(name)
    if found is None:
        raise UsageError(f"numpy has no word for {dtype}; view the tensor as torch.uint8 and keep the type beside it")
    return found


def is_plain(dtype: np.dtype[Any]) -> bool:
    """Whether `dtype.str` says it all, as ``__array_interface__`` needs."""
    said = dtype.metadata
    return dtype.num < _USER_DEFINED and dtype.fields is None and (said is None or _ELEMENTS not in said)


def carrier(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type that shows the same bytes where a protocol has no word for `dtype`: unsigned, of its size."""
    if dtype.itemsize in (1, 2, 4, 8):
        return np.dtype(f"u{dtype.itemsize}")
    return np.dtype(f"V{dtype.itemsize}")


def dlpack_code(dtype: np.dtype[Any]) -> tuple[int, int] | None:
    """Return DLPack's (code, bits) for what numpy's own exporter refuses; None if DLPack has none either."""
    return _DLPACK.get(dtype.name)


def of_dlpack_code(code: int, bits: int, lanes: int) -> np.dtype[Any]:
    """Return the element type that DLPack says. Raises UsageError if numpy and `ml_dtypes` have none like it."""
    word = {0: "int", 1: "uint", 2: "float", 5: "complex", 6: "bool"}.get(code)
    name = next((name for name, said in _DLPACK.items() if said == (code, bits)), None)
    if name is None and word is not None:
        name = word if word == "bool" else f"{word}{bits}"
    known = _named(name) if name is not None and lanes == 1 else None
    if known is None:
        raise UsageError(f"an element type that DLPack calls ({code}, {bits} bits, {lanes} lanes) is not known here")
    return known


@functools.cache
def _named(name: str) -> np.dtype[Any] | None:
    if name in _BUILTIN or name in _TIMES:
        return np.dtype(name)
    if name in _LONGEST:
        there = getattr(np, name, None)
        return None if there is None else np.dtype(there)
    if name in _PACKED:
        return np.dtype("uint8", metadata={_ELEMENTS: name})
    if name in _EXTENDED:
        import ml_dtypes

        kind = getattr(ml_dtypes, name, None)  # older releases lack the newest
        return None if kind is None else np.dtype(kind)
    return None


@functools.lru_cache(maxsize=256)  # bounded: there are as many names as numbers behind S, U and V
def _known(name: str) -> np.dtype[Any] | None:
    found = _named(name) if name in _NAMES else None
    if found is None and _SIZED.fullmatch(name):
        return np.dtype(name)
    return found


_NAMES = frozenset(_BUILTIN + _LONGEST + _TIMES + _EXTENDED + _PACKED)  # so that no stranger's words fill the cache


@functools.lru_cache(maxsize=256)  # remembers those that are fine
def _check(dtype: np.dtype[Any]) -> None:
    if dtype.hasobject:
        raise UsageError(f"dtype {dtype} holds Python objects, which mean nothing in memory that others see")
    if dtype.subdtype is not None:
        raise UsageError(f"dtype {dtype} has a shape of its own; put {dtype.shape} into the array's shape")
    if dtype.itemsize == 0:
        raise UsageError(f"dtype {dtype} has no size; name it with one, e.g. {dtype.char}16")
    if dtype.fields is not None:
        for field in dtype.fields.values():
            _check(field[0].base)
    elif dtype.num >= _USER_DEFINED and dtype.name not in _EXTENDED:
        raise UsageError(f"dtype {dtype} is of a kind that cannot be shared")
