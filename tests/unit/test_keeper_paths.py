"""Where a keeper is looked for, and who is believed there."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.places import short_directory

from vram.errors import AccessDeniedError, PeerGoneError, UsageError
from vram.keeper import paths
from vram.keeper.paths import check_directory, check_server, default_path, find_path, how_to_start, prepare_directory
from vram.sharing.channel import Credentials

ME = os.geteuid()
OTHER = 4242
ROOT = pytest.mark.skipif(ME != 0, reason="giving files away takes root")


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for variable in ("VRAM_KEEPER", "XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.delenv(variable, raising=False)
    with short_directory() as directory:
        yield Path(directory)


def test_the_default_path(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_path() == f"/tmp/vram-{ME}/keeper.sock"
    monkeypatch.setenv("TMPDIR", str(place))
    assert default_path() == f"{place}/vram-{ME}/keeper.sock"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place / "nowhere"))
    assert default_path() == f"{place}/vram-{ME}/keeper.sock"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    assert default_path() == f"{place}/vram/keeper.sock"
    assert find_path(None) == (f"{place}/vram/keeper.sock", False)
    monkeypatch.setenv("VRAM_KEEPER", "/somewhere/k")
    assert find_path(None) == ("/somewhere/k", True)
    assert find_path("/else/../other") == ("/other", True)


def test_a_path_that_is_too_long_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "/tmp/" + "x" * 103
    for given, variable in ((path, ""), (None, path)):
        monkeypatch.setenv("VRAM_KEEPER", variable)
        with pytest.raises(UsageError, match=r"108 bytes.*107"):
            find_path(given)


def test_the_directory_of_a_default_path_is_made_for_this_user_alone(place: Path) -> None:
    prepare_directory(str(place / "vram" / "k"), chosen=False)
    assert os.stat(place / "vram").st_mode & 0o777 == 0o700
    prepare_directory(str(place / "vram" / "k"), chosen=False)
    with pytest.raises(UsageError, match="no directory"):
        prepare_directory(str(place / "other" / "k"), chosen=True)
    with pytest.raises(UsageError, match="--socket"):
        prepare_directory(str(place / "a" / "b" / "k"), chosen=False)


def test_what_starts_a_keeper_at_the_default_path_needs_no_directory(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(place))
    path = default_path()
    # Where other programs of this user may have a keeper: one that runs on this machine would be named, too.
    monkeypatch.setattr(paths, "_places", lambda: [path])
    assert how_to_start(path) == "start one with `vram keep`"
    prepare_directory(path, chosen=False)
    assert how_to_start(path) == "start one with `vram keep`"
    monkeypatch.setenv("VRAM_KEEPER", path)  # then a keeper listens there as at any other path that was chosen
    assert how_to_start(path) == f"start one with `vram keep --socket {path}`"


def test_a_directory_is_made_for_this_user_alone_by_what_is_said(place: Path) -> None:
    path = str(place / "a" / "k")
    assert how_to_start(path) == f"start one with `install -d -m 700 {place}/a && vram keep --socket {path}`"


def test_another_keeper_of_this_user_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(place))
    (place / "run").mkdir()
    there = default_path()
    prepare_directory(there, chosen=False)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
        one.bind(there)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(place / "run"))
        path = default_path()
        assert path != there
        assert f"VRAM_KEEPER={there}" in how_to_start(path)
        with pytest.raises(PeerGoneError, match=f"VRAM_KEEPER={there}"):
            check_directory(os.path.dirname(path))


def test_a_keeper_does_not_serve_at_a_default_path_where_clients_refuse_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(place))
    path = default_path()
    os.mkdir(os.path.dirname(path), 0o755)
    with pytest.raises(AccessDeniedError, match=f"chmod 700 {os.path.dirname(path)}"):
        prepare_directory(path, chosen=True)
    os.chmod(os.path.dirname(path), 0o700)
    prepare_directory(path, chosen=True)
    os.chmod(os.path.dirname(path), 0o755)
    monkeypatch.setenv("VRAM_KEEPER", path)  # who names it names its owner, and clients do not refuse that
    prepare_directory(path, chosen=True)


def test_what_others_may_have_put_something_in_is_to_be_removed(place: Path) -> None:
    os.chmod(place, 0o770)
    with pytest.raises(AccessDeniedError, match="Remove it"):
        check_directory(str(place))


def test_a_directory_that_others_may_enter_is_refused(place: Path) -> None:
    for mode in (0o755, 0o770, 0o701):
        os.chmod(place, mode)
        with pytest.raises(AccessDeniedError, match=f"{mode:04o}"):
            check_directory(str(place))
    os.chmod(place, 0o700)
    check_directory(str(place))


def test_a_link_or_a_file_is_no_directory_to_trust(place: Path) -> None:
    (place / "real").mkdir(0o700)
    (place / "link").symlink_to(place / "real")
    (place / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(AccessDeniedError, match="not a directory"):
            check_directory(str(place / name))
    with pytest.raises(PeerGoneError, match="vram keep"):
        check_directory(str(place / "nothing"))


@ROOT
def test_somebody_elses_directory_is_refused(place: Path) -> None:
    (place / "theirs").mkdir(0o700)
    os.chown(place / "theirs", OTHER, OTHER)
    with pytest.raises(AccessDeniedError, match=str(OTHER)):
        check_directory(str(place / "theirs"))
    with pytest.raises(AccessDeniedError, match=str(OTHER)):
        prepare_directory(str(place / "theirs" / "k"), chosen=False)


def test_this_user_and_root_are_trusted_anywhere(place: Path) -> None:
    for uid in (ME, 0):
        for chosen in (True, False):
            check_server("/tmp/k", chosen, Credentials(1, uid, 0))


@ROOT
def test_another_user_is_trusted_where_only_they_can_listen_and_they_were_chosen(place: Path) -> None:
    theirs = place / "theirs"
    theirs.mkdir(0o755)
    os.chown(theirs, OTHER, OTHER)
    server = Credentials(1, OTHER, OTHER)
    check_server(str(theirs / "k"), True, server)
    with pytest.raises(AccessDeniedError, match=f"uid {OTHER}"):
        check_server(str(theirs / "k"), False, server)
    with pytest.raises(AccessDeniedError):
        check_server(str(theirs / "k"), True, Credentials(1, OTHER + 1, 0))
    os.chmod(theirs, 0o777)
    with pytest.raises(AccessDeniedError):
        check_server(str(theirs / "k"), True, server)
    with pytest.raises(AccessDeniedError):
        check_server("/tmp/k", True, server)
