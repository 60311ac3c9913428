"""What a keeper logs, who cannot stop it by not reading, and who cannot flood it or write lines of others."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.support.deadlines import SOON
from tests.support.places import short_directory

import vram
from vram.errors import NotFoundError, QuotaError
from vram.keeper import event_log
from vram.keeper.client import KeeperClient, close_client
from vram.keeper.private import KeeperProcess
from vram.sharing.channel import Channel

VRAM = Path(sys.executable).with_name("vram")
NASTY = 'x"\n{"forged": 1}\r\x1b[2J\x7f\x9b\u2028\ud800é'


@pytest.fixture
def logged() -> Iterator[int]:
    """The reading end of the pipe that this process logs to."""
    ours, theirs = os.pipe()
    event_log.start("json", "debug", theirs)
    yield ours
    event_log.stop()
    os.close(theirs)
    os.close(ours)


def peer(uid: int = 1000, label: str = "") -> Any:
    session = SimpleNamespace(uid=uid, pid=7, label=label, host="")
    return SimpleNamespace(session=session, credentials=SimpleNamespace(uid=uid, pid=7))


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def of(found: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [line for line in found if line["event.name"] == event]


def ended(ours: int) -> list[dict[str, Any]]:
    """Stop the log, and return what was written."""
    event_log.stop()
    os.set_blocking(ours, False)
    with os.fdopen(os.dup(ours), "rb") as file:
        return lines((file.read() or b"").decode("ascii"))


def kept(act: Any, *options: str) -> list[dict[str, Any]]:
    """Run a keeper with a log, do something with it, and return what it logged."""
    with short_directory() as directory:
        keeper = KeeperProcess(os.path.join(directory, "k.sock"), ["--log", "json", *options])
        try:
            act(keeper.path)
        finally:
            close_client(keeper.path)
            keeper.stop()
        return lines(keeper.said())


# -- what is said -----------------------------------------------------------------------------------------------------
def test_a_life_of_a_keeper_in_lines() -> None:
    def act(path: str) -> None:
        for _ in range(2):
            vram.publish("a/b", {"a": np.zeros(4)}, keeper=path)
        for _ in range(5):
            vram.attach("a/b", keeper=path).close(wait=True)
        with pytest.raises(NotFoundError):
            vram.attach("none", keeper=path)
        with pytest.raises(QuotaError):
            vram.publish("c", {"a": np.zeros(4)}, keeper=path)
        vram.revoke("a/b", keeper=path)
        vram.publish("a/b", {"a": np.zeros(4)}, keeper=path)
        vram.remove("a/b", keeper=path)

    found = kept(act, "--max-entries", "1")
    assert [line["event.name"].removeprefix("vram.") for line in found] == [
        "keeper.start", "keeper.ready", "entry.published", "entry.replaced", "quota.refused", "entry.revoked",
        "entry.published", "entry.removed", "keeper.shutdown",
    ]  # fmt: skip
    published = of(found, "vram.entry.published")[0]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", published["timestamp"])
    assert abs(_seconds(published["timestamp"]) - time.time()) < SOON
    assert (published["severity"], published["vram.entry.name"], published["vram.entry.version"]) == ("INFO", "a/b", 1)
    assert (published["user.id"], published["process.pid"]) == (str(os.geteuid()), os.getpid())
    (refused,) = of(found, "vram.quota.refused")
    assert (refused["severity"], refused["error.type"], refused["vram.request"]) == (
        "WARNING", "QuotaError", "offer",
    )  # fmt: skip


def _seconds(timestamp: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(timestamp).timestamp()


def test_debug_says_who_comes_and_each_request_and_warning_no_publication() -> None:
    def act(path: str) -> None:
        vram.publish("a", {"a": np.zeros(4)}, keeper=path)
        vram.attach("a", keeper=path).close(wait=True)
        with KeeperClient.connect(path) as client:
            client.statistics()

    names = [line["event.name"] for line in kept(act, "--log-level", "debug")]
    assert names.count("vram.client.connected") == 2
    assert names.count("vram.client.disconnected") >= 1
    assert "vram.request.answered" in names
    assert kept(act, "--log-level", "warning") == []


def test_who_breaks_the_protocol_is_named_with_the_reason() -> None:
    def act(path: str) -> None:
        with Channel.connect(path) as channel:
            channel.send(b"no greeting")
            channel.recv(timeout=SOON)

    (line,) = of(kept(act), "vram.protocol.error")
    assert (line["user.id"], line["process.pid"], line["vram.request"]) == (str(os.geteuid()), os.getpid(), "hello")
    assert line["error.type"] == "ProtocolError"
    assert line["error.message"]


def test_a_request_that_takes_long_is_said_at_the_default_level(logged: int) -> None:
    logging.getLogger("vram.keeper").setLevel("INFO")
    event_log.answered(peer(), "attach", event_log.SLOW / 2)
    event_log.answered(peer(), "attach", event_log.SLOW)
    (line,) = ended(logged)
    assert (line["event.name"], line["vram.request"], line["vram.request.duration"]) == (
        "vram.request.slow", "attach", event_log.SLOW,
    )  # fmt: skip


def test_a_keeper_that_does_not_start_says_it_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "k.sock").write_text("in the way")
    done = subprocess.run(
        [VRAM, "keep", "--socket", tmp_path / "k.sock", "--log", "json"],
        capture_output=True, text=True, timeout=SOON,
    )  # fmt: skip
    assert done.returncode == 1
    start, failed = lines(done.stderr)
    assert (start["event.name"], start["service.version"]) == ("vram.keeper.start", vram.__version__)
    assert failed["event.name"] == "vram.keeper.failed"


def test_without_a_log_nothing_is_written() -> None:
    with short_directory() as directory:
        keeper = KeeperProcess(os.path.join(directory, "k.sock"))
        vram.publish("a", {"a": np.zeros(4)}, keeper=keeper.path)
        close_client(keeper.path)
        keeper.stop()
    assert keeper.said() == ""


# -- words of others --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("form", event_log.FORMS)
def test_control_characters_make_no_lines(form: str) -> None:
    ours, theirs = os.pipe()
    event_log.start(form, "info", theirs)
    try:
        event_log.answered(peer(label=NASTY), "attach", 0.0, QuotaError(NASTY))
    finally:
        event_log.stop()
        os.close(theirs)
    with os.fdopen(ours, "rb") as file:
        text = file.read()
    assert text.count(b"\n") == 1
    assert all(0x20 <= byte < 0x7F for byte in text[:-1]), text
    if form == "json":
        assert json.loads(text)["vram.client.label"] == NASTY
        assert "forged" not in json.loads(text)


def test_text_is_quoted_where_it_could_be_taken_for_more_fields() -> None:
    ours, theirs = os.pipe()
    event_log.start("text", "info", theirs)
    event_log.answered(peer(label="me user.id=0"), "attach", 0.0, QuotaError("full"))
    event_log.stop()
    os.close(theirs)
    with os.fdopen(ours) as file:
        assert 'vram.client.label="me user.id=0"' in file.read()


def test_what_python_logs_is_a_line_too(logged: int) -> None:
    try:
        raise ValueError("a\nb")
    except ValueError:
        logging.getLogger("asyncio").exception("in a %s", "callback")
    (line,) = ended(logged)
    assert (line["body"], line["error.type"], line["severity"]) == ("in a callback", "ValueError", "ERROR")


def test_what_found_no_room_is_counted_and_said(logged: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl.fcntl(logged, fcntl.F_SETPIPE_SZ, 4096)
    monkeypatch.setattr(event_log._handler.queue, "maxsize", 50)  # type: ignore[union-attr]
    for number in range(1_000):
        event_log.say("test", fields={"number": number})
    text = io.StringIO()
    reading = threading.Thread(target=_copy, args=(logged, text))
    reading.start()
    deadline = time.monotonic() + SOON
    while "vram.log.dropped" not in text.getvalue():
        assert time.monotonic() < deadline
        event_log.say("test", fields={"number": -1})
        time.sleep(0.01)
    event_log.say("end")
    reading.join(SOON)
    assert not reading.is_alive()
    found = lines(text.getvalue())
    numbers = [line["number"] for line in of(found, "test") if line["number"] >= 0]
    dropped = sum(line["vram.log.dropped"] for line in of(found, "vram.log.dropped"))
    assert numbers == sorted(numbers)
    assert dropped + len(of(found, "test")) >= 1_000
    assert 0 < len(numbers) < 1_000


def _copy(fd: int, text: io.StringIO) -> None:
    with os.fdopen(os.dup(fd), "r") as file:
        for line in file:
            text.write(line)
            if '"end"' in line:
                return


def test_a_reader_that_is_gone_ends_no_keeper(logged: int) -> None:
    ours, theirs = os.pipe()
    event_log.start("json", "info", theirs)
    os.close(ours)
    event_log.say("one")
    event_log.say("two")
    event_log.stop()
    os.close(theirs)
    assert "vram: log" not in [thread.name for thread in threading.enumerate()]
