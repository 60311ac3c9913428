"""The keeper of this user: where its socket is, whether that place can be trusted, and who answers there."""

from __future__ import annotations

import os

from ..entries.administration import statistics
from ..errors import PeerGoneError, VramError
from ..keeper.limits import limit_called
from ..keeper.paths import check_directory, find_path, how_to_start
from ..spec import format_size
from .finding import Finding, failed

__all__ = ["examine"]

_FULL = 0.9  # of a ceiling: who publishes more will soon be refused


def examine(path: str | os.PathLike[str] | None = None) -> list[Finding]:
    """Look at the directory, and ask the keeper for its statistics."""
    try:
        found, chosen = find_path(path)
    except VramError as error:
        return [failed("keeper", "keeper", error, remedy="set VRAM_KEEPER, or XDG_RUNTIME_DIR, to a shorter path")]
    try:
        if not chosen and os.path.lexists(os.path.dirname(found)):  # first: in somebody else's there is none to start
            check_directory(os.path.dirname(found))
    except VramError as error:
        return [failed("keeper", "keeper", error)]
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
        return [failed("keeper", "keeper", error)]
    findings = [
        Finding(
            area="keeper", check="keeper", verdict="ok",
            said=f"pid {held.pid} serves at {found}: {held.entries} entries, {format_size(held.nbytes)}",
        )
    ]  # fmt: skip
    for limit in held.limits:
        most, what = limit.most, limit.name.replace("_", " ")
        if most is not None:
            full = limit.used >= most * _FULL
            findings.append(
                Finding(
                    area="keeper", check=f"keeper {what}", verdict="limited" if full else "ok",
                    said=f"{limit.used} of {most} {what} are used",
                    remedy=f"{limit_called(limit.name).remedy} (vram ls --users says who has most), or take it over "
                    f"with a higher limit (vram keep --takeover {limit.option} ...)"
                    if full else "",
                )
            )  # fmt: skip
    return findings
