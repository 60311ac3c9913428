"""Which keeper is meant, how it is waited for, and the checks of arguments that all verbs share."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..arrays.numpy_on_use import np
from ..errors import ClosedError, NotFoundError, PeerGoneError, UsageError
from ..keeper.client import KeeperClient, client
from ..keeper.rules import HANDSHAKE, describe_process
from ..lifetime import waiting

if TYPE_CHECKING:
    from ..keeper import messages as m
    from ..keeper.private import Keeper
    from ..keeper.reports import VersionInfo

# Seconds that a verb waits for what another process has to do, unless its caller says otherwise. Two kinds differ, and
# say so: what looks a name up does not wait (0), and what waits for work does so for ever (None).
TIMEOUT = 10.0

FIRST_LOOK, LAST_LOOK = 0.001, 0.05  # seconds between two looks for what nobody tells of, such as a path
# Seconds in which a keeper that listens has to greet, where nobody waits for anything: it may be busy.
_ASKED_ONCE = 2.0
_LEAST = 0.001  # seconds that are left for the name, however long the keeper was waited for
NAMED = 20  # readers that are named when they were waited for in vain
_QUIETLY = 3.0  # seconds to wait for one without a word, where nobody set an end


def connect(keeper: Keeper | str | os.PathLike[str] | None) -> KeeperClient:
    """Return this process's connection to a keeper, made on first use."""
    path, label = (keeper, "") if keeper is None or type(keeper) is str else where_is(keeper)
    return client(path, label=label)


def wait_for_keeper(
    keeper: Keeper | str | os.PathLike[str] | None, timeout: float | None
) -> tuple[KeeperClient, float | None]:
    """Return this process's connection to a keeper, as soon as there is one, and the seconds that are left.
    `timeout` None waits for ever, with a warning after 3 s. The greeting has at most 5 s, and 2 s if `timeout` is 0."""
    path, label = (keeper, "") if keeper is None or type(keeper) is str else where_is(keeper)
    begin = time.monotonic()
    pause, warned = FIRST_LOOK, False
    while True:
        try:
            found = client(path, label=label, timeout=_ASKED_ONCE if timeout == 0 else for_greeting(timeout, begin))
        except PeerGoneError as error:
            waited = time.monotonic() - begin
            if timeout is not None and waited >= timeout:
                if not timeout:
                    raise
                raise PeerGoneError(f"{error} (none was there for {timeout:g} s)") from None
            if timeout is None and waited >= _QUIETLY and not warned:
                warned = True
                warnings.warn(f"{error}; waiting for it for ever (timeout=None)", RuntimeWarning, stacklevel=3)
        else:
            # Never 0 for somebody who waits: that would be to ask without waiting, which is refused in other words.
            left = timeout and max(min(timeout, _LEAST), timeout - (time.monotonic() - begin))
            return found, left
        # Nobody tells when a path comes into being.
        waiting(time.sleep, pause if timeout is None else min(pause, max(0.0, timeout - waited)))
        pause = min(pause * 1.5, LAST_LOOK)


def for_greeting(timeout: float | None, begin: float) -> float:
    """Return the seconds that a new connection may take to be greeted, of those that a caller has since `begin`."""
    if timeout is None:
        return HANDSHAKE
    if not timeout:
        return _ASKED_ONCE
    return min(HANDSHAKE, max(_LEAST, timeout - (time.monotonic() - begin)))


def current_of(client: KeeperClient, name: str) -> VersionInfo | None:
    """Return what the keeper says of the version that a name stands for, if it stands for any."""
    with contextlib.suppress(NotFoundError):
        for row in client.versions(name):
            if row.is_current:
                return row
    return None


def named_holders(rows: Sequence[m.PageRow]) -> tuple[str, ...]:
    """Name the readers that were waited for in vain, the first of them."""
    return tuple([
        f"{describe_process(row.pid, row.uid, row.label, row.host)}, lease {row.lease}" for row in rows[:NAMED]
    ])  # fmt: skip


def where_is(keeper: Keeper | str | os.PathLike[str] | None) -> tuple[str | None, str]:
    """Return the path of a keeper, if one was named, and what this process calls itself there, if it chose that."""
    if keeper is None or isinstance(keeper, (str, os.PathLike)):
        return None if keeper is None else os.fspath(keeper), ""
    from ..keeper.private import Keeper  # what starts processes: needed only by who has started one with it

    if isinstance(keeper, Keeper):
        if keeper.is_closed:
            raise ClosedError(f"the keeper at {keeper.path} was closed here; start another, or name one that runs")
        if not isinstance(keeper.path, (str, os.PathLike)) or not isinstance(keeper.label, str):
            raise UsageError(f"a Keeper's path and label are strings, not {keeper.path!r:.80} and {keeper.label!r:.80}")
        return os.fspath(keeper.path), keeper.label
    raise UsageError(f"keeper must be a socket path (str or PathLike) or a vram.Keeper, not {keeper!r:.80}")


def as_notes(meta: object, *, what: str = "meta") -> dict[str, str]:
    """Return `meta` or `expect` as a dictionary of its own; the keeper's rules check keys and values."""
    if meta is None:
        return {}
    if not isinstance(meta, Mapping):
        raise UsageError(f'{what} must be a mapping such as {{"config": "sha256:..."}}, not {meta!r:.80}')
    return dict(meta)


def check_owner(owner: object) -> int | None:
    """Return the uid of a user who was given by name or uid; None for any user."""
    if owner is None:
        return None
    if isinstance(owner, str):
        import pwd  # few ask, and it is not there on every system

        try:
            return pwd.getpwnam(owner).pw_uid
        except (KeyError, ValueError):
            raise UsageError(f"owner {owner!r:.80} is no user of this system; a uid may be given as well") from None
    if type(owner) is not int or not 0 <= owner < 2**32 - 1:
        raise UsageError(f"owner must be the name of a user or a uid, not {owner!r:.80}")
    return owner


def check_flags(**given: object) -> list[bool]:
    """Return choices between two, by their names: see :func:`check_flag`."""
    return [value if isinstance(value, bool) else check_flag(value, what) for what, value in given.items()]


def check_flag(value: object, what: str) -> bool:
    """Return a choice between two. Raises :class:`UsageError` for anything but True or False, numpy's included."""
    if isinstance(value, bool) or isinstance(value, np.bool_):  # noqa: SIM101  (numpy is loaded for what is neither)
        return bool(value)
    raise UsageError(f"{what} must be True or False, not {value!r:.40}")
