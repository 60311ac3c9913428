"""The keeper of this user: where its socket is, whether that place can be trusted, and who answers there."""

from __future__ import annotations

import os

from ..entries.administration import statistics
from ..errors import AccessDeniedError, PeerGoneError, VramError, WaitTimeoutError
from ..keeper.limits import limit_called
from ..keeper.paths import check_directory, closed_door, find_path, how_to_be_let_in, how_to_start, may_connect
from ..spec import format_count, format_size
from .finding import Finding, failed

_FULL = 0.9  # of a ceiling: who publishes more will soon be refused


def examine(path: str | os.PathLike[str] | None = None) -> list[Finding]:
    """Look at the directory, and ask the keeper for its statistics."""
    try:
        found, chosen = find_path(path)
    except VramError as error:
        return [failed("keeper", "keeper", error, remedy="set VRAM_KEEPER, or XDG_RUNTIME_DIR, to a shorter path")]
    directory = os.path.dirname(found)
    try:
        if not chosen and os.path.lexists(directory):  # first: in somebody else's there is none to start
            check_directory(directory)
    except VramError as error:
        remedy = f"chmod 700 {directory}, or remove it if others may have written there; or set VRAM_KEEPER"
        return [failed("keeper", "keeper", error, remedy=remedy)]
    if closed_door(found):  # nor can it be seen then whether anybody listens
        return [
            Finding(
                area="keeper", check="keeper", verdict="broken", said=f"no way to {found} for uid {os.geteuid()}",
                code="EACCES", remedy=how_to_be_let_in(found),
            )
        ]  # fmt: skip
    if not os.path.lexists(found):
        return [
            Finding(
                area="keeper", check="keeper", verdict="absent", said=f"nobody listens at {found}", code="ENOENT",
                remedy=how_to_start(found) + ", or mount the directory of one that runs and set VRAM_KEEPER",
            )
        ]  # fmt: skip
    try:
        held = statistics(keeper=found)
    except PeerGoneError as error:
        remedy = how_to_start(found)
        return [Finding(area="keeper", check="keeper", verdict="absent", said=str(error), remedy=remedy)]
    except (VramError, OSError) as error:
        return [failed("keeper", "keeper", error, remedy=_remedy(found, error))]
    version = f", of version {held.keeper_version}," if held.keeper_version else ""
    findings = [
        Finding(
            area="keeper", check="keeper", verdict="ok",
            said=f"pid {held.pid}{version} serves at {found}: {format_count(held.entries, 'entry', 'entries')}, "
            f"{format_size(held.nbytes)}",
        )
    ]  # fmt: skip
    if held.lost_rows:
        lost = f"{held.lost_rows} rows of the journal of the keeper before could not be read: what they said is lost"
        remedy = "look for entries that are missing (vram ls), and publish them again"
        findings.append(Finding(area="keeper", check="keeper journal", verdict="limited", said=lost, remedy=remedy))
    for limit in held.limits:
        most, what = limit.most, limit.name.replace("_", " ")
        if most is not None:
            full = limit.used >= most * _FULL
            findings.append(
                Finding(
                    area="keeper", check=f"keeper {what}", verdict="limited" if full else "ok",
                    said=_used(limit.used, most, what),
                    remedy=f"{limit_called(limit.name).remedy} (vram ls --users says who has most), or take it over "
                    f"with a higher limit (vram keep --takeover {limit.option} ...)"
                    if full else "",
                )
            )  # fmt: skip
    return findings


def _used(used: int, most: int, what: str) -> str:
    """How much of a ceiling is used: "2 MiB of 64 MiB are used", "1 of 10 entries are used"."""
    if not what.endswith("bytes"):
        return f"{used} of {most} {what} are used"
    return f"{format_size(used)} of {format_size(most)} are {what.removesuffix('bytes').strip() or 'used'}"


def _remedy(path: str, error: Exception) -> str:
    """Return the remedy for a keeper that does not answer."""
    if isinstance(error, AccessDeniedError) and not may_connect(path):
        return how_to_be_let_in(path)
    if isinstance(error, WaitTimeoutError):
        return "look at the process that listens there, and end it or have it go on, as said"
    return "choose another path (--socket, VRAM_KEEPER), or end what listens there"
