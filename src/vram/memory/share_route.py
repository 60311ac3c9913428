"""How memory can reach another process: the result of :func:`vram.explain`, a value of one line."""

from __future__ import annotations

from dataclasses import dataclass

from ..spec import HandleKind, format_size


@dataclass(frozen=True, slots=True)
class ShareRoute:
    """How memory can reach another process. False where it cannot.

    Attributes
    ----------
    kind : HandleKind
        POSIX_FD, LEGACY_IPC or POOL; NONE if in no way.
    made_by : str
        Its maker: ``"vram"``, or the family of driver calls as :class:`~vram.driver.protocol.PointerInfo` names it;
        ``"other"`` for memory of the host that no driver knows.
    device : str
        Where it is.
    nbytes : int
        Bytes that are asked about.
    segments, offset : int
        Allocations that they lie in, and where in the first one they begin, in bytes.
    outlives_maker : bool
        Whether it can be published, that is kept when the process that made it is gone.
    reason, remedy : str
        Why there is no way, and what to do about it; empty if there is one.
    """

    kind: HandleKind
    made_by: str
    device: str
    nbytes: int
    segments: int
    offset: int
    outlives_maker: bool
    reason: str = ""
    remedy: str = ""

    def __bool__(self) -> bool:
        return self.kind is not HandleKind.NONE

    def __str__(self) -> str:
        what = f"{format_size(self.nbytes)} on {self.device}, made by {_MADE.get(self.made_by, self.made_by)}"
        if not self:
            remedy = f". {self.remedy}" if self.remedy else ""
            return f"{what}: cannot leave this process, being {self.reason}{remedy}"
        held = f"{self.segments} allocation{'s' * (self.segments != 1)}, from byte {self.offset} on"
        life = "can be published, lent and queued"
        if not self.outlives_maker:
            life = "can be lent and sent while this process lives; a publish copies it"
        return f"{what}, {held}: goes {_GOES[self.kind]}; {life}"


_MADE = {
    "vram": "vram",
    "vmm": "another library with cuMemCreate",
    "legacy": "another library with cudaMalloc",
    "pool": "another library's stream-ordered pool",
    "opened": "another process, and opened here",
    "host": "another library as page-locked memory of the host",
    "managed": "another library as managed memory",
    "other": "this process for itself",
    "unknown": "nobody that the driver knows",
}
_GOES = {
    HandleKind.POSIX_FD: "by file descriptor",
    HandleKind.LEGACY_IPC: "by a 64-byte handle",
    HandleKind.POOL: "by its pool's file descriptor and a 64-byte handle",
}
