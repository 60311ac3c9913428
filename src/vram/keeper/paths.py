"""The path at which a keeper listens, and checks of whom it belongs to."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shlex
import stat
import sys
from pathlib import Path

from ..errors import AccessDeniedError, DriverError, PeerGoneError, UnsupportedError, UsageError
from ..sharing.channel import Credentials, check_path, check_sockets

ENVIRONMENT = "VRAM_KEEPER"
PRIVATE = "vram-private-"  # how the name of a private keeper's directory begins


def default_path() -> str:
    """Return the socket of a keeper that nobody chose a path for: ``vram/keeper.sock`` in ``XDG_RUNTIME_DIR``, else
    ``vram-<uid>/keeper.sock`` in ``TMPDIR`` or ``/tmp``. Its directory may have yet to be made."""
    return _places()[0]


def _places() -> list[str]:
    """Where a keeper of this user may listen that nobody chose a path for: here, then as other programs may see it."""
    runtime, uid = os.environ.get("XDG_RUNTIME_DIR"), os.geteuid()
    found = [os.path.join(runtime, "vram", "keeper.sock")] if runtime and os.path.isdir(runtime) else []
    found.append(os.path.join(os.environ.get("TMPDIR") or "/tmp", f"vram-{uid}", "keeper.sock"))
    return [*found, f"/run/user/{uid}/vram/keeper.sock", f"/tmp/vram-{uid}/keeper.sock"]


def _elsewhere(path: str) -> str:
    """Say where else a keeper of this user may listen; nothing if there is no such socket."""
    for other in _places():
        with contextlib.suppress(OSError):  # none, or not for us to see
            found = os.lstat(other)
            if os.path.abspath(other) != path and stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid():
                return f", or use the one at another place: {ENVIRONMENT}={shlex.quote(other)}"
    return ""


def find_path(path: str | os.PathLike[str] | None) -> tuple[str, bool]:
    """Return the absolute path to use, and whether a user chose it (an argument or ``VRAM_KEEPER``).
    Raises UsageError for more than the 107 bytes of a unix socket's path."""
    if sys.platform != "linux":
        check_platform()
    named = os.fspath(path) if path is not None else os.environ.get(ENVIRONMENT) or None
    if named is None:
        return _checked(absolute(default_path(), "the keeper's socket in TMPDIR")), False
    return _checked(named if named.startswith("/") else absolute(named, "the keeper's socket")), True


def absolute(path: str, what: str) -> str:
    """Return the absolute path of what a caller named. Raises UsageError if the working directory is gone."""
    try:
        return os.path.abspath(path)
    except FileNotFoundError:
        raise UsageError(
            f"{what} {path!r:.200} is relative to the working directory, which is gone: give an absolute path"
        ) from None


@functools.lru_cache(maxsize=64)  # asked for in every call that names its keeper, and mostly the same
def _checked(path: str) -> str:
    found = os.path.abspath(path)
    check_path(found)
    return found


def how_to_start(path: str) -> str:
    """Say how to have a keeper where there is none at a path."""
    directory = os.path.dirname(path)
    if os.path.basename(directory).startswith(PRIVATE):
        return (
            "that was a private keeper, which ends with the program that started it: vram.private_keeper() starts "
            "another, and `vram keep` one that stays"
        )
    if is_default(path):  # whose directory the keeper makes, as its clients want it
        return f"start one with `vram keep`{_elsewhere(path)}"
    command = f"vram keep --socket {shlex.quote(path)}"
    if not os.path.isdir(directory):
        command = f"install -d -m 700 {shlex.quote(directory)} && {command}"
    return f"start one with `{command}`"


def is_default(path: str) -> bool:
    """Whether clients of this user look for a keeper at an absolute path without being told of it."""
    try:
        return not os.environ.get(ENVIRONMENT) and path == os.path.abspath(default_path())
    except FileNotFoundError:  # a relative TMPDIR, and the working directory is gone
        return False


