"""What users of one keeper may do to each other: whose memory counts against whom, who may publish where.

Everything is done as the users who would do it, over real connections: the kernel says who they are.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import pwd
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np
import pytest
from tests.support.connections import close_clients
from tests.support.deadlines import SOON, until
from tests.support.keeper_here import later
from tests.support.memfds import memfds
from tests.support.other_users import OTHER, as_user

import vram
from vram.entries import attach, keepers, publish  # noqa: F401  (what becomes another user may not be able to read it)
from vram.errors import AccessDeniedError, MismatchError, PeerGoneError, UsageError
from vram.keeper import background, reports  # noqa: F401
from vram.keeper import messages as m
from vram.keeper.client import Attachment, KeeperClient, Segment
from vram.keeper.private import KeeperProcess, short_directory
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


class Reader:
    """A process of a user that holds an entry and says what it is asked for."""

    def __init__(self, uid: int, name: str) -> None:
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self._orders)  # or it would not see the end of its orders
                become(uid)
                self._serve(name, orders, answers)
            finally:
                os._exit(1)
        os.close(orders)
        os.close(answers)
        assert self.ask("sum") == 6

    def _serve(self, name: str, orders: int, answers: int) -> None:
        held = vram.attach(name)
        views = [held["x"].numpy()]
        acts: dict[str, Callable[[], Any]] = {
            "sum": lambda: int(views[0].sum()),
            "list": lambda: [entry.name for entry in vram.list_entries()],
            "news": lambda: held._client.state(held._return.lease_id).current,
            "stale": lambda: held.is_stale(),
            "revoked": lambda: held.is_revoked(),
            "attach": lambda: vram.attach("other").close(),
            "close": lambda: (views.clear(), held.close())[1],
        }
        while order := os.read(orders, 100):
            try:
                said = acts[order.decode()]()
            except BaseException as error:
                said = type(error), str(error)
            os.write(answers, pickle.dumps(said))

    def ask(self, what: str) -> Any:
        os.write(self._orders, what.encode())
        said = os.read(self._answers, 65536)
        assert said, "the reader ended"
        return pickle.loads(said)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._orders)
        os.close(self._answers)
        os.waitpid(self.pid, 0)


# -- by force ---------------------------------------------------------------------------------------------------------
@needs_root
def test_the_keepers_user_ends_leases_by_force_and_their_readers_read_on(place: str) -> None:
    with running(place):
        assert as_user(OTHER, lambda: vram.publish("n", X).version) == 1
        assert as_user(OTHER, lambda: vram.publish("other", X).version) == 1
        with Reader(THIRD, "n") as reader, Reader(OTHER, "n") as polite, Reader(THIRD, "other") as apart:
            assert apart.ask("stale") is False
            thread, came = later(lambda: vram.revoke("n", timeout=SOON, force=True))
            until(lambda: polite.ask("revoked"))
            assert polite.ask("close") is None  # which does not wait until the keeper has heard of it
            until(lambda: {one.pid for one in vram.holders()} == {reader.pid, apart.pid}, what="the end of its lease")
            assert reader.ask("sum") == 6
            assert not came, "who has not let go is waited for"
            thread2, came2 = later(lambda: vram.revoke("n", timeout=0, force=True))
            for each in (thread, thread2):
                each.join(SOON)
            (taken,) = came2
            assert isinstance(taken, vram.info.RevokeInfo), repr(taken)
            assert ([one.pid for one in taken.forced], taken.holders, taken.nbytes) == ([reader.pid], (), 0)
            assert came == [vram.info.RevokeInfo("n", (), 0)]
            assert [(one.name, one.pid) for one in vram.holders()] == [("other", apart.pid)]
            assert vram.statistics().versions == 1
            assert reader.ask("sum") == 6
            kind, said = reader.ask("news")
            assert kind is PeerGoneError
            assert f"keeper at {place} took back 'n' version 1 by force" in said
            assert "what is mapped stays mapped" in said
            assert reader.ask("revoked") is True
            assert reader.ask("list") == ["other"]
            assert reader.ask("attach") is None
            assert reader.ask("stale") is True
            assert reader.ask("sum") == 6
            assert apart.ask("stale") is False
        until(lambda: vram.statistics().leases == 0, what="the end of the last reader's lease")


@needs_root
def test_nobody_else_ends_leases_by_force_not_even_the_owner(place: str) -> None:
    with running(place):
        assert as_user(OTHER, lambda: vram.publish("n", X).version) == 1
        with Reader(THIRD, "n") as reader:
            for uid in (OTHER, THIRD):
                kind, said = as_user(uid, lambda: vram.revoke("n", timeout=None, force=True))
                assert kind is AccessDeniedError
                assert f"only uid 0, who runs the keeper at {place}, may end leases by force, not uid {uid}" in said
            # and if the client does not look:
            with of(OTHER, place) as owner, pytest.raises(AccessDeniedError, match="only uid 0, who runs this keeper"):
                owner._request(m.Done, m.Remove, "n", 0, True, True)
            assert (reader.ask("stale"), reader.ask("revoked")) == (False, False)


@needs_root
def test_force_on_the_command_line_says_what_it_did(place: str) -> None:
    program = [sys.executable, "-c", "import sys; from vram.cli import main; sys.argv[0] = 'vram'; main()"]
    with running(place):
        for as_json in (False, True):
            vram.publish("n", X)
            with Reader(THIRD, "n") as reader:
                command = [*program, "revoke", "n", "--timeout", "0", "--force", *(["--json"] if as_json else [])]
                done = subprocess.run(command, capture_output=True, text=True, timeout=SOON, check=True)
                if as_json:
                    said = json.loads(done.stdout)
                    assert ([one["pid"] for one in said["forced"]], said["holders"]) == ([reader.pid], [])
                else:
                    assert "keep their mappings until they" in done.stdout
                    assert re.search(rf"^ *n .* {THIRD} +pid {reader.pid} ", done.stdout, re.MULTILINE)
                assert reader.ask("sum") == 6


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
def somebody() -> pwd.struct_passwd:
    """Return a user who has a name, and is neither root nor nobody."""
    found = [one for one in pwd.getpwall() if one.pw_uid not in (0, 65_534) and re.fullmatch("[a-z]+", one.pw_name)]
    if not found:
        pytest.skip("this system knows no user but root")
    return found[0]


@needs_root
def test_names_under_a_user_are_published_by_that_user_alone(place: str) -> None:
    named = somebody()
    with running(place):
        names = {OTHER: [f"~{OTHER}/model"], named.pw_uid: [f"~{named.pw_name}/model", f"~{named.pw_uid}/model"]}
        for uid, mine in names.items():
            for name in mine:
                for other in (THIRD, 0):
                    for act in (
                        lambda name=name: vram.publish(name, X),
                        lambda name=name: vram.attach_or_publish(name, lambda: X),
                    ):
                        kind, said = as_user(other, act)
                        assert kind is AccessDeniedError
                        assert f"may publish '{name}', and this is uid {other}" in said
                        assert f"names under ~{other}/ are yours" in said
                assert as_user(uid, lambda name=name: vram.publish(name, X).version) == 1
                assert as_user(THIRD, lambda name=name: vram.attach(name).owner) == uid
                assert as_user(THIRD, lambda name=name: vram.attach_or_publish(name, dict).owner) == uid
                assert as_user(THIRD, lambda name=name: vram.publish(name, X))[0] is AccessDeniedError
                assert as_user(THIRD, lambda name=name: vram.remove(name))[0] is AccessDeniedError
                assert as_user(uid, lambda name=name: vram.publish(name, X).version) == 2
                vram.remove(name)
        kind, said = as_user(OTHER, lambda: vram.publish("~no-such-user/model", X))
        assert kind is AccessDeniedError
        assert f"this is uid {OTHER}; names under ~{OTHER}/ are yours" in said
        vram.publish(f"~{pwd.getpwuid(0).pw_name}/model", X)
        vram.publish("~0/model", X)
        assert [entry.name for entry in vram.list_entries("~")] == ["~0/model", "~root/model"]
