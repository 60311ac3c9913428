"""Counted handles: what is undone, when, in which order, and by whom (I1 to I4, I7 to I9)."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import pickle
import random
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
from tests.support.keeper_here import is_open
from tests.support.threads import race

from vram import lifetime
from vram.errors import BusyError, ClosedError, LeakWarning, ReleaseWarning, UsageError
from vram.lifetime import Claim, FileDescriptor, Handle, Owned, live, own, stuck, unwinding


class Thing(Owned):
    """The smallest facade: owns a label and writes it down when it is taken back."""

    def __init__(self, log: list[str], name: str, *depends: Handle, fail: BaseException | None = None) -> None:
        self.link: object = None  # for cycles

        def undo() -> None:
            if fail is not None:
                raise fail
            log.append(name)

        self._claim = own(name, undo, depends=depends)


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def spills() -> Iterator[None]:
    """For tests that fail an undo on purpose: forget what is stuck in the end, or the ledger would find it."""
    before = set(stuck())
    yield
    for handle in set(stuck()) - before:
        lifetime._stuck.remove(handle)
        for other in handle._depends.values():
            lifetime._live.pop(other._id, None)


def in_order(log: list[str], *pairs: str) -> bool:
    """Whether, in each of the pairs written ``"mapping<address"``, the first was undone before the second."""
    return all(log.index(first) < log.index(second) for first, second in (pair.split("<") for pair in pairs))


MAPPING_ORDER = ("view<mapping", "mapping<address", "mapping<allocation")


def four_things(log: list[str]) -> list[Thing]:
    address, allocation = Thing(log, "address"), Thing(log, "allocation")
    mapping = Thing(log, "mapping", address.handle, allocation.handle)
    return [address, allocation, mapping, Thing(log, "view", mapping.handle)]


def run_script(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a script in an interpreter of its own, which is ended with its stacks if it hangs."""
    # Cancelled before a fork: its watchdog thread does not exist in the child, which would wait for it at its exit.
    prelude = "import faulthandler, os; faulthandler.dump_traceback_later(250, exit=True)\n"
    prelude += "os.register_at_fork(before=faulthandler.cancel_dump_traceback_later)\n"
    command = [sys.executable, *options, "-c", prelude + textwrap.dedent(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


# -- order (I1) -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_i1_every_close_order(log, order):
    things = four_things(log)
    for number in order:
        things[number].close()
        assert things[number].is_closed
    assert sorted(log) == ["address", "allocation", "mapping", "view"]
    assert in_order(log, *MAPPING_ORDER)


def test_i1_nothing_is_undone_while_something_stands_on_it(log):
    address, allocation, mapping, view = four_things(log)
    for thing in (address, allocation, mapping):
        thing.close()
    assert log == []
    view.close()
    assert log == ["view", "mapping", "allocation", "address"]  # dependencies newest first


def test_i1_dependencies_go_only_after_the_undo_has_returned():
    seen = []
    below = own("below", lambda: seen.append("below"))
    above = own("above", lambda: seen.append(below.handle.holders()), depends=(below.handle,))
    below.release()
    above.release()
    assert seen == [("above",), "below"]


def test_i1_what_a_handle_keeps_goes_with_it_and_before_what_it_stands_on(log):
    address = Thing(log, "address")
    region = Thing(log, "region")
    mapping = region.handle.keep("mapping", lambda: log.append("mapping"), depends=[address.handle])
    assert mapping.holders() == ("region",)
    address.close()
    assert mapping.is_open
    region.close()
    assert log == ["region", "mapping", "address"]
    assert not mapping.is_open


def test_i1_what_a_handle_keeps_can_be_given_back_before_it(log):
    region = Thing(log, "region")
    mapping = region.handle.keep("mapping", lambda: log.append("mapping"))
    region.handle.drop_dependency(mapping)
    assert log == ["mapping"]
    region.close()
    assert log == ["mapping", "region"]


@pytest.mark.parametrize("gone", ["keeper", "dependency"])
def test_keeping_that_fails_owns_nothing(log, gone):
    before = live()
    keeper, below, other = (Thing(log, name) for name in ("keeper", "dependency", "other"))
    keeping, needed = keeper.handle, [other.handle, below.handle]
    (keeper if gone == "keeper" else below).close()
    with pytest.raises(ClosedError, match=gone):
        keeping.keep("new", lambda: log.append("new"), depends=needed)
    assert other.handle.holders() == ("owner",)
    for thing in (keeper, below, other):
        thing.close()
    assert sorted(log) == ["dependency", "keeper", "other"]
    assert live() == before


def test_i1_a_long_chain_needs_no_deep_stack(log):
    chain = [Thing(log, "0")]
    for number in range(1, 5000):
        chain.append(Thing(log, str(number), chain[-1].handle))
    for thing in chain:
        thing.close()
    assert log == [str(number) for number in reversed(range(5000))]


def test_i1_from_many_threads():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for seed in range(60):
            log: list[str] = []
            things = four_things(log)
            extra = [things[2].handle.claim("extra") for _ in range(4)]
            jobs = [thing.close for thing in things] + [claim.release for claim in extra]
            random.Random(seed).shuffle(jobs)
            race(*(lambda mine=jobs[n::4]: [job() for job in mine] for n in range(4)))
            assert sorted(log) == ["address", "allocation", "mapping", "view"]
            assert in_order(log, *MAPPING_ORDER)
    finally:
        sys.setswitchinterval(interval)


def test_i1_one_release_from_many_threads_counts_once(log):
    for _ in range(50):
        thing = Thing(log, "x")
        other = thing.handle.claim("other")
        race(*[thing.close] * 4)
        assert log == []
        other.release()
        assert log.pop() == "x"


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
@pytest.mark.parametrize("shape", ["ring", "backwards", "star"])
def test_i1_collected_cycles_in_every_arrangement(log, order, shape):
    gc.disable()
    try:
        made = four_things(log)
        things = [made[number] for number in order]
        hub: list[object] = []
        if shape == "star":
            hub.append(things)
            for thing in things:
                thing.link = hub
        else:
            ring = things if shape == "ring" else things[::-1]
            for thing, following in zip(ring, [*ring[1:], ring[0]], strict=True):
                thing.link = following
        del made, things, hub, thing
        if shape != "star":
            del ring, following
        with pytest.warns(LeakWarning) as caught:
            gc.collect()
    finally:
        gc.enable()
    assert sorted(log) == ["address", "allocation", "mapping", "view"]
    assert in_order(log, *MAPPING_ORDER)
    assert len(caught) == 4


def test_i1_forgo_gives_one_dependency_up(log):
    below = Thing(log, "below")
    above = Thing(log, "above", below.handle, below.handle)
    handle = below.handle
    below.close()
    above.handle.drop_dependency(handle)
    assert log == []
    above.handle.drop_dependency(handle)
    assert log == ["below"]
    above.handle.drop_dependency(handle)  # nothing left: no harm
    above.close()
    assert log == ["below", "above"]


def test_own_that_fails_owns_nothing(log):
    """The caller still has the thing, and the dependencies that were fine are given back (I4)."""
    fine, closed = Thing(log, "fine"), Thing(log, "closed")
    handle = closed.handle
    closed.close()
    before = live()
    with pytest.raises(ClosedError, match="closed is closed"):
        own("above", lambda: log.append("above"), depends=(fine.handle, handle))
    assert live() == before
    assert fine.handle.holders() == ("owner",)
    fine.close()
    assert log == ["closed", "fine"]


# -- closing (I2) ---------------------------------------------------------------------------------------------------


def test_i2_close_is_idempotent(log):
    thing = Thing(log, "x")
    for _ in range(3):
        thing.close()
        thing.close(strict=True)
    assert log == ["x"]
    with pytest.raises(ClosedError, match="x was closed"):
        thing.handle
    with pytest.raises(ClosedError), thing:
        pass


@pytest.mark.parametrize("way", ["released", "dropped"])
def test_i6_a_claim_that_was_given_up_is_none_whoever_holds_the_lock(log, way):
    """What looks at tags meanwhile must not find it in its way."""
    thing = Thing(log, "x")
    handle = thing.handle
    claims = [handle.claim("a view", tag="span")]
    with lifetime._lock:
        if way == "released":
            claims[0].release()
        claims.clear()
        assert handle.holders() == ("owner",)
        assert handle.tags() == ()
    thing.close()
    assert log == ["x"]


def test_i2_close_under_another_claim_defers(log):
    thing = Thing(log, "x")
    claim = thing.handle.claim("a view", tag="span")
    handle = thing.handle
    assert handle.holders() == ("owner", "a view")
    assert handle.tags() == ("span",)
    thing.close()
    assert handle.is_open
    assert log == []
    claim.release()
    assert log == ["x"]
    assert not handle.is_open
    with pytest.raises(ClosedError):
        handle.claim("too late")
    assert repr(handle) == "<Handle x, closed, 0 claims>"


def test_a_handle_shows_its_state_and_names_what_it_depends_on(log):
    states = []
    address, memory = Thing(log, "address"), Thing(log, "memory")
    claim = own("mapping", lambda: states.append(repr(handle)), depends=(address.handle, memory.handle))
    handle = claim.handle
    assert repr(handle) == "<Handle mapping, open, 1 claims>"
    assert handle.needs() == ("address", "memory")
    claim.release()
    for owner in (address, memory):
        owner.close()
    assert states == ["<Handle mapping, closing, 0 claims>"]


def test_what_owns_memory_of_a_process_is_not_pickled(log):
    with (
        Thing(log, "x") as thing,
        pytest.raises(UsageError, match=r"^x belongs to this process and cannot be pickled or copied; send arrays"),
    ):
        pickle.dumps(thing)


def test_i2_strict_close_names_the_others_and_changes_nothing(log):
    thing = Thing(log, "x")
    claims = [thing.handle.claim(f"view {number}") for number in range(7)]
    with pytest.raises(BusyError, match=r"x is still in use .held by: view 0, view 1, .* and 2 more") as caught:
        thing.close(strict=True)
    assert caught.value.holders == tuple(f"view {number}" for number in range(7))
    assert not thing.is_closed
    assert thing.handle.is_open
    for claim in claims:
        claim.release()
    thing.close(strict=True)
    assert log == ["x"]


def test_i2_a_release_whoever_holds_the_lock_does_not_make_it_busy(log):
    thing = Thing(log, "x")
    claim = thing.handle.claim("view")
    with lifetime._lock:  # as if another finalizer were at it: this thread only appends
        claim.release()
        assert thing.handle.holders() == ("owner",)
        thing.close(strict=True)
        assert log == []
    assert live() is not None  # whatever comes next works the queue off
    assert log == ["x"]


def test_i2_what_is_dropped_is_taken_back_and_said(log):
    with pytest.warns(LeakWarning, match="x was not closed"):
        Thing(log, "x")
    assert log == ["x"]


def test_i2_the_leak_is_said_also_where_the_claim_is_collected_first(log):
    """In a cycle the collector may finalize the claim before the facade, which then finds everything undone."""

    class Adopted(Thing):
        def __init__(self, claim: Claim) -> None:
            self._claim = claim

    gc.disable()
    try:
        cycle: list[object] = [Adopted(own("x", lambda: log.append("x")))]
        cycle.append(cycle)
        del cycle
        with pytest.warns(LeakWarning, match="x was not closed"):
            gc.collect()
    finally:
        gc.enable()
    assert log == ["x"]


def test_i2_no_warning_for_what_was_closed_or_never_made(log):
    class Broken(Thing):
        def __init__(self) -> None:
            raise KeyError

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        thing = Thing(log, "x")
        thing.close()
        del thing
        with contextlib.suppress(KeyError):
            Broken()
        gc.collect()


# -- finalizers and interrupts (I3) ---------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["close", "strict", "claim", "own", "depend", "drop_dependency", "live"])
def test_i3_any_finalizer_may_run_in_the_middle_of_any_call(action):
    """The collector runs foreign finalizers while this thread is inside a guarded section. None may wait there."""
    script = f"""
    import gc, sys, threading
    from vram import lifetime
    from vram.errors import VramError
    from vram.lifetime import own, live

    base = own("base", lambda: None)
    top = own("top", lambda: None)

    class Foreign:
        def __init__(self, claims):
            self.me, self.claims = self, claims
        def __del__(self):
            a = self.claims
            try:
                if "{action}" == "close": a[0].release()
                if "{action}" == "strict": a[0].release(strict=True)
                if "{action}" == "claim": base.handle.claim("finalizer")
                if "{action}" == "own": own("late", lambda: None, depends=(base.handle,))
                if "{action}" == "depend": a[0].handle.depend(base.handle)
                if "{action}" == "drop_dependency": top.handle.drop_dependency(base.handle)
                if "{action}" == "live": live()
            except VramError:
                pass

    undone = []
    def work(rounds):
        for n in range(rounds):
            mine = own(f"thing {{n}}", lambda: undone.append(n), depends=(base.handle,))
            theirs = own(f"their thing {{n}}", lambda: undone.append(n), depends=(mine.handle,))
            Foreign([theirs])
            del theirs
            other = base.handle.claim("holder", tag=n)
            mine.handle.depend(top.handle)
            mine.handle.drop_dependency(top.handle)
            try:
                other.release(strict=True)
            except VramError:
                pass
            top.handle.depend(base.handle)
            top.handle.holders(), top.handle.tags()
            top.handle.drop_dependency(base.handle)

    gc.set_threshold(1, 1, 1)
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work, args=(150,)) for _ in range(3)]
    for t in threads: t.start()
    for t in threads: t.join()
    gc.set_threshold(700)
    gc.collect()
    assert len(undone) == 900, len(undone)
    top.release()
    base.release()
    gc.collect()
    assert not live(), live()
    print("done")
    """
    done = run_script(script)
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)


@pytest.mark.parametrize("line", range(12))
def test_i3_a_finalizer_that_forgoes_the_same_claim_takes_another(line):
    """At whichever line of `drop_dependency` it runs, each call gives up one claim, and none twice."""
    base = own("base", None)
    top = own("top", None, depends=[base.handle] * 3)
    lines = 0

    def trace(frame, event, arg):
        nonlocal lines
        if frame.f_code is not Handle.drop_dependency.__code__:
            return None
        if event == "line":
            lines += 1
            if lines == line + 1:
                sys.settrace(None)
                top.handle.drop_dependency(base.handle)
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        top.handle.drop_dependency(base.handle)
    finally:
        sys.settrace(previous)
    done = 2 if line < lines else 1
    assert base.handle.holders() == ("owner", *["top"] * (3 - done))
    top.release()
    assert base.handle.holders() == ("owner",)
    base.release()


def test_i3_finalizers_never_wait_for_the_lock(log):
    """While another thread holds it they append; what they appended is worked off by whoever comes next."""
    things = [Thing(log, str(number)) for number in range(3)]
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with lifetime._lock:
            entered.set()
            leave.wait(120)

    holder = threading.Thread(target=hold)
    holder.start()
    assert entered.wait(120)
    for thing in things:
        thing.close()  # returns
    assert log == []
    leave.set()
    holder.join(120)
    live()
    assert log == ["0", "1", "2"]


class Turned:
    """The real lock. Right before it is let go for the nth time, another thread does something, and is not waited for
    by this one's `act`: it must be done with it at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: Callable[[], object], nth: int) -> None:
        self.real, self.step, self.left = lifetime._lock, step, nth
        monkeypatch.setattr(lifetime, "_lock", self)

    def acquire(self, blocking: bool = True) -> bool:
        return self.real.acquire(blocking)

    def release(self) -> None:
        self.left -= 1
        if not self.left:
            thread = threading.Thread(target=self.step, daemon=True)
            thread.start()
            thread.join(30)
            assert not thread.is_alive(), "it waits for the lock"
        self.real.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _is_owned(self) -> bool:
        return bool(self.real._is_owned())  # type: ignore[attr-defined]


def refused(claim: Claim) -> None:
    with contextlib.suppress(BusyError):
        claim.release(strict=True)


GUARDED: dict[str, Callable[[Claim, Claim, Claim], object]] = {
    "a claim": lambda one, two, spare: one.handle.claim("another"),
    "a dependency": lambda one, two, spare: one.handle.depend(two.handle),
    "an adoption": lambda one, two, spare: one.handle.adopt(two.handle.claim("for it")),
    "a dependency given up": lambda one, two, spare: one.handle.drop_dependency(two.handle),
    "a strict release": lambda one, two, spare: spare.release(strict=True),
    "a strict release that is refused": lambda one, two, spare: refused(two),
    "the release of the last": lambda one, two, spare: spare.release(),
    "something new": lambda one, two, spare: own("new", None, depends=[two.handle]),
    "something new that another keeps": lambda one, two, spare: one.handle.keep("new", None, depends=[two.handle]),
}


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("action", GUARDED)
def test_i3_what_is_given_up_while_the_lock_is_held_is_taken_back_by_its_holder(action, nth, monkeypatch):
    """Whoever finds the lock taken leaves, and may be the last who ever comes: nobody else would look at the queue."""
    log: list[str] = []
    two = own("two", lambda: log.append("two"))
    one = own("one", lambda: log.append("one"), depends=[two.handle])
    spare = own("spare", lambda: log.append("spare"))
    forgotten = own("forgotten", lambda: log.append("forgotten"))

    def elsewhere() -> None:
        forgotten.release()
        log.append("left")

    turned = Turned(monkeypatch, elsewhere, nth)
    kept = GUARDED[action](one, two, spare)
    monkeypatch.undo()
    assert turned.left <= 0 or nth > 1
    if turned.left <= 0:
        assert "forgotten" in log, "a wakeup was lost"
        assert log.index("left") < log.index("forgotten"), "it was not left to who holds the lock"
    for claim in (kept, spare, one, two, forgotten):
        if isinstance(claim, Claim):
            claim.release()
    assert sorted(log) == sorted({*log, "one", "two", "spare", "forgotten"})


def test_i3_undo_runs_without_the_lock():
    free: list[bool] = []

    def undo() -> None:
        thread = threading.Thread(target=lambda: free.append(lifetime._lock.acquire(blocking=False)))
        thread.start()
        thread.join(120)
        free.append(lifetime._lock._is_owned())

    with lifetime._lock:
        pass
    own("x", undo).release()
    assert free == [True, False]
    lifetime._lock = type(lifetime._lock)()  # the thread that took it is gone


# -- undo that fails (I4) -------------------------------------------------------------------------------------------


def test_i4_a_failed_undo_keeps_what_it_stands_on(log, spills):
    below = Thing(log, "below")
    above = Thing(log, "above", below.handle, fail=OSError("no"))
    handle = below.handle
    below.close()
    with pytest.warns(ReleaseWarning, match="could not take back above: no; it stays allocated"):
        above.close()
    assert log == []
    assert handle.is_open
    assert handle.holders() == ("above",)
    assert [h.label for h in stuck()[-1:]] == ["above"]
    assert "stuck" in repr(stuck()[-1])
    assert handle in live()
    above.close()  # still idempotent


def test_i4_the_others_are_undone_all_the_same(log, spills):
    things = [Thing(log, str(number), fail=OSError("no") if number == 1 else None) for number in range(3)]
    with lifetime._lock:
        for thing in things:
            thing.close()
    with pytest.warns(ReleaseWarning, match="could not take back 1"):
        live()
    assert log == ["0", "2"]


def test_i4_while_unwinding_a_failed_undo_is_a_note(log, spills):
    error = KeyError("the first")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with unwinding(error):
            Thing(log, "x", fail=OSError("the second")).close()
        with pytest.raises(KeyError) as caught, Thing(log, "y", fail=OSError("the third")):
            raise error
    assert caught.value is error
    assert error.__notes__ == [
        "could not take back x: the second; it stays allocated until the process ends",
        "could not take back y: the third; it stays allocated until the process ends",
    ]


def test_i4_unwinding_ends_with_its_block(log, spills):
    outer, inner = KeyError(), KeyError()
    with unwinding(outer):
        with unwinding(inner):
            pass
        Thing(log, "x", fail=OSError("no")).close()
    assert len(outer.__notes__) == 1
    assert not hasattr(inner, "__notes__")
    with pytest.warns(ReleaseWarning):
        Thing(log, "y", fail=OSError("no")).close()


def test_i4_an_interrupt_in_an_undo_is_passed_on_and_the_others_are_still_owed(log, spills):
    first, second = Thing(log, "first", fail=KeyboardInterrupt()), Thing(log, "second")
    with lifetime._lock:
        first.close()
        second.close()
    with pytest.raises(KeyboardInterrupt), pytest.warns(ReleaseWarning, match="first"):
        live()
    live()
    assert log == ["second"]


def test_i2_close_never_raises_where_warnings_are_errors():
    """The warning then goes where exceptions of finalizers go; and the process lives on."""
    script = """
    from vram.lifetime import own, Owned
    class Thing(Owned):
        def __init__(self, name, undo):
            self._claim = own(name, undo)
    Thing("one", lambda: 1 / 0).close()
    Thing("two", lambda: None)
    import warnings
    warnings.simplefilter("always")
    def broken(*_, **__): raise LookupError("showwarning is broken")
    warnings.showwarning = broken
    Thing("three", lambda: 1 / 0).close()
    print("lives")
    """
    done = run_script(script, "-W", "error")
    assert (done.stdout, done.returncode) == ("lives\n", 0)
    assert "ReleaseWarning: could not take back one: division by zero" in done.stderr
    assert "LeakWarning: two was not closed" in done.stderr
    assert "LookupError: showwarning is broken" in done.stderr


# -- fork and exit (I7, I8) -----------------------------------------------------------------------------------------


def test_i7_after_fork_the_child_undoes_nothing():
    script = """
    import gc, os, sys, threading
    from vram import lifetime
    from vram.errors import ForkedError
    from vram.lifetime import own, Owned, live, FileDescriptor

    class Thing(Owned):
        def __init__(self, name, *depends):
            self._claim = own(name, lambda: os.write(1, f"{os.getpid() == parent} {name}\\n".encode()), depends=depends)

    parent = os.getpid()
    below = Thing("below")
    above = Thing("above", below.handle)
    dropped = Thing("dropped")
    fd = FileDescriptor.adopt(os.dup(1))
    exiting = own("at exit", lambda: os.write(1, b"at exit\\n"), at_exit=True)

    # The hard case: at the moment of the fork another thread holds the lock and something is queued.
    entered, leave = threading.Event(), threading.Event()
    def hold():
        with lifetime._lock:
            entered.set()
            leave.wait()
    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait()
    queued = Thing("queued")
    queued.close()
    pid = os.fork()
    if pid == 0:
        assert not live()
        for use in (lambda: above.handle, lambda: fd.fileno(), lambda: fd.detach(), lambda: exiting.handle.check(),
                    lambda: exiting.handle.claim("x"), lambda: own("y", None, depends=(exiting.handle,)),
                    lambda: above.__enter__()):
            try:
                use()
            except ForkedError as error:
                assert "parent of this fork" in str(error)
            else:
                raise AssertionError
        below.close(); above.close(strict=True); fd.close()
        del dropped
        gc.collect()
        mine = own("mine", lambda: os.write(1, b"mine\\n"))
        assert [h.label for h in live()] == ["mine"]
        mine.release()
        sys.exit(0)  # an ordinary exit: finalizers and atexit run
    assert os.waitpid(pid, 0)[1] == 0
    leave.set()
    thread.join()
    os.write(1, b"parent\\n")
    below.close(); above.close(); dropped.close(); fd.close()
    """
    done = run_script(script, "-W", "ignore::DeprecationWarning")  # 3.12 on: of forking beside a thread, on purpose
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "mine",
        "parent",
        "True queued",
        "True above",
        "True below",
        "True dropped",
        "at exit",
    ]


def test_i8_exit_takes_back_only_what_the_kernel_will_not():
    script = """
    import os
    from vram.lifetime import own, Owned

    class Thing(Owned):
        def __init__(self, name, at_exit):
            self._claim = own(name, lambda: print(name, flush=True), at_exit=at_exit)

    ordinary, socket, later = Thing("ordinary", False), Thing("socket", True), Thing("later", True)
    failing = own("failing", lambda: 1 / 0, at_exit=True)
    closed = Thing("closed", True)
    closed.close()
    cycle = [Thing("in a cycle", False)]
    cycle.append(cycle)
    """
    done = run_script(script, "-W", "error")
    assert (done.stdout.splitlines(), done.stderr, done.returncode) == (["closed", "later", "socket"], "", 0)


# -- file descriptors (I9) ------------------------------------------------------------------------------------------


def test_i9_adopt_lend_close():
    fd = os.memfd_create("x", os.MFD_CLOEXEC)
    with FileDescriptor.adopt(fd, "a test's") as owner:
        assert owner.fileno() == fd
        assert owner.handle.label == "a test's"
    assert not is_open(fd)
    for use in (owner.fileno, owner.detach):
        with pytest.raises(ClosedError):
            use()
    owner.close()


def test_i9_detach_gives_away():
    fd = os.memfd_create("x", os.MFD_CLOEXEC)
    owner = FileDescriptor.adopt(fd)
    assert owner.detach() == fd
    assert owner.is_closed
    owner.close()
    assert is_open(fd)
    os.close(fd)


def test_i9_detach_under_another_claim_is_refused():
    fd = os.memfd_create("x", os.MFD_CLOEXEC)
    owner = FileDescriptor.adopt(fd)
    claim = owner.handle.claim("a sender")
    with pytest.raises(BusyError, match="a sender"):
        owner.detach()
    assert owner.fileno() == fd
    claim.release()
    owner.close()
    assert not is_open(fd)


def test_i9_one_that_is_dropped_is_closed():
    """Silently: late is harmless here. Nothing that the handle keeps may keep its owner alive."""
    fd = os.memfd_create("x", os.MFD_CLOEXEC)
    FileDescriptor.adopt(fd)
    assert not is_open(fd)


def test_i9_stays_open_for_what_depends_on_it(log):
    fd = os.memfd_create("x", os.MFD_CLOEXEC)
    owner = FileDescriptor.adopt(fd)
    user = Thing(log, "user", owner.handle)
    owner.close()
    assert is_open(fd)
    user.close()
    assert not is_open(fd)


def test_i3_what_finalizers_change_can_be_listed_meanwhile() -> None:
    """Before Python 3.12 the collector comes in the middle of ``tuple(a_dict.items())``, which then raises."""
    claim = own("listed", None)
    handle = claim.handle
    kept = [handle.claim(f"holder {number}", number) for number in range(40)]

    def collected(phase: str, info: object) -> None:
        if phase == "start":  # as a finalizer might
            kept.append(handle.claim("late", "late"))
            kept.pop(0).release()

    threshold = gc.get_threshold()
    gc.callbacks.append(collected)
    try:
        for often in range(2, 40):
            gc.set_threshold(often)
            for _ in range(20):
                assert len(handle.holders()) >= 30
                assert handle.tags()  # of those that were released meanwhile some are left out
                assert handle in lifetime.live()
                with pytest.raises(BusyError):
                    claim.release(strict=True)
    finally:
        gc.callbacks.remove(collected)
        gc.set_threshold(*threshold)
    for one in kept:
        one.release()
    claim.release()


def test_finalizers_at_the_very_end_of_the_interpreter_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules have no values any more: a Claim printed that None has no append."""
    claim, thing = own("one", None), Thing([], "other")
    with monkeypatch.context() as ended:
        for name in ("_released", "_settle", "_exiting", "_generation", "_report"):
            ended.setattr(lifetime, name, None)
        claim.__del__()
        thing.__del__()
    claim.release()
    thing.close()
