"""The interrupt shield (I12): SIGINT is handled when the outermost shielded call is over, or where that waits."""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
from tests.support.deadlines import SOON
from tests.support.samples import rounds

from vram import lifetime
from vram.lifetime import let_in, shielded, take, wait_for, waiting

log: list[str] = []


def reach() -> None:
    """Where Python asks for signals before the first line."""
    log.append("not reached")


def press(times: int = 1) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    log.clear()
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before
    assert (lifetime._shield, lifetime._interrupted) == (0, False)


@pytest.fixture
def counted() -> Iterator[list[int]]:
    """A handler that raises nothing, as that of an event loop."""
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    yield came
    signal.signal(signal.SIGINT, before)


@shielded
def change(during: Callable[[], object] = press, result: object = "done") -> object:
    log.append("first step")
    during()
    log.append("last step")
    return result


def test_a_change_is_done_before_ctrl_c_raises() -> None:
    with pytest.raises(KeyboardInterrupt):
        change()
    assert log == ["first step", "last step"]


def test_a_block_that_ends_with_a_change_is_left() -> None:
    """The interrupt comes within the block, not where the function begins that leaves it."""

    class Block:
        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            log.append("left")

    with pytest.raises(KeyboardInterrupt):
        with Block():
            change()
    assert log == ["first step", "last step", "left"]


def test_what_dropping_the_result_does_not_take_back_is_undone() -> None:
    class Block:
        def end(self, result: object) -> None:
            log.append(f"undone: {result}")

        @shielded(undo=end)
        def __enter__(self) -> str:
            press()
            log.append("entered")
            return "it"

        @shielded
        def __exit__(self, *_: object) -> None:
            log.append("left")

    with pytest.raises(KeyboardInterrupt), Block():
        log.append("not reached")
    assert log == ["entered", "undone: it"]


def test_the_result_of_a_wait_in_c_is_not_lost() -> None:
    """As that of recvmsg, which may have taken descriptors off a socket: the interrupt comes when all is done."""
    send = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int)(("PyErr_SetInterruptEx", ctypes.pythonapi))
    with pytest.raises(KeyboardInterrupt):
        change(lambda: log.append(f"sent: {waiting(sum, map(send, [signal.SIGINT]))}"))
    assert log == ["first step", "sent: 0", "last step"]


def test_a_handler_that_raises_nothing_leaves_the_result_to_the_caller(counted: list[int]) -> None:
    """Such a handler takes a note, as asyncio does for the first Ctrl-C: the caller has the result, so it stays."""

    @shielded(undo=lambda box, result: log.append(f"undone: {result}"))
    def make(box: str) -> int:
        press()
        return 7

    assert make("box") == 7
    assert counted == [signal.SIGINT]
    assert log == []


def test_what_undoes_a_result_may_wait_and_may_fail() -> None:
    def end(box: str, result: object) -> None:
        waiting(time.sleep, 0)
        log.append(f"undone: {result}")
        raise ValueError("it is there still")

    @shielded(undo=end)
    def make(box: str) -> int:
        press()
        return 7

    with pytest.raises(KeyboardInterrupt) as found:
        make("box")
    assert log == ["undone: 7"]
    assert found.value.__notes__ == ["not taken back: ValueError('it is there still')"]


def test_it_is_the_outermost_call_that_counts() -> None:
    with pytest.raises(KeyboardInterrupt):
        change(change)
    assert log == ["first step"] * 2 + ["last step"] * 2


def test_many_are_one(counted: list[int]) -> None:
    change(lambda: press(5))
    assert counted == [signal.SIGINT]


def test_the_handler_that_was_there_is_called_and_may_raise_what_it_likes() -> None:
    def handler(number: int, frame: FrameType | None) -> None:
        assert frame is not None
        raise TimeoutError

    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(TimeoutError):
            change()
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert log == ["first step", "last step"]


