"""Which user a name such as ``~ann/...`` belongs to: asked of the system's database, seldom.

The database may be on another machine, so :mod:`.lookups` asks in other threads, before a request is handled. It is
asked for the name of a user who is connected, remembered for some seconds; for a name that somebody made up only a few
times in that time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

__all__ = ["Answer", "UserNames", "by_number", "is_number"]

_REMEMBERED = 10.0  # seconds
_MOST_USERS, _MOST = 1_024, 64  # users of whom answers are remembered, and names of each
_QUESTIONS = 16  # about names that are not their own, of one user in that time


def is_number(user: str) -> bool:
    """Whether `user` is a uid, in decimal and in the one way that each has."""
    return user.isascii() and user.isdecimal() and str(int(user[:10])) == user


def by_number(uid: int, user: str) -> str:
    """Say why a user is not the one that is meant, or nothing; where no user has a name."""
    if is_number(user):
        return "" if int(user) == uid else f"that is uid {user}, and not uid {uid}"
    return f"no user {user!r} is known here"


class Answer(NamedTuple):
    """What the database says: the name of who asks, or none, and the uid of the name asked for, or -1."""

    own: str
    found: int


class _Known:
    """What was asked about the names of one user."""

    __slots__ = ("answers", "own", "questions", "until")

    def __init__(self) -> None:
        self.own = ""
        self.until = float("-inf")  # after that the user's own name is asked for anew, and names are counted anew
        self.questions = 0
        self.answers: dict[str, tuple[str, float]] = {}  # why a name is not the user's, and until when that is new


class UserNames:
    """The users of this system.

    Parameters
    ----------
    now : callable
        A clock, in seconds, that never goes back.
    name_of, uid_of : callable
        The database: the name of a uid, or nothing; the uid of a name, or -1.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        name_of: Callable[[int], str] | None = None,
        uid_of: Callable[[str], int] | None = None,
    ) -> None:
        self._now = now
        self._name_of = name_of or _name_of
        self._uid_of = uid_of or _uid_of
        self._users: dict[int, _Known] = {}

    def knows(self, uid: int, user: str) -> bool:
        """Whether it is known, and was asked not long ago, whether user `uid` is the one called `user`; or is not
        asked, since that user has asked for too many names."""
        if is_number(user):
            return True
        known, now = self._users.get(uid), self._now()
        if known is None:
            return False
        return known.answers.get(user, ("", 0.0))[1] > now or (known.until > now and known.questions >= _QUESTIONS)

    def question(self, uid: int, user: str) -> Callable[[], Answer]:
        """Return what asks the database, in any thread and for as long as that takes."""
        known = self._users.get(uid)
        own = known.own if known is not None and known.until > self._now() else None
        return partial(self._ask, uid, user, own)

    def _ask(self, uid: int, user: str, own: str | None) -> Answer:
        own = self._name_of(uid) if own is None else own
        return Answer(own, uid if own == user else self._uid_of(user))

    def learn(self, uid: int, user: str, answer: Answer) -> None:
        """Remember an answer."""
        now = self._now()
        known = self._users.pop(uid, None) or _Known()
        self._users[uid] = known  # behind all others: the first one is forgotten first
        if now >= known.until:
            known.own, known.until, known.questions = answer.own, now + _REMEMBERED, 0
        me = _described(uid, answer.own)
        known.questions += answer.own != user
        if answer.found == uid:  # perhaps a second name of the same user
            why = ""
        else:
            why = f"no user {user!r} is known here" if answer.found < 0 else f"that is uid {answer.found}, and not {me}"
        known.answers.pop(user, None)
        known.answers[user] = (why, now + _REMEMBERED)
        if len(known.answers) > _MOST:
            del known.answers[next(iter(known.answers))]
        if len(self._users) > _MOST_USERS:
            del self._users[next(iter(self._users))]

    def why_not(self, uid: int, user: str) -> str | None:
        """Say why user `uid` is not the one called `user`, a name or a decimal uid; nothing if it is.

        What was asked before is not asked again, however long ago that was: a request is looked at once more when its
        turn has come. None if nothing is known of it any more: the caller is in the thread that serves everybody, and
        nothing is asked here.
        """
        if is_number(user):
            return by_number(uid, user)
        known = self._users.get(uid)
        if known is not None and user in known.answers:
            return known.answers[user][0]
        if known is not None and self.knows(uid, user):
            return f"that is not the name of {_described(uid, known.own)}"
        return None


def _described(uid: int, own: str) -> str:
    return f"uid {uid}, {own}" if own else f"uid {uid}, who has no name here"


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
