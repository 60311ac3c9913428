"""What users of one keeper may do to each other: whose memory counts against whom, who may publish where.

Everything is done as the users who would do it, over real connections: the kernel says who they are.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.connections import close_clients
from tests.support.deadlines import SOON, until
from tests.support.keeper_here import later
from tests.support.memfds import memfds
from tests.support.other_users import OTHER, as_user
from tests.support.places import short_directory

import vram
from vram.entries import attach, keepers, publish  # noqa: F401  (what becomes another user may not be able to read it)
from vram.errors import AccessDeniedError, MismatchError, UsageError
from vram.keeper import background, reports  # noqa: F401
from vram.keeper.client import Attachment, KeeperClient, Segment
from vram.keeper.private import KeeperProcess
from vram.open_files import close_fds

THIRD = OTHER + 1
KIB4 = Segment(4096)
X = {"x": np.arange(4)}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")


@pytest.fixture(scope="module", autouse=True)
def _everything_is_loaded() -> None:
    """What becomes another user may not be able to read this interpreter's files."""
    with short_directory() as directory, contextlib.closing(vram.zeros(4, device="host")) as array:
        keeper = KeeperProcess(f"{directory}/k")
        try:
            for _ in range(2):
                vram.publish("n", {"x": np.arange(4), "array": array}, keeper=keeper.path)
            with vram.attach_or_publish("m", lambda: X, keeper=keeper.path) as lease:
                assert not lease.is_revoked()
                lease.upgrade().close()
                vram.entry("n", keeper=keeper.path)
                vram.holders(keeper=keeper.path)
                vram.revoke("m", timeout=0, keeper=keeper.path)
            with pytest.raises(vram.errors.NotFoundError):
                vram.remove("o", keeper=keeper.path)
        finally:
            close_clients()
            keeper.stop()


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where every user of the machine reaches a keeper, which is the default."""
    with short_directory() as directory:
        os.chmod(directory, 0o711)
        monkeypatch.setenv("VRAM_KEEPER", f"{directory}/k")
        yield f"{directory}/k"
        close_clients()


@contextlib.contextmanager
def running(path: str, *options: str) -> Iterator[KeeperProcess]:
    keeper = KeeperProcess(path, ["--mode", "0666", *options])
    try:
        yield keeper
        assert keeper.said() == ""
    finally:
        print(f"the keeper ended with {keeper.process.poll()} before it was told to, and said {keeper.said()!r}")
        keeper.stop()


def of(uid: int, path: str) -> KeeperClient:
    """Connect as a user, whom the kernel vouches for from then on."""
    os.seteuid(uid)
    try:
        return KeeperClient.connect(path)
    finally:
        os.seteuid(0)


def lease(client: KeeperClient, name: str, **options: Any) -> Attachment:
    got = client.attach(name, **options)
    close_fds(got.fds)
    return got


def become(uid: int) -> None:
    """In a child of a fork: be another user from now on."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


# -- whose it is ------------------------------------------------------------------------------------------------------
@needs_root
def test_a_name_that_another_took_is_told_by_its_owner_whatever_its_meta_says(place: str) -> None:
    meta = {"config": "v1"}
    mismatch = rf"'model' version 1 belongs to uid {OTHER}, and not to uid 0"
    with running(place), of(OTHER, place) as squatter, memfds(1) as fds:
        thread, came = later(lambda: vram.attach("model", owner="root", timeout=SOON))
        until(lambda: squatter.statistics().waiting == 1)
        squatter.publish("model", [KIB4], fds, meta=meta)
        thread.join(SOON)
        assert isinstance(came[0], MismatchError), "who waits would wait as long as the squatter likes"
        for owner in (0, "root", pwd.getpwuid(0).pw_name):
            for timeout in (0.0, None):
                with pytest.raises(MismatchError, match=mismatch):
                    vram.attach("model", expect=meta, owner=owner, timeout=timeout)
            with pytest.raises(MismatchError, match=mismatch):
                vram.attach_or_publish("model", dict, expect=meta, owner=owner)
        as_user(THIRD, lambda: vram.publish("thirds", X))
        with vram.attach("thirds", owner=THIRD) as lease:
            assert lease.owner == THIRD
        with vram.attach_or_publish("thirds", dict, owner=THIRD) as lease:
            assert lease.owner == THIRD
        with vram.attach_or_publish("ours", lambda: X, owner="root") as lease:
            assert lease.owner == 0
        kind, said = as_user(THIRD, lambda: vram.attach_or_publish("unmade", dict, owner=0))
        assert kind is AccessDeniedError
        assert f"'unmade' is to belong to uid 0: uid {THIRD} cannot publish it so" in said
        claim = squatter.attach_or_claim("made")
        thread, came = later(lambda: vram.attach_or_publish("made", dict, owner=OTHER, timeout=SOON).owner)
        until(lambda: squatter.statistics().waiting == 1)
        squatter.publish("made", [KIB4], fds, claim=claim)  # type: ignore[arg-type]
        thread.join(SOON)
        assert isinstance(came[0], vram.errors.ProtocolError), "which it is no array"


@pytest.mark.parametrize("owner", ["no such user", "", -1, 2**32, 1.0, True, b"root", "a\0b"])
def test_owners_that_cannot_be(kept: vram.Keeper, owner: Any) -> None:
    for act in (lambda: vram.attach("n", owner=owner), lambda: vram.attach_or_publish("n", lambda: X, owner=owner)):
        with pytest.raises(UsageError, match="owner"):
            act()


# -- names under a user -----------------------------------------------------------------------------------------------
@needs_root
def test_names_under_a_user_are_published_by_that_user_alone(place: str) -> None:
    name = f"~{OTHER}/model"
    with running(place):
        for other in (THIRD, 0):
            for act in (lambda: vram.publish(name, X), lambda: vram.attach_or_publish(name, lambda: X)):
                kind, said = as_user(other, act)
                assert kind is AccessDeniedError
                assert f"may publish '{name}', and this is uid {other}; names under ~{other}/ are yours" in said
        assert as_user(OTHER, lambda: vram.publish(name, X).version) == 1
        assert as_user(THIRD, lambda: vram.attach(name).owner) == OTHER
        assert as_user(THIRD, lambda: vram.attach_or_publish(name, dict).owner) == OTHER
        for act in (lambda: vram.publish(name, X), lambda: vram.remove(name)):
            assert as_user(THIRD, act)[0] is AccessDeniedError
        vram.publish("~0/model", X)
        assert [entry.name for entry in vram.list_entries("~")] == ["~0/model", name]
        with pytest.raises(UsageError, match="~uid/"):
            vram.publish("~root/model", X)
