"""One answer of the doctor's."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

import msgspec

Area = Literal["host", "keeper", "gpu", "packages"]
Verdict = Literal["ok", "limited", "absent", "broken"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at.

    Attributes
    ----------
    area : str
        The subject: "host", "keeper", "gpu" or "packages".
    check : str
        The name of the check, such as ``"descriptors"`` or ``"cuda:0 fabric"``.
    verdict : str
        "ok"; "limited": it works, up to what `said` states; "absent": it is not on this machine, which matters only to
        who wants it; "broken": it is there, or has to be, and does not work.
    said : str
        The result in words.
    code : str
        The name of the driver's status, or of the errno, where one was the answer.
    remedy : str
        The remedy; empty where nothing need be.
    """

    area: Area
    check: str
    verdict: Verdict
    said: str
    code: str = ""
    remedy: str = ""


def failed(area: Area, check: str, error: BaseException, *, remedy: str = "") -> Finding:
    """Return what an error says, as something that is broken."""
    code = str(getattr(error, "name", "") or "")
    return Finding(
        area=area,
        check=check,
        verdict="broken",
        said=str(error) or type(error).__name__,
        code=code,
        remedy=remedy or str(getattr(error, "remedy", "") or ""),
    )


def unmet(findings: Iterable[Finding], needs: Collection[str]) -> list[str]:
    """Return which needs are not met, each with the reason.

    Parameters
    ----------
    needs : collection of str
        Areas or checks, such as "gpu" or "cuda:0 fabric". An area is met if something of it was found, and nothing of
        it is broken or absent but what only some machines have; a check if it is "ok" or "limited".
    """
    found = list(findings)
    left = []
    for need in needs:
        named = [one for one in found if need in (one.area, one.check)]
        if not named:
            left.append(f"{need}: nothing of that name was looked at")
        elif need in {one.area for one in named}:
            # The first of an area is what all others of it stand on.
            wrong = [one for one in named if one.verdict == "broken"] or [
                one for one in named[:1] if one.verdict == "absent"
            ]
            left += [f"{need}: {one.check}: {one.said}" for one in wrong[:1]]
        else:
            left += [f"{need}: {one.said}" for one in named if one.verdict in ("absent", "broken")]
    return left