def check_socket(path: str) -> None:
    """Raise :class:`UsageError` if what is at a path is there and no socket."""
    with contextlib.suppress(OSError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise UsageError(
                f"{path} is no socket, and a keeper can be neither found nor started there: choose another path "
                f"(an argument, --socket or {ENVIRONMENT})"
            )


def may_connect(path: str) -> bool:
    """Whether this user may connect to a socket at an absolute path: the kernel asks for the right to write."""
    return os.access(path, os.W_OK, effective_ids=True)


def closed_door(path: str) -> str:
    """Return the outermost directory above an absolute path that this user may not enter, or nothing."""
    parts = os.path.dirname(path).split("/")
    for count in range(1, len(parts) + 1):
        directory = "/".join(parts[:count]) or "/"
        if os.path.isdir(directory) and not os.access(directory, os.X_OK, effective_ids=True):
            return directory
    return ""


def how_to_be_let_in(path: str) -> str:
    """Say what keeps this user out of a socket, and who can change that."""
    door = closed_door(path)
    what = f"uid {os.geteuid()} may not enter {door}" if door else f"its permissions keep uid {os.geteuid()} out"
    where = f", and lets that group enter {door}" if door else ""
    return f"{what}; whoever runs a keeper there starts it with `vram keep --mode 0660 --group GROUP`{where}"


def make_own(place: Path) -> Path:
    """Make a directory that no other user can replace or put files into, if it is missing; return it without links.
    Raises AccessDeniedError if another user could change it, or a directory above it."""
    place = Path(os.path.realpath(place))
    for one in [one for one in (*reversed(place.parents), place) if not one.is_dir()]:
        one.mkdir(mode=0o700, exist_ok=True)  # not by parents=True, which goes by the umask
    for one in (place, *place.parents):
        found = one.stat()
        if found.st_uid != os.geteuid() and (found.st_uid or one == place):
            raise AccessDeniedError(f"{str(one)!r:.200} belongs to uid {found.st_uid}")
        # In a sticky directory others make what they like, and move nothing of ours.
        if found.st_mode & 0o022 and (one == place or not found.st_mode & stat.S_ISVTX):
            raise AccessDeniedError(f"{str(one)!r:.200} has mode {stat.S_IMODE(found.st_mode):04o}")
    return place


def make_directory(prefix: str, place: str) -> str:
    """Make a directory of a new name, 0700, and return its path."""
    import tempfile  # who only connects makes none

    try:
        return tempfile.mkdtemp(prefix=prefix, dir=place)
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise UsageError(
            f"a socket needs a directory, and none can be made in {place} ({error.strerror}): set TMPDIR to one "
            f"that is there and can be written to"
        ) from None
    except OSError as error:
        number = error.errno or 0
        raise DriverError(
            f"mkdtemp in {place}", number, errno.errorcode.get(number, "unknown"), f"{error.strerror}; set TMPDIR"
        ) from None


def check_platform() -> None:
    """Raise :class:`UnsupportedError` where there can be no keeper."""
    if sys.platform != "linux":
        raise UnsupportedError("a keeper", "Linux (memfd, and descriptors over unix sockets)", sys.platform)
    check_sockets()


def check_directory(directory: str) -> None:
    """Raise unless `directory` is a real directory of this user that no other user may enter.
    Its owner decides which process clients talk to."""
    try:
        found = os.lstat(directory)
    except FileNotFoundError:
        raise PeerGoneError(
            f"no keeper: {directory} does not exist; start one with `vram keep`"
            f"{_elsewhere(os.path.join(directory, 'keeper.sock'))}, or one for this program alone with "
            f"vram.private_keeper()"
        ) from None
    if not stat.S_ISDIR(found.st_mode):
        raise AccessDeniedError(f"{directory} is not a directory; set {ENVIRONMENT} to a socket path you trust")
    is_own = found.st_uid == os.geteuid()
    if not is_own or found.st_mode & 0o077:
        # A directory that others could write to may have files of theirs in it.
        keeps = is_own and not found.st_mode & 0o022
        remedy = f"Close it with `chmod 700 {shlex.quote(directory)}`" if keeps else "Remove it"
        raise AccessDeniedError(
            f"{directory} belongs to uid {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}; it has to be "
            f"0700 and of uid {os.geteuid()}. {remedy}, or set {ENVIRONMENT} to a socket path you trust"
        )


def prepare_directory(path: str, chosen: bool) -> None:
    """Make the directory of a default path, 0700; that of a chosen path has to exist.
    A chosen path that is also the default is checked like it: clients with no other path would refuse the keeper."""
    directory = os.path.dirname(path)
    if chosen:
        if not os.path.isdir(directory):
            raise UsageError(f"no directory {directory} to listen in; make it first (`install -d -m 700`)")
        if is_default(path):
            check_directory(directory)
        return
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise UsageError(f"cannot make {directory}: {error.strerror}; choose a path with --socket") from None
    check_directory(directory)


def check_server(path: str, chosen: bool, server: Credentials) -> None:
    """Raise AccessDeniedError unless the listening process is of this user, or root, or owns a chosen path's directory
    in which nobody else may write: nobody but that owner and root can have put the socket there."""
    if server.uid in (os.geteuid(), 0):
        return
    if chosen:
        directory = os.lstat(os.path.dirname(path))
        if stat.S_ISDIR(directory.st_mode) and directory.st_uid == server.uid and not directory.st_mode & 0o022:
            return
    raise AccessDeniedError(
        f"the process that listens at {path} is of uid {server.uid}, whom uid {os.geteuid()} has no reason to trust: "
        f"it is neither you nor root, nor the owner of a directory that you chose and only they can write in"
    )