def test_an_error_of_the_call_is_raised_and_then_the_interrupt() -> None:
    @shielded
    def fail() -> None:
        press()
        raise ValueError("wrong")

    with pytest.raises(KeyboardInterrupt) as found:
        fail()
    assert isinstance(found.value.__context__, ValueError)
    assert log == []


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_nothing_changes_where_no_handler_of_python_is(handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        change(lambda: log.append(str(signal.getsignal(signal.SIGINT) is handler)))
    finally:
        signal.signal(signal.SIGINT, before)
    assert log == ["first step", "True", "last step"]


def test_other_threads_are_not_shielded_and_shield_nobody() -> None:
    inside, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=change, args=(lambda: (inside.set(), go_on.wait(SOON)),))
    thread.start()
    assert inside.wait(SOON)
    with pytest.raises(KeyboardInterrupt):
        press()
    go_on.set()
    thread.join(SOON)
    assert log == ["first step", "last step"]


# -- waits -------------------------------------------------------------------------------------------------------------
def later(act: Callable[[], object], seconds: float = 0.05) -> threading.Thread:
    """Do something in another thread in a moment."""
    thread = threading.Timer(seconds, act)
    thread.start()
    return thread


def kill() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def never_ready() -> list[tuple[int, int]]:
    source, sink = os.pipe()
    try:
        poll = select.poll()
        poll.register(source, select.POLLIN)
        return poll.poll(SOON * 1000)
    finally:
        log.append("closed")
        os.close(source)
        os.close(sink)


TAKEN = threading.Lock()
TAKEN.acquire()
WAITS: dict[str, Callable[[], object]] = {
    "poll": lambda: waiting(never_ready),
    "sleep": lambda: waiting(time.sleep, SOON),
    "an event": lambda: wait_for(threading.Event(), SOON),
    "an event, for ever": lambda: wait_for(threading.Event()),
    "a lock": lambda: take(TAKEN, SOON),
    "a lock, for ever": lambda: take(TAKEN),
}


@pytest.mark.parametrize("wait", WAITS)
def test_it_is_let_in_where_a_call_waits_at_once_and_one_from_before(wait: str) -> None:
    begin, thread = time.monotonic(), later(kill)
    with pytest.raises(KeyboardInterrupt):
        change(WAITS[wait])
    thread.join()
    with pytest.raises(KeyboardInterrupt):
        change(lambda: (press(), WAITS[wait]()))
    assert time.monotonic() - begin < SOON / 2
    assert "last step" not in log


def test_one_is_let_in_between_two_pieces() -> None:
    def pieces() -> None:
        for number in range(3):
            let_in()
            log.append(str(number))
            press()

    with pytest.raises(KeyboardInterrupt):
        change(pieces)
    assert log == ["first step", "0"]


def test_a_second_one_waits_for_the_cleanup_of_the_first() -> None:
    def wait_and_clean_up() -> None:
        try:
            waiting(press)
        finally:
            press()
            log.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        change(wait_and_clean_up)
    assert log == ["first step", "cleaned up"]


def test_a_callback_may_make_shielded_calls_and_be_interrupted_itself() -> None:
    def callback() -> None:
        try:
            change()  # in the callback it is the outermost one
        except KeyboardInterrupt:
            log.append("caught")
        press()

    with pytest.raises(KeyboardInterrupt):
        change(lambda: waiting(callback))
    assert log == ["first step", "first step", "last step", "caught"]


def test_what_is_waited_for_is_returned() -> None:
    event, lock = threading.Event(), threading.Lock()
    event.set()
    assert change(lambda: log.append(str(waiting(max, 1, 2)))) == "done"
    assert wait_for(event, 0)
    assert (take(lock, 0), take(lock, 0)) == (True, False)
    assert not wait_for(threading.Event(), 0.01)
    lock.release()
    assert log[1] == "2"
    with pytest.raises(StopIteration):  # of a user's function, as any other error
        change(lambda: waiting(lambda: next(iter(()))))


def test_waits_outside_of_a_shield_are_plain_calls() -> None:
    with pytest.raises(KeyboardInterrupt):
        waiting(press)
    let_in()


# -- an event loop, forks, finalizers ----------------------------------------------------------------------------------
def test_asyncio_cancels_its_main_task_once() -> None:
    async def main() -> None:
        try:
            change()
            await asyncio.sleep(SOON)
        except asyncio.CancelledError:
            log.append("cancelled")
            raise

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert log == ["first step", "last step", "cancelled"]


