"""A follower has the version that is current, whatever happens to the entry, the keeper or who reads."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.deadlines import SOON, until
from tests.support.forked import end_of, refused
from tests.support.keeper_here import later
from tests.support.own_keeper import own_keeper

import vram
from vram.errors import (
    BusyError,
    ClosedError,
    LeakWarning,
    MismatchError,
    NotFoundError,
    PeerGoneError,
    UsageError,
    WaitTimeoutError,
)
from vram.keeper import background
from vram.keeper.client import KeeperClient
from vram.keeper.private import KeeperProcess

CELLS = 1 << 14

# Follows "n" and says what it sees: by an iterator, by a callback, or by asking. Ends with its standard input.
READER = """
import sys, threading
import vram
def say(lease):
    w = lease["w"].numpy()
    assert (w == w[0]).all()
    print(int(w[0]), flush=True)
if sys.argv[1] == "callback":
    vram.follow("n", on_version=say)
    sys.stdin.read()
else:
    with vram.follow("n") as model:
        def end():
            sys.stdin.read()
            model.close()
        threading.Thread(target=end).start()
        for lease in model:
            say(lease)
print("end", flush=True)
"""


def publish(value: int, cells: int = CELLS, **how: Any) -> int:
    return vram.publish("n", {"w": np.full(cells, value)}, **how).version


def first(array: Any) -> int:
    """What all its elements are: half of one version and half of another is no answer."""
    values = array.numpy()
    assert (values == values[0]).all()
    return int(values[0])


def leases() -> int:
    return vram.statistics().leases


def is_at(model: vram.typing.Follower, value: int) -> bool:
    with contextlib.suppress(NotFoundError, PeerGoneError):
        return first(model["w"]) == value
    return False


def comes_to(model: vram.typing.Follower, value: int) -> None:
    until(lambda: is_at(model, value), what=f"the version with {value}")


@contextlib.contextmanager
def reader(mode: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process that follows, for the length of a ``with`` block; it ends by itself."""
    process = subprocess.Popen(
        [sys.executable, "-c", READER, mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
        rest, _ = process.communicate(timeout=SOON)
        assert rest.endswith("end\n")
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate(timeout=SOON)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def model() -> Iterator[vram.typing.Follower]:
    publish(1)
    with vram.follow("n") as model:
        yield model


pytestmark = pytest.mark.filterwarnings("error")
with_keeper = pytest.mark.usefixtures("kept")


# -- over processes --------------------------------------------------------------------------------------------------
@with_keeper
@pytest.mark.parametrize("mode", ["iterator", "callback"])
def test_another_process_sees_each_version(mode: str) -> None:
    publish(1)
    with reader(mode) as process:
        for value in range(1, 5):
            assert line(process) == f"{value}"
            publish(value + 1)
        assert line(process) == "5"


def test_followers_go_on_when_their_keeper_was_killed() -> None:
    """S5: what is mapped stays, and what the next keeper has is attached."""
    with own_keeper() as keeper:
        publish(1)
        with vram.follow("n") as model, reader("iterator") as process:
            assert line(process) == "1"
            keeper.kill()
            until(lambda: model.state == "lost", what="that the keeper is missed")
            assert first(model["w"]) == 1
            assert model.is_stale()
            assert isinstance(model.refused, PeerGoneError)
            again = KeeperProcess(keeper.path)
            try:
                until(lambda: model.state == "removed", what="the next keeper")
                assert first(model["w"]) == 1
                publish(2)  # its first version: the number is the same, and the memory another
                comes_to(model, 2)
                assert (model.version, model.state, model.refused) == (1, "current", None)
                assert line(process) == "2"
                publish(3)
                comes_to(model, 3)
                assert line(process) == "3"
            finally:
                model.close()
                again.stop()


# -- versions and their memory ---------------------------------------------------------------------------------------
@with_keeper
def test_what_is_read_stays_and_the_rest_is_given_back(model: vram.typing.Follower) -> None:
    """I6: references are the pins. Nothing waits for the collector."""
    gc.disable()
    try:
        array, view = model["w"], model["w"].numpy()
        publish(2)
        comes_to(model, 2)
        assert (first(array), int(view[-1])) == (1, 1)
        assert leases() == 2
        with model.current() as lease:
            publish(3)
            comes_to(model, 3)
            assert first(lease["w"]) == 2
            assert leases() == 3
        until(lambda: leases() == 2, what="the return of the second version")
        with pytest.raises(ClosedError):
            lease["w"]
        del array
        assert leases() == 2
        del view
        until(lambda: leases() == 1, what="the return of the first version")
    finally:
        gc.enable()


@with_keeper
def test_one_reader_closes_for_itself_alone(model: vram.typing.Follower) -> None:
    one, other = model.current(), model.current()
    one.close()
    assert first(other["w"]) == first(model["w"]) == 1
    assert other.numpy().keys() == {"w"}
    assert (one.is_closed, other.is_closed) == (True, False)
    other.close(wait=True)
    assert first(model["w"]) == 1
    for keep in (lambda: model.current().keep_only("w"), lambda: model.current().keep_all()["w"]):
        with keep() as kept:
            assert first(kept) == 1
        assert first(model["w"]) == 1
    with pytest.raises(UsageError, match="goes on by itself"), model.current() as lease:
        lease.refresh()


@with_keeper
def test_sections_of_all_leases_are_one_page(model: vram.typing.Follower) -> None:
    """I14: the publisher waits for a section, whichever lease of the follower it was entered by."""
    vram.publish("u", {"w": np.full(4, 1)}, updatable=True)
    with vram.follow("u") as updated:
        with updated.current() as lease, lease.reading() as number:
            assert (number, first(lease["w"])) == (1, 1)
            with pytest.raises((BusyError, WaitTimeoutError)):
                vram.update("u", timeout=0.01).__enter__()
        with vram.update("u") as arrays:
            arrays["w"].numpy()[...] = 3
        with updated.current() as lease, lease.reading():
            assert first(lease["w"]) == 3


@with_keeper
def test_an_iterator_leaves_out_what_it_was_too_late_for(model: vram.typing.Follower) -> None:
    versions = iter(model)
    lease = next(versions)
    for value in range(2, 6):
        publish(value)
        comes_to(model, value)
    newest = next(versions)
    assert (newest.version, first(newest["w"])) == (model.version, 5)
    assert lease.is_closed
    assert first(next(iter(model))["w"]) == 5  # another one begins anew


@with_keeper
def test_many_threads_read_while_versions_come(model: vram.typing.Follower) -> None:
    """Each array is of one version, and no thread sees an older one after a newer one."""
    over, behind = threading.Event(), 1 - model.version

    def read() -> int:
        last = count = 0
        while not over.is_set():
            with model.current() as lease:
                value = first(lease["w"])
                assert value - lease.version == behind
                assert value >= last
            last, count = value, count + 1
        return count

    threads = [later(read) for _ in range(4)]
    for value in range(2, 40):
        publish(value)
    comes_to(model, 39)
    over.set()
    for thread, came in threads:
        thread.join(SOON)
        assert isinstance(came[0], int)
        assert came[0] > 0, came
    until(lambda: leases() == 1, what="the return of all versions but one")


@with_keeper
def test_what_was_revoked_is_let_go(model: vram.typing.Follower) -> None:
    """S5: the owner wants its memory, and a follower is nobody who has to be asked twice."""
    versions = iter(model)
    next(versions)
    thread, came = later(lambda: first(next(versions)["w"]))  # waits, and must not hold the version by that
    until(lambda: len(model.bells) > 0, what="that the thread waits")
    assert not vram.revoke("n", timeout=SOON).holders
    until(lambda: model.state == "revoked", what="that it is let go")
    for use in (lambda: model["w"], model.current, lambda: model.version, lambda: "w" in model):
        with pytest.raises(NotFoundError, match="revoked by its owner"):
            use()
    publish(2)
    comes_to(model, 2)
    thread.join(SOON)
    assert came == [2]


@with_keeper
@pytest.mark.parametrize("how", [{"expect": {"kind": "a"}}, {"same_arrays": True}], ids=["meta", "arrays"])
def test_a_version_that_is_something_else_is_refused(how: dict[str, Any]) -> None:
    """The one before stays, and it is said why; the next one that is as it should be is taken."""
    publish(1, meta={"kind": "a"})
    with vram.follow("n", **how) as model:
        publish(2, CELLS + 1, meta={"kind": "b"})
        until(lambda: model.state == "refused", what="the refusal")
        assert isinstance(model.refused, MismatchError)
        assert first(model["w"]) == 1
        assert model.is_stale()
        until(lambda: leases() == 1, what="the return of what was refused")
        publish(3, CELLS + 2, meta={"kind": "b"})
        publish(4, meta={"kind": "a"})
        comes_to(model, 4)
        assert (model.state, model.refused) == ("current", None)


@with_keeper
def test_what_stays_though_it_was_replaced_is_let_go_when_it_is_revoked() -> None:
    publish(1)
    with vram.follow("n", same_arrays=True) as model:
        publish(2, 1)
        until(lambda: model.state == "refused", what="the refusal")
        assert not vram.revoke("n", version=model.version, timeout=SOON).holders
        until(lambda: model.state == "revoked", what="that it is let go")


@with_keeper
def test_who_comes_first_waits() -> None:
    with pytest.raises(NotFoundError):
        vram.follow("n", timeout=0)
    with pytest.raises(WaitTimeoutError):
        vram.follow("n", timeout=0.01)
    thread, came = later(lambda: vram.follow("n"))
    until(lambda: vram.statistics().waiting == 1, what="that it waits")
    publish(1)
    thread.join(SOON)
    with came[0] as model:
        assert first(model["w"]) == 1
    publish(1)
    with pytest.raises(MismatchError):
        vram.follow("n", owner=os.geteuid() + 1)


@with_keeper
def test_what_cannot_be() -> None:
    with pytest.raises(UsageError):
        vram.follow("n", on_version="callback")  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        vram.follow("n", same_arrays="yes")  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        vram.follow("")
    with pytest.raises(PeerGoneError):
        vram.follow("n", keeper="/nowhere/keeper.sock", timeout=0.1)


@with_keeper
def test_an_error_of_a_callback_is_said_and_the_next_version_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda what: said.append(what.exc_value))
    publish(1)
    error = ZeroDivisionError("of the callback")

    def fail(lease: vram.Lease) -> None:
        raise error

    with vram.follow("n", on_version=fail) as model:
        until(lambda: len(said) == 1, what="the first error")
        publish(2)
        comes_to(model, 2)
        until(lambda: len(said) == 2, what="the second error")
    assert said == [error, error]
    error.__traceback__ = None


@with_keeper
def test_closing_ends_what_waits(model: vram.typing.Follower) -> None:
    threads = [later(lambda: [first(lease["w"]) for lease in model]) for _ in range(3)]
    until(lambda: len(model.bells) == 3, what="that all wait")
    held = model.current()
    model.close()
    for thread, came in threads:
        thread.join(SOON)
        assert came == [[1]]
    assert first(held["w"]) == 1  # a reader's own
    held.close()
    for use in (lambda: model["w"], model.current, lambda: iter(model), model.is_stale):
        with pytest.raises(ClosedError):
            use()
    assert model.state == "closed"
    model.close()
    until(lambda: not leases(), what="the return of the version")


@with_keeper
def test_who_is_dropped_ends_unless_somebody_is_called_back(kept: vram.Keeper) -> None:
    publish(1)
    called: list[float] = []
    vram.follow("n", on_version=lambda lease: called.append(first(lease["w"])))
    gc.collect()
    publish(2)
    until(lambda: called[-1:] == [2], what="the callback")
    (task,) = background.following._users
    task.holder.close()
    with pytest.warns(LeakWarning, match="follower of 'n'"):
        vram.follow("n")  # dropped at once
    until(lambda: not leases(), what="the return of the versions")


@with_keeper
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_no_follower_i7(model: vram.typing.Follower) -> None:
    versions = iter(model)
    next(versions)

    def work() -> int:
        count = refused(lambda: model["w"], model.current, lambda: next(versions), model.is_stale)
        model.close()
        return count

    assert end_of(work) == 4
    publish(2)
    comes_to(model, 2)


# -- several of one process ------------------------------------------------------------------------------------------
@with_keeper
def test_each_follower_has_a_lease_of_its_own_whatever_it_asks_for() -> None:
    """Private copies, arrays that have to be the same, `expect`, or the same as another."""
    publish(1, meta={"kind": "a"})
    ways: list[dict[str, Any]] = [{}, {}, {"access": "cow"}, {"access": "cow"}, {"expect": {"kind": "a"}}]
    ways += [{"same_arrays": True}, {"same_arrays": True}]
    with contextlib.ExitStack() as stage:
        models = [stage.enter_context(vram.follow("n", **way)) for way in ways]
        assert leases() == len(ways)
        models[2]["w"].numpy()[...] = 7
        assert [first(model["w"]) for model in models] == [1, 1, 7, 1, 1, 1, 1]
        models[0].close()
        publish(2, CELLS + 1, meta={"kind": "a"})
        for model in models[1:5]:
            comes_to(model, 2)
        with vram.follow("n", same_arrays=True) as late:  # it begins with these
            assert first(late["w"]) == 2
            assert first(models[5]["w"]) == 1
        until(lambda: leases() == 6, what="the return of what they had before")
    until(lambda: not leases(), what="the return of all")


@with_keeper
def test_a_new_version_costs_a_lease_a_watch_and_a_release() -> None:
    before = requests()
    publish(1)
    with vram.follow("n") as model:
        for value in range(1, 5):
            if value > 1:
                publish(value)
            comes_to(model, value)
            until(lambda value=value: asked_since(before)["watch"] == value, what="that it listens")
        until(lambda: leases() == 1, what="the return of the others")
        assert asked_since(before) == {"attach": 4, "watch": 4, "release": 3}


def asked_since(before: Counter[str]) -> dict[str, int]:
    now = requests()
    return {kind: now[kind] - before[kind] for kind in ("attach", "watch", "release")}


def requests() -> Counter[str]:
    with KeeperClient.connect(os.environ["VRAM_KEEPER"]) as client:
        return Counter({row.kind: row.count for row in client.measure().requests})


@with_keeper
def test_a_callback_may_close_follow_and_be_the_last() -> None:
    publish(1)
    made: list[vram.typing.Follower] = []
    seen: list[tuple[str, int]] = []

    def close_all(lease: vram.Lease) -> None:
        seen.append(("one", first(lease["w"])))
        if lease.version > version:
            made.append(vram.follow("n", on_version=lambda lease: seen.append(("late", first(lease["w"])))))
            one.close()
            other.close()

    with vram.follow("n") as other:
        version = other.version
        one = vram.follow("n", on_version=close_all)
        until(lambda: ("one", 1) in seen, what="the first version")
        publish(2)
        until(lambda: ("late", 2) in seen, what="the callback of who joined in one")
        publish(3)
        until(lambda: ("late", 3) in seen, what="the next version")
        made[0].close()
    until(lambda: not leases(), what="the return of all")
    assert seen == [("one", 1), ("one", 2), ("late", 2), ("late", 3)]
