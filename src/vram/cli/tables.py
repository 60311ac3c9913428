"""Tables for people: what the commands print when nobody asked for JSON."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table

from ..bench.measure import Result
from ..doctor.finding import Finding
from ..entries.publish_file import FILE_META
from ..keeper.reports import EntryInfo, HolderInfo, StatisticsInfo, UserInfo, access_of
from ..keeper.rules import describe_pid
from ..spec import format_size, printable

if TYPE_CHECKING:
    from ..transports import Selection

_DISPENSABLE = ("segments", "old", "meta", "uid", "age")  # on a narrow terminal, in this order: vram show has them
_FEW = 500  # rows that rich may make beautiful


def printer() -> Console:
    """Return what prints: with colours on a terminal unless NO_COLOR is set, as wide as need be where there is none."""
    # Publishers may have written the text: no markup in it is interpreted.
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = 200
    return console


def show_table(table: Table) -> None:
    """Print a table."""
    if table.row_count > _FEW:  # rich takes 2 ms for each
        sys.stdout.writelines(_lines(table))
        return
    console = printer()
    if not console.is_terminal:
        console.width = max(console.width, _natural_width(table))
    console.print(table)


def show_entries(entries: Sequence[EntryInfo]) -> None:
    """Print a table of entries; on a narrow terminal without the columns that most can do without."""
    left_out: list[str] = []
    table = entry_table(entries)
    console = printer()
    if console.is_terminal:
        for title in _DISPENSABLE:
            if _natural_width(table) <= console.width:
                break
            left_out.append(title)
            table = entry_table(entries, without=left_out)
    show_table(table)
    if left_out:
        print(f"(no room for {', '.join(left_out)}: vram show NAME, or --json)")


def show_findings(findings: Sequence[Finding]) -> None:
    """Print what the doctor found, and below it what to do: whole lines, to be copied."""
    show_table(finding_table(findings))
    remedies = [
        (one.check, printable(one.remedy))
        for one in findings
        if one.remedy and (one.area, one.verdict) != ("packages", "absent")
    ]
    if remedies:
        print("\nwhat to do:")
        print(*(f"  {check}: {remedy}" for check, remedy in remedies), sep="\n")


def _table(*titles: str, **options: Any) -> Table:
    """A table that shortens nothing: what has no room goes on in the next line."""
    return Table(*(Column(title, overflow="fold") for title in titles), box=None, **options)


def _natural_width(table: Table) -> int:
    """How wide a table is where nothing need be folded."""
    if table.row_count > _FEW:
        return 0  # it is printed as it is
    widths = [max(map(cell_len, (str(column.header), *map(str, column.cells)))) for column in table.columns]
    return sum(widths) + 2 * len(widths)


def _lines(table: Table) -> Iterator[str]:
    """The rows of a long table, each on one line, however wide that is."""
    columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    widths = [max(map(len, cells)) for cells in columns]
    for row in zip(*columns, strict=True):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n"


def entry_table(entries: Sequence[EntryInfo], without: Collection[str] = ()) -> Table:
    """One row a name, without some of the columns."""
    titles = ("name", "version", "size", "segments", "access", "readers", "old", "holders", "uid", "age", "meta")
    table = _table(*(title for title in titles if title not in without))
    for entry in entries:
        cells = (
            printable(entry.name),  # a keeper takes no other names, but whoever listens there may be none
            str(entry.version or "-"),
            format_size(entry.nbytes),
            str(entry.segments),
            access_of(entry),
            str(entry.readers),
            str(entry.retired),
            f"{entry.leases} / {format_size(entry.held_bytes)}" if entry.leases else "-",
            str(entry.owner),
            format_age(entry.age),
            _pairs(entry.meta),
        )
        table.add_row(*(cell for title, cell in zip(titles, cells, strict=True) if title not in without))
    return table


def finding_table(findings: Sequence[Finding]) -> Table:
    """One row for each answer; packages that are not there share one."""
    table = _table("", "check", "found")
    for one in findings:
        if (one.area, one.verdict) != ("packages", "absent"):
            table.add_row(one.verdict, one.check, printable(one.said))
    missing = [one.check for one in findings if (one.area, one.verdict) == ("packages", "absent")]
    if missing:
        table.add_row("absent", "packages", ", ".join(missing) + " (vram doctor --json says what each is for)")
    return table


def holder_table(holders: Sequence[HolderInfo]) -> Table:
    """Return a table with one row for each lease: its process, by the pid that the kernel verified or by its host, and
    the label that the process claims."""
    table = _table("name", "version", "size", "uid", "process", "says it is", "access", "held for")
    for holder in holders:
        table.add_row(
            printable(holder.name),
            str(holder.version),
            format_size(holder.nbytes),
            str(holder.uid),
            describe_pid(holder.pid, holder.host),
            holder.label or "-",
            holder.rights,
            format_age(holder.age),
        )
    return table


def user_table(users: Sequence[UserInfo], held: StatisticsInfo) -> Table:
    """One row a user, after what all have and what each may have."""
    sizes = [limit.name for limit in held.limits if "bytes" in limit.name]
    table = _table("uid", *(limit.name.replace("_", " ") for limit in held.limits))

    def row(who: str, counts: Sequence[int | None]) -> None:
        cells = [
            "-" if count is None else format_size(count) if limit.name in sizes else str(count)
            for limit, count in zip(held.limits, counts, strict=True)
        ]
        table.add_row(who, *cells)

    row("all may have", [limit.most for limit in held.limits])
    row("each may have", [limit.most_per_user for limit in held.limits])
    row("all have", [limit.used for limit in held.limits])
    for user in users:
        counts = [user.nbytes if limit.name == "bytes" else getattr(user, limit.name) for limit in held.limits]
        row(str(user.uid), counts)
    return table


def detail_tables(entry: EntryInfo) -> list[Table]:
    """The versions of an entry, who holds them, what was said about the newest, and the arrays in it."""
    versions = _table(
        "version", "state", "size", "segments", "access", "readers", "age", "ends in", "published by", "meta",
        title=printable(entry.name), title_justify="left",
    )  # fmt: skip
    holders = _table("version", "size", "lease", "process", "uid", "says it is", "access", "held for")
    for version in entry.versions:
        versions.add_row(
            str(version.version),
            "current" if version.is_current else "revoked" if version.is_revoked else "retired",
            format_size(version.nbytes),
            str(len(version.sizes)),
            access_of(version),
            str(version.readers),
            format_age(version.age),
            "-" if version.ttl_left is None else format_age(version.ttl_left),
            f"uid {version.owner}, {describe_pid(version.publisher_pid, version.publisher_host)}, "
            f"{version.publisher_label or '-'}",
            _pairs(version.meta),
        )
        for holder in version.holders:
            holders.add_row(
                str(version.version),
                format_size(version.nbytes),
                str(holder.lease_id),
                describe_pid(holder.pid, holder.host),
                str(holder.uid),
                holder.label or "-",
                holder.rights,
                format_age(holder.age),
            )
    notes = _table("meta", "value")
    for key, value in _notes(entry.meta):
        notes.add_row(printable(key), printable(value))
    arrays = _table("array", "type", "shape", "size")
    if entry.arrays is None and entry.version:
        why = "it is parked: attach it with wake=True" if entry.parked else "what is in it cannot be read"
        arrays.add_row(f"({why})")
    for array in entry.arrays or ():
        shape = " x ".join(str(length) for length in array.shape) or "-"
        arrays.add_row(printable(array.name), printable(array.dtype), shape, format_size(array.nbytes))
    return [versions, *(table for table in (holders, notes, arrays) if table.row_count)]


def bench_tables(results: Sequence[Result]) -> list[Table]:
    """One table a benchmark; what was missed is marked."""
    tables = []
    for result in results:
        table = _table(
            "case", "median (10 % to 90 %)", "ratio", "target", "", title=result.title, title_justify="left",
            caption="\n".join(result.notes), caption_justify="left",
        )  # fmt: skip
        for row in result.rows:
            ratio = "" if row.ratio is None else f"{row.ratio:.{2 if row.ratio >= 0.01 else 4}f} x {row.against}"
            verdict = "" if row.reached is None else "reached" if row.reached else "MISSED"
            table.add_row(row.case, str(row.figure), ratio, row.target, verdict)
        tables.append(table)
    return tables


def format_age(seconds: float) -> str:
    """Write a time for people: ``"90 s"``, ``"5 min"``, ``"36 h"``, ``"3 d"``."""
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def _pairs(meta: Mapping[str, str]) -> str:
    text = " ".join(f"{key}={value}" for key, value in meta.items())
    return printable(text if len(text) <= 60 else text[:57] + "...")


def _notes(meta: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Return the metadata, one line for each note, and one for each field of a nested JSON object."""
    for key, value in meta.items():
        inside = None
        if key == FILE_META:
            with contextlib.suppress(ValueError, RecursionError):  # somebody else's words under that name
                inside = json.loads(value)
        if isinstance(inside, dict):
            yield from ((f"{key} {name}", str(said)) for name, said in inside.items())
        else:
            yield key, value


def route_table(selection: Selection) -> Table:
    """One row a transport, the best first, with what was measured and why it is where it is."""
    table = _table(
        "", "transport", "bandwidth", "latency", f"{format_size(selection.nbytes)} in", "why",
        title=f"{selection.src} to {selection.dst}", title_justify="left",
    )  # fmt: skip
    for place, route in enumerate(selection.routes, 1):
        found = route.estimate
        table.add_row(
            str(place) if route.is_available else "-",
            route.kind,
            "-" if found is None else f"{found.bandwidth / 1e9:.2f} GB/s",
            "-" if found is None else f"{found.latency * 1e6:.1f} us",
            "-" if route.seconds is None else f"{route.seconds * 1e3:.3f} ms",
            printable(route.reason),
        )
    return table
