"""The key that a user's own processes on one machine have in common, where none is named: made when it is first needed.

Nothing but the file decides: it has to be this user's and nobody else's to read or write, so its bytes can have come
from nobody else, and neither can others know them. The directory that it is in has to be this user's as well, so that
nobody else puts another file there, or takes it away. It lasts as long as the user's other settings do: a carrier of
months, and who reads from it after a logout, have the same.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from ..errors import AccessDeniedError, UsageError
from ..keeper.paths import make_own
from .address import KEY_VARIABLE, read_key_file

_DIRECTORY, _FILE = "vram", "nodes.key"
_NBYTES = 32
_NAME_ONE = f"name a key file: key=, --key or ${KEY_VARIABLE}"


def own_key_path() -> Path:
    """Return the path of this user's own key: ``vram/nodes.key`` in ``$XDG_CONFIG_HOME``, by default ``~/.config``."""
    named = os.environ.get("XDG_CONFIG_HOME", "")
    if named.startswith("/"):
        return Path(named, _DIRECTORY, _FILE)
    try:
        return Path.home() / ".config" / _DIRECTORY / _FILE
    except RuntimeError as error:
        raise UsageError(f"no key is named, and this user has no home for one ({error}): {_NAME_ONE}") from None


def own_key() -> bytes:
    """Return this user's own key, made on first use.
    Raises AccessDeniedError if another user could read or write it, or could have put it there."""
    path = own_key_path()
    try:
        directory = _directory(path.parent)
        try:
            return _read(directory)
        except FileNotFoundError:
            _make(directory)
            return _read(directory)
    except (AccessDeniedError, UsageError):
        raise
    except (OSError, ValueError) as error:
        raise UsageError(
            f"no key is named, and this user's own cannot be kept at {str(path)!r:.200} ({error}): {_NAME_ONE}"
        ) from None


def _directory(place: Path) -> Path:
    try:
        return make_own(place)  # not, for instance, that of another user which was left by sudo
    except AccessDeniedError as error:
        raise AccessDeniedError(
            f"no key is named, and this user's own would be in {str(place)!r:.200}, where others could exchange it: "
            f"{error}. All above it have to be yours or root's, and nobody else's to write; or {_NAME_ONE}"
        ) from None


def _read(directory: Path) -> bytes:
    path = directory / _FILE
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY)
    return read_key_file(fd, path, owners=(os.geteuid(),))


def _make(directory: Path) -> None:
    """Make the file; where several do, one of them has made it, and nobody sees a part of it."""
    made = directory / f".{_FILE}.{secrets.token_hex(8)}"
    with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(secrets.token_bytes(_NBYTES))
        file.flush()
        os.fsync(file.fileno())
    with contextlib.suppress(FileExistsError):  # another one's, which is the key then
        os.link(made, directory / _FILE)
    made.unlink()