def test_a_signal_handler_of_a_loop_runs_once() -> None:
    async def main() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, log.append, "handled")
        change(kill)
        await asyncio.sleep(0.05)

    asyncio.run(main())
    assert log == ["first step", "last step", "handled"]


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=SOON, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_child_forked_by_another_thread_in_the_middle_has_the_handler_again() -> None:
    """Python's main thread is the one that forked, and in no call."""
    script = """
    import os, signal, threading, warnings
    from vram.lifetime import shielded
    warnings.simplefilter("ignore", DeprecationWarning)

    def fork():
        if (pid := os.fork()) == 0:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                os._exit(7)
            os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    @shielded
    def change():
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()

    change()
    """
    assert run(script) == "7\n"


def test_a_child_forked_in_the_middle_ends_the_call_as_its_parent_does() -> None:
    script = """
    import os, signal
    from vram.lifetime import shielded

    @shielded
    def change():
        pids.append(os.fork())
        signal.raise_signal(signal.SIGINT)

    pids = []
    try:
        change()
        print("not reached")
    except KeyboardInterrupt:
        if not pids[0]:
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]))
    """
    assert run(script) == "7\n"


def test_a_finalizer_of_ours_is_not_cut_short() -> None:
    """What it undoes is undone, and the interrupt reaches whoever dropped the object: Python prints errors there."""
    undone: list[str] = []

    def undo() -> None:
        press()
        undone.append("undone")

    held = [lifetime.own("held", undo)]

    def drop() -> None:
        held.clear()
        reach()

    with pytest.raises(KeyboardInterrupt):
        drop()
    assert undone == ["undone"]
    assert not log


@pytest.mark.parametrize("makes", ["own", "claim"])
def test_what_a_finalizer_does_not_do_is_done_with_the_next_call(makes: str) -> None:
    """An interrupt where it begins: Python prints it, and drops the finalizer."""
    undone: list[str] = []
    held = [lifetime.own("it", lambda: undone.append("it"))]
    if makes == "claim":
        first = held.pop()
        held.append(first.handle.claim("another"))
        first.release()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_name == "__del__":
            sys.setprofile(None)
            raise KeyboardInterrupt

    before, hook = sys.getprofile(), sys.unraisablehook
    sys.unraisablehook = lambda said: log.append(type(said.exc_value).__name__)
    sys.setprofile(profile)
    try:
        held.clear()
    finally:
        sys.setprofile(before)
        sys.unraisablehook = hook
    assert (log, undone) == (["KeyboardInterrupt"], [])
    lifetime.own("something else", None).release()
    assert undone == ["it"]


def test_close_is_not_cut_short() -> None:
    undone: list[str] = []
    base = lifetime.own("base", lambda: undone.append("base"))
    claim = lifetime.own("top", lambda: (press(), undone.append("top")), depends=[base.handle])
    base.release()
    with pytest.raises(KeyboardInterrupt):
        claim.release()
    assert undone == ["top", "base"]


@pytest.mark.parametrize("seed", range(rounds(8, 1)))
def test_wherever_it_comes_it_is_raised_once_and_nothing_is_lost(seed: int) -> None:
    """SIGINT from another process at random times: each is raised, and what was begun then is returned or undone."""
    script = f"""
    import os, random, signal
    from vram.lifetime import shielded

    made = []

    @shielded(undo=lambda box, number: made.remove(number))
    def make(box, number):
        made.append(number)
        return number

    ready, go = os.pipe()
    parent, chance = os.getpid(), random.Random({seed})
    if os.fork() == 0:
        os.close(go)
        while os.read(ready, 1):
            for _ in range(chance.randrange(3000)):
                pass
            os.kill(parent, signal.SIGINT)
        os._exit(0)
    for _ in range(300):
        number, got = 0, None
        try:
            os.write(go, b"x")
            while True:
                number += 1
                got = None
                got = make("box", number)
                made.clear()
        except KeyboardInterrupt:
            pass
        assert made in ([], [got]), (made, number, got)
        made.clear()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    print("nothing was lost")
    """
    assert run(script) == "nothing was lost\n"
