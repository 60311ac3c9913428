"""How far long work has come: what is counted, by whom, and what a line of a terminal makes of it."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import vram
from vram.memory.long_work import Work, count, current, long_work, watching
from vram.progress import Rate, bar

MIB = 1 << 20


def work(done: int, total: int, what: str = "publishing model") -> Work:
    made = Work(what, total)
    made.done = done
    return made


def rate(speed: float) -> Rate:
    made = Rate()
    made.add(0, 10.0)
    made.add(int(speed * 2), 12.0)
    return made


def test_a_line_says_how_much_how_fast_and_how_long() -> None:
    line = bar(work(512 * MIB, 2048 * MIB), rate(256 * MIB), 120).plain
    assert line.startswith("publishing model  ━")
    assert line.endswith("  25%  512 MiB of 2 GiB  256 MiB/s  6 s left")
    assert line.count("━") == 40


def test_nothing_that_a_terminal_would_obey_is_drawn() -> None:
    assert "\x1b" not in bar(work(1, 2, "publishing \x1b[2Jx"), rate(0), 100).plain
    assert bar(work(1, 2, "publishing é"), rate(0), 100, plain=True).plain.isascii()


def test_who_looks_sees_what_is_under_way_and_only_that() -> None:
    with watching() as one, watching() as two:
        with long_work("outer", 10), long_work("inner", 5):
            count(3)
            assert [(seen.what, seen.look()) for seen in one] == [("outer", 0), ("inner", 3)]
            assert one == two
        assert one == two == []
        with pytest.raises(KeyError), long_work("fails", 10):
            raise KeyError
        assert one == []
    assert current() is None


class Seen:
    """What was under way at its end: how much of it was counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.works: list[tuple[str, int, int]] = []
        ending = Work.look

        def remember(one: Work) -> None:
            self.works.append((one.what, ending(one), one.total))

        class Watch(list):  # type: ignore[type-arg]
            def remove(self, one: Work) -> None:
                remember(one)
                super().remove(one)

        monkeypatch.setattr("vram.memory.long_work._watches", (Watch(),))


def test_all_bytes_of_a_file_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    save_file({"a": np.ones(3 * MIB, "uint8"), "b": np.ones(5, "uint8")}, file)
    seen = Seen(monkeypatch)
    with vram.private_keeper():
        published = vram.publish_file("m", file, device="host")
    ((what, done, total),) = seen.works
    assert (what, done) == ("publishing m", total)
    assert total >= published.nbytes == 3 * MIB + 5


def test_sleep_and_wake_count_what_goes_to_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = Seen(monkeypatch)
    with vram.zeros(4 * MIB, "uint8", device="host") as array:
        vram.sleep(array, to=tmp_path)
        vram.wake(array)
        assert [(done, total) for _, done, total in seen.works] == [(4 * MIB, 4 * MIB)] * 2
        assert seen.works[0][0] == f"putting memory to sleep in {tmp_path}"
        vram.sleep(array, to=None)
        vram.wake(array)
    assert [total for _, _, total in seen.works[2:]] == [0, 0]  # nothing moves: over before it is shown


def test_memory_made_ahead_is_counted_by_who_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    ready = vram.prepare("host", 8 * MIB, chunk=2 * MIB)
    try:
        assert ready.wait(120.0)
    finally:
        ready.close()
    assert all(one == ("making memory on host ahead", 8 * MIB, 8 * MIB) for one in seen.works)


def test_nothing_is_drawn_where_stderr_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with vram.show_progress(), long_work("x", 10):
        assert current() is None  # nobody looks
        assert not [thread for thread in threading.enumerate() if thread.name == "vram: progress"]
    assert capfd.readouterr() == ("", "")
