"""Which user a name such as ``~ann/...`` belongs to: asked of the system's data base, seldom.

The data base may be on another machine, and the keeper's loop waits for it. So it is asked for the name of a user who
is connected, remembered for some seconds; for a name that somebody made up only a few times in that time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["UserNames", "by_number", "is_number"]

_REMEMBERED = 10.0  # seconds
_MOST = 1_024  # names remembered
_QUESTIONS = 16  # about names that are not their own, of one user in that time


def is_number(user: str) -> bool:
    """Whether `user` is a uid, in decimal and in the one way that each has."""
    return user.isascii() and user.isdecimal() and str(int(user[:10])) == user


def by_number(uid: int, user: str) -> str:
    """Say why a user is not the one that is meant, or nothing; where no user has a name."""
    if is_number(user):
        return "" if int(user) == uid else f"that is uid {user}, and not uid {uid}"
    return f"no user {user!r} is known here"


class UserNames:
    """The users of this system.

    Parameters
    ----------
    now : callable
        A clock, in seconds, that never goes back.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._until = 0.0
        self._names: dict[int, str] = {}
        self._uids: dict[str, int] = {}  # -1: there is no such user
        self._questions: dict[int, int] = {}

    def why_not(self, uid: int, user: str) -> str:
        """Say why user `uid` is not the one called `user`, a name or a decimal uid; nothing if it is."""
        if is_number(user):
            return by_number(uid, user)
        now = self._now()
        if now >= self._until or len(self._names) + len(self._uids) >= _MOST:
            self._names.clear()
            self._uids.clear()
            if now >= self._until:
                self._questions.clear()
                self._until = now + _REMEMBERED
        if uid not in self._names:
            self._names[uid] = _name_of(uid)
        own = self._names[uid]
        if own == user:
            return ""
        me = f"uid {uid}, {own}" if own else f"uid {uid}, who has no name here"
        if user not in self._uids:
            asked = self._questions[uid] = self._questions.get(uid, 0) + 1
            if asked > _QUESTIONS:
                return f"that is not the name of {me}"
            self._uids[user] = _uid_of(user)
        found = self._uids[user]
        if found == uid:  # a second name of the same user
            return ""
        return f"no user {user!r} is known here" if found < 0 else f"that is uid {found}, and not {me}"


def _name_of(uid: int) -> str:
    import pwd  # not there on every system that this module is imported on

    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OSError, OverflowError):
        return ""


def _uid_of(user: str) -> int:
    import pwd

    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, OSError):
        return -1
