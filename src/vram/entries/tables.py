"""Tables under a name: a DataFrame in, a DataFrame out, and its columns nowhere but in the memory of the entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import UnsupportedError, UsageError
from ..keeper.client import Attachment, KeeperClient
from ..sharing.descriptor import Manifest
from .keepers import check_flag
from .manifests import is_strange


def arrays_of(table: object, *, writable: bool, updatable: bool) -> dict[str, Any]:
    """Return the arrays that a table is published as. Raises UsageError for a column that has no memory to share."""
    from ..arrays.arrow_tables import arrays_of_table  # with what knows pandas and the others

    if writable or updatable:
        raise UsageError(
            "a table is published read-only: where its text begins, and what its codes mean, is checked once, and must "
            "stay so. Publish it anew when it changes, or the arrays of its numbers: {name: table[name].to_numpy()}"
        )
    return arrays_of_table(table)


def table_on(
    client: KeeperClient, attachment: Attachment, manifest: Manifest, show: Callable[[], Mapping[str, Any]],
    library: object, check: bool,
) -> Any:  # fmt: skip
    """Make a table of what is leased, whose arrays `show` shows; see :meth:`Lease.table`."""
    from ..arrays.arrow_tables import ENTRY, LIBRARIES, table_from

    check = check_flag(check, "check")
    name = f"{attachment.name!r} version {attachment.version}"
    if library is not None and (not isinstance(library, str) or library not in LIBRARIES):
        raise UsageError(f"library {library!r:.40} is none of {', '.join(map(repr, LIBRARIES))}")
    if ENTRY not in manifest.arrays:
        raise UsageError(f"{name} was published as arrays, not as a table; lease.numpy() has them")
    if any(memory.device != "host" for memory in manifest.memories):
        raise UnsupportedError(
            f"a table of {name}", "memory of the host", "memory of a GPU", "Ask for its arrays by name"
        )
    if attachment.writable or manifest.updatable:
        # That the kernel sealed the memory is what makes a check of its offsets worth anything.
        raise UsageError(f"{name} can still be written to, so no table of it is believed: ask for its arrays by name")
    return table_from(show()[ENTRY], library, whole=check or is_strange(client, attachment))
