"""Maps, for people: what can be drawn, and where to."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..arrays import Array
from ..entries.lease import Lease
from ..errors import UsageError
from ..markup import printable
from ..memory import Region
from ..spec import format_count, format_size
from .of_entry import picture_of_entry
from .of_process import lane_of_region, picture_of_process, picture_of_this_process
from .page import draw_page
from .picture import Picture, Span, bounded
from .svg import draw_svg

if TYPE_CHECKING:
    from ..keeper.session import Keeper

_LINKS = 40  # that are followed to a file, as the kernel does


class MemoryMap:
    """A picture of memory at one moment, made by :func:`memory_map`; a notebook shows it by itself.
    Each bar is to scale. Narrow neighbours are drawn as one, and at most 64 bars are drawn, the largest."""

    __slots__ = ("_picture",)

    def __init__(self, picture: Picture) -> None:
        self._picture = picture

    def svg(self) -> str:
        """Return it as one SVG element, 960 pixels wide, with a legend, light or dark as its reader prefers."""
        return draw_svg(self._picture)

    def html(self) -> str:
        """Return it as a page of its own, which fits narrow screens, with every number in tables."""
        return draw_page(self._picture)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the map as SVG (``.svg``) or as a page (``.html``); the file is replaced as a whole or not at all."""
        path = os.fspath(file)
        draw = {".svg": self.svg, ".html": self.html, ".htm": self.html}.get(os.path.splitext(path)[1].lower())
        if draw is None:
            raise UsageError(f"{printable(path)!r}: a map is saved as .svg or .html")
        write_whole(path, draw())

    def __repr__(self) -> str:
        lanes = self._picture.lanes
        size = format_size(sum(lane.nbytes for lane in lanes))
        return f"<MemoryMap of {printable(self._picture.title)}, {format_count(len(lanes), 'bar')}, {size}>"

    def _repr_html_(self) -> str:
        return self.svg()  # within the page it becomes as narrow as its cell; as an image notebooks would cut it off


def memory_map(
    what: str | int | Array | Region | Lease | None = None, *, keeper: Keeper | str | os.PathLike[str] | None = None
) -> MemoryMap:
    """Look at memory and return a drawing of it: reserved, mapped, asleep, shared, and with whom.

    Parameters
    ----------
    what : str, int, Array, Region, Lease or None
        By default this process, on the host and on GPUs. A str is the name of an entry. An int is the PID of another
        process, of which its host memory is shown, as ``/proc/PID/maps`` has it, and what the keeper knows: leases, and
        what it has published. An array, a region or a lease of this process: the memory that it lies on.
    keeper : Keeper, str or PathLike, optional
        Whom to ask; see :func:`vram.attach`. This process, and what is in it, is drawn without one.

    Returns
    -------
    MemoryMap
        A notebook shows it. ``.svg()`` and ``.html()`` return it as text: one drawing, 960 pixels wide, and a page that
        fits narrow screens and has every number in tables. ``.save("map.html")`` (or ``.svg``) writes it to a file,
        whole or not at all.

    Raises
    ------
    NotFoundError
        If there is no such entry or process, or nothing of this library is in that process.
    AccessDeniedError
        If the process is another user's, and the keeper knows nothing of it.
    ClosedError
        If what is to be drawn was closed.
    UsageError
        For anything else.
    PeerGoneError
        If there is no keeper. For a process one that is not named may be missing.
    """
    if what is None:
        return MemoryMap(picture_of_this_process())
    if isinstance(what, str):
        return MemoryMap(picture_of_entry(what, keeper))
    if isinstance(what, int) and not isinstance(what, bool):
        return MemoryMap(picture_of_process(what, keeper))
    if isinstance(what, Lease):
        return MemoryMap(_picture_of_lease(what))
    if isinstance(what, Array):
        name = f"{what.dtype} {what.shape}"
        span = Span(what.offset, what.offset + what.nbytes, "array", name)
        return MemoryMap(Picture(f"array {name}", (), (lane_of_region(what.region, [span]),)))
    if isinstance(what, Region):
        what.handle  # noqa: B018  (closed regions say so)
        return MemoryMap(Picture(f"region on {what.location}", (), (lane_of_region(what),)))
    raise UsageError(
        f"a map is of an entry (its name), a process (its PID), an array, a region or a lease, not of {what!r:.80}"
    )


def _picture_of_lease(lease: Lease) -> Picture:
    """Return the regions of a lease, with the names of its arrays."""
    spans: dict[int, list[Span]] = defaultdict(list)
    regions: dict[int, Region] = {}
    for name in lease:
        array = lease[name]
        regions[array.region.address] = array.region
        spans[array.region.address].append(Span(array.offset, array.offset + array.nbytes, "array", name))
    lanes = tuple(lane_of_region(region, spans[address]) for address, region in regions.items())
    facts = (f"{format_count(len(lease), 'array')}, {format_size(lease.nbytes)}, access {lease.access}",)
    return bounded(Picture(f"lease on {lease.name} version {lease.version}", facts, lanes))


def write_whole(path: str, text: str) -> None:
    """Write a file as a whole or not at all: a temporary file in the same directory is renamed.
    Raises UsageError if the path is no regular file, or a link of another user's."""
    path = _followed(path)
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise UsageError(f"{printable(path)!r} is no file that could be replaced by a map: name another")
    fd, beside = tempfile.mkstemp(prefix=".vram-map-", dir=os.path.dirname(path) or ".")
    try:
        with open(fd, "w", encoding="utf-8") as out:
            out.write(text)
            os.fchmod(out.fileno(), 0o666 & ~_umask())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def _followed(path: str) -> str:
    """Return where a path leads, by links of this user's own, or root's: others could have a file of ours replaced."""
    for _ in range(_LINKS):
        try:
            fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return path
        try:
            found = os.fstat(fd)
            if not stat.S_ISLNK(found.st_mode):
                return path
            if found.st_uid not in (0, os.geteuid()):
                raise UsageError(f"{printable(path)!r} is a link that belongs to uid {found.st_uid}: name another file")
            path = os.path.join(os.path.dirname(path), os.readlink("", dir_fd=fd))
        finally:
            os.close(fd)
    raise UsageError(f"{printable(path)!r} is a link that leads nowhere: name another file")


def _umask() -> int:
    """Return what this process takes away from the rights of new files, without changing it for other threads."""
    with contextlib.suppress(OSError):
        found = re.search(rb"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_bytes(), re.MULTILINE)
        if found is not None:
            return int(found[1], 8)
    return 0o077
