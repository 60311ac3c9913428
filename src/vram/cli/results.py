"""Results of verbs, printed as text or as JSON."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


def print_result(value: Any, as_json: bool, text: str) -> None:
    """Print a value as JSON, or what is to be said of it."""
    print(_as_json(value) if as_json else text)


def print_list(values: Sequence[object]) -> None:
    """Print a list as JSON, one after the other: as text, all of a long list would take many times as much memory."""
    lines = (textwrap.indent(_as_json(value), "  ") for value in values)
    end = "[" if values else "[]\n"
    for line in lines:
        sys.stdout.write(f"{end}\n{line}")
        end = ","
    sys.stdout.write("\n]\n" if values else end)


def _as_json(value: Any) -> str:
    return json.dumps(msgspec.to_builtins(value, enc_hook=_builtin), indent=2)


def _builtin(value: object) -> dict[str, str]:
    """Make a dict of a mapping, as a hook of msgspec's; of all else it asks this error."""
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(f"{type(value)} in JSON")
