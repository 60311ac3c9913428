"""The rights of sessions in a catalogue: to publish, claim, write, move and remove. An error says which one is missing.

Users are those that the kernel names. Root has the rights of any user, unless it runs the keeper.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import AccessDeniedError, AsleepError, BusyError, NotFoundError, UsageError
from ..spec import format_count, format_size
from .records import Session, Version
from .rules import home_of

UNMAPPED = 65_534  # the uid of every user that a user namespace does not map


def be_mapped(session: Session, name: str) -> None:
    """Refuse an unmapped user: anybody may be that."""
    if session.uid == UNMAPPED:
        raise AccessDeniedError(f"an unmapped user (uid {UNMAPPED}) may attach, not publish {name!r}")


def publish(session: Session, name: str, current: Version | None) -> None:
    """Refuse a session that may not publish under a name, whose version is now `current`."""
    be_mapped(session, name)
    _be_at_home(session, name)
    if current is not None and current.owner != session.uid:
        raise AccessDeniedError(
            f"{name!r} belongs to uid {current.owner}; uid {session.uid} may not publish under it; take another name"
        )


def claim(session: Session, name: str, owner: int | None) -> None:
    """Refuse a session that may not have the claim on a name, so that it comes to belong to `owner`."""
    _be_at_home(session, name)
    if owner not in (None, session.uid):
        raise AccessDeniedError(
            f"{name!r} is to belong to uid {owner}: uid {session.uid} cannot publish it so, and nobody who can is "
            f"about to. Attach it with a timeout to wait for that"
        )


def _be_at_home(session: Session, name: str) -> None:
    if home_of(name) not in (None, session.uid):
        raise AccessDeniedError(
            f"only uid {home_of(name)} may publish {name!r}, and this is uid {session.uid}; names under "
            f"~{session.uid}/ are yours"
        )


def write(version: Version) -> None:
    """Refuse to write to a version that was published read-only."""
    if not version.writable:
        raise AccessDeniedError(
            f'{version.name!r} version {version.number} was published read-only; attach with access="r", or '
            f'"cow" for private changes, or publish it with writable=True'
        )


def not_the_writer(version: Version) -> UsageError | AccessDeniedError:
    """Return the error for a session that would update a version that it did not publish to be updated."""
    what = f"{version.name!r} version {version.number}"
    if not version.updates:
        return UsageError(f"{what} was not published with updatable=True")
    who = "which is gone: publish it again" if version.writer is None else f"{version.writer}"
    return AccessDeniedError(f"only the process that published {what} may update it in place, {who}")


def remove(session: Session, versions: Sequence[Version], keeper_uid: int) -> None:
    """Refuse a session that may not remove all of these versions."""
    for one in versions:
        if session.uid not in (one.owner, keeper_uid):
            raise AccessDeniedError(
                f"{one.name!r} version {one.number} belongs to uid {one.owner}; uid {session.uid} may not remove it"
            )


def move(session: Session, version: Version, purpose: str, *, is_current: bool) -> bool:
    """Whether a session may park a version, or wake the parked one that it came to, now; if not, another session is
    about to. Refuse one that may not at all."""
    what = f"{version.name!r} version {version.number}"
    if version.parked and purpose != "wake":
        raise AsleepError(
            f"{what} is parked{' already' * bool(purpose)}: its bytes are in memory of the host. "
            f"vram.attach({version.name!r}, wake=True) brings them back"
        )
    if session.uid != version.owner:
        if version.move is not None and version.parked:
            return False
        raise AccessDeniedError(
            f"{what} belongs to uid {version.owner}, who alone may {purpose} it: not uid {session.uid}"
        )
    if not is_current:
        raise NotFoundError(f"{what} was replaced or removed: only the current version moves")
    if version.parked:
        return version.move is None
    if version.writable or version.updates:
        how = "writable=True" if version.writable else "updatable=True"
        raise UsageError(
            f"{what} was published with {how}, and what was written to it while it is parked would be lost: "
            f"publish it read-only, or remove it"
        )
    if awake := [lease for lease in version.leases.values() if not lease.asleep]:
        size, count = format_size(version.nbytes), format_count(len(awake), "lease")
        holders = tuple(f"{lease.session}, {size}" for lease in awake[:20])
        raise BusyError(f"{what} cannot be parked as long as somebody holds it: {count} of {size}", holders)
    return True
