"""Messages of a keeper: they come back as they were sent, and what is wrong is refused (S7, S9)."""

from __future__ import annotations

import msgspec
import pytest

from vram import errors
from vram.keeper import messages as m
from vram.keeper.failures import failure, raised
from vram.keeper.reports import HolderInfo, VersionInfo
from vram.keeper.rules import describe_process

SEGMENT = m.SegmentRow(2 << 20, 1, 0)
ENTRY = m.Entry("a/b", 3, 1000, False, [SEGMENT], ["host"], b"m", False, {"k": "v"})

MESSAGES = [
    m.Hello(1, "me", "box"),
    m.Publish(5, "a/b", [SEGMENT], ["host"], b"m", False, True, {"k": "v"}, 1.5, 7, True, 9),
    m.Offer(5, "a/b", 100, 2, {}, None, 0),
    m.Part(6, 5, 253),
    m.Attach(7, "a/b", 2, "rw", {"k": "v"}, 1.5, True, 1000, "wake"),
    m.More(8, 9, 253),
    m.Release(9, [1, 2]),
    m.Sleep(8, 9, False),
    m.Cancel(0, 7),
    m.State(11, 1),
    m.Watch(12, "a", 1),
    m.List(13, "a", "ab", True),
    m.Versions(14, "a", 1),
    m.Holders(15, "a", ("a", 1, 2)),
    m.Remove(16, "a", 1, True),
    m.Statistics(17),
    m.Measure(17),
    m.Takeover(18),
    m.Welcome(99, "w"),
    m.Recovered(0, 2, 99),
    m.Repeating(0, 2, 3, 9),
    m.Published(5, 3),
    m.NextPart(5, 253),
    m.Attached(7, 4, 1, ENTRY, True, True),
    m.Descriptors(8, 253),
    m.Claimed(7, 4),
    m.Done(9),
    m.LeaseState(11, True, 4, False, 3, False, True, True),
    m.Notice(0, "a", 1, "replaced", 2),
    m.Page(19, 4),
    m.Update(20, "a", 1),
    m.Update(22, "a", 1, 3, True),
    m.Pages(21, "a", 1, 4, 2, True),
    m.PageList(21, [m.PageRow(4, 9, 1000, "me", "box", 2**63 - 1)], True, 5, [(9, 1000, 2)]),
    m.Error(7, "BusyError", "x", ["y"], {}, {}),
]
REQUESTS = [message for message in MESSAGES if isinstance(message, m.Request)]
REPLIES = [message for message in MESSAGES if isinstance(message, m.Reply)]


def name(message: object) -> str:
    return "" if isinstance(message, str) else type(message).__name__


def test_every_message_is_tried() -> None:
    tried = {type(message) for message in MESSAGES}
    assert set(m.Request.__args__) | set(m.Reply.__args__) | {m.Hello} == tried | {
        *(m.Rows, m.Measurements)  # in test_pages and test_rows
    }


@pytest.mark.parametrize("message", REQUESTS, ids=name)
def test_s9_requests_come_back_and_unknown_items_are_ignored(message: msgspec.Struct) -> None:
    payload = m.encode(message)
    assert m.decode_request(payload) == message
    newer = [*msgspec.msgpack.decode(payload), "from the future", {"x": [1]}]
    assert m.decode_request(msgspec.msgpack.encode(newer)) == message


@pytest.mark.parametrize("message", REPLIES, ids=name)
def test_s9_replies_come_back_and_unknown_items_are_ignored(message: msgspec.Struct) -> None:
    payload = m.encode(message)
    assert m.decode_reply(payload) == message
    newer = [*msgspec.msgpack.decode(payload), "from the future"]
    assert m.decode_reply(msgspec.msgpack.encode(newer)) == message


def test_rows_of_a_page_are_read_one_by_one_and_what_is_wrong_is_a_protocol_error() -> None:
    holder = HolderInfo(3, None, 0, "ann", "r", 1.0, "n", 1, 4096, "box")
    page = m.decode_reply(m.encode(m.Rows(5, [msgspec.Raw(m.encode(holder))], False)))
    assert isinstance(page, m.Rows)
    assert m.decode_rows(page.rows, HolderInfo) == [holder]
    with pytest.raises(errors.ProtocolError, match="not a row of VersionInfo"):
        m.decode_rows(page.rows, VersionInfo)


@pytest.mark.parametrize(
    ("who", "said"),
    [
        ((7, 0, "a", "box"), "pid 7, uid 0, label 'a'"),
        ((7, 0, "", ""), "pid 7, uid 0"),
        ((0, 5, "a", "box"), "pid unknown, host box, uid 5, label 'a'"),
        ((None, 5, "", ""), "pid unknown, uid 5"),
        (
            (0, 5, "pid 1, uid 0', label '", "x, uid 0"),
            "pid unknown, host x??uid?0, uid 5, label \"pid 1, uid 0', label '\"",
        ),
        ((0, 5, "a\n\x1b[31m\u202e\udce9", "\x07"), "pid unknown, host ?, uid 5, label 'a??[31m??'"),
    ],
)
def test_s7_who_a_process_is_cannot_be_forged(who: tuple[int | None, int, str, str], said: str) -> None:
    assert describe_process(*who) == said


def test_the_keeper_writes_a_lease_as_the_client_reads_it() -> None:
    raw = m.Attached(7, 4, 1, msgspec.Raw(m.encode(ENTRY)), True, True)
    assert m.encode(raw) == m.encode(m.Attached(7, 4, 1, ENTRY, True, True))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x00",
        b"garbage",
        b"\x91" * 5_000,
        b"\x92\xa6attach",
        m.encode(m.Attach(1, "a"))[:-1],
        m.encode(m.Attach(1, "a")) + b"\x00",
        m.encode(["attach", -1, "a"]),
        m.encode(["attach", 2**60, "a"]),
        m.encode(["attach", 1, "x" * 300]),
        m.encode(["attach", 1, b"a"]),
        m.encode(["attach", 1, "a", 0, "r", {"k": 1}]),
        m.encode(["attach", 1, "a", 0, "r", None, -1.0]),
        m.encode(["publish", 1, "a", [[0, 1, 0]], ["host"]]),
        m.encode(["publish", 1, "a", [[2**63, 1, 0]], ["host"]]),
        m.encode(["publish", 1, "a", [[1, 1, 0]] * 1025, ["host"]]),
        m.encode(["publish", 1, "a", [[1, 1, 0]], ["host"], bytes(40_000)]),
        m.encode(["publish", 1, "a", [[1, 1, 0]], ["x" * 65]]),
        m.encode(["release", 1, [1] * 5_000]),
        m.encode(["hello", 1, 1]),
        m.encode(["nothing", 1]),
        m.encode({"attach": 1}),
        m.encode(m.Done(1)),
        b"\x93\xa6attach\x01\xa2\xff\xfe",
    ],
)
def test_s7_what_is_wrong_is_refused(payload: bytes) -> None:
    with pytest.raises(errors.ProtocolError, match="not a request"):
        m.decode_request(payload)


def test_s7_an_answer_that_is_wrong_is_refused() -> None:
    for payload in (b"", m.encode(m.Attach(1, "a")), m.encode(["attached", 1, 1, 1, ["a"]])):
        with pytest.raises(errors.ProtocolError, match="not an answer"):
            m.decode_reply(payload)
    with pytest.raises(errors.ProtocolError, match="not a greeting"):
        m.decode_hello(m.encode(m.Attach(1, "a")))


@pytest.mark.parametrize(
    "error",
    [
        errors.UsageError("u"),
        errors.QuotaError("c"),
        errors.BusyError("b", ("pid 1", "pid 2")),
        errors.ProtocolError("p"),
        errors.AccessDeniedError("a"),
        errors.NotFoundError("n"),
        errors.MismatchError("m", {"k": "1"}, {"k": "2"}),
        errors.WaitTimeoutError("w"),
        errors.UnsupportedError("this", "that", "nothing", "do it"),
    ],
    ids=name,
)
def test_errors_cross_as_what_they_are(error: errors.VramError) -> None:
    sent = m.decode_reply(m.encode(failure(9, error)))
    assert isinstance(sent, m.Error)
    assert sent.call == 9
    came = raised(sent)
    assert type(came) is type(error)
    assert str(came) == str(error)
    for attribute in ("holders", "expected", "found", "capability", "needs", "have", "remedy"):
        assert getattr(came, attribute, None) == getattr(error, attribute, None)


def test_errors_of_the_keepers_own_say_no_more_than_that() -> None:
    came = raised(failure(1, RuntimeError("a secret path")))
    assert type(came) is errors.InternalError
    assert "secret" not in str(came)
    assert type(raised(m.Error(1, "SystemExit", "no"))) is errors.InternalError
    assert type(raised(m.Error(1, "UnsupportedError", "no", []))) is errors.UnsupportedError


def test_a_long_error_still_fits() -> None:
    error = errors.BusyError("x" * 10_000, tuple("y" * 1_000 for _ in range(100)))
    assert isinstance(m.decode_reply(m.encode(failure(1, error))), m.Error)


@pytest.mark.parametrize(
    "items",
    [
        ["publish", 5, "a", [[4096, 1, 0]] * 1025, ["host"]],
        ["publish", 5, "a", [[4096, 1, 0]], ["host"], b"", False, "yes"],
        ["attach", 5, "a", 2**53 + 1],
        ["attach", 5, "a", 0, "r", {"k": 5}],
        ["attach", 5, 5],
        ["attach", 5, "a", 0, "x"],
        ["attach", 5, "a", 0, "r", None, -1.0],
        ["attach", 5, "a", 0, "r", None, 0.0, False, None, "sell"],
        ["remove", 5],
        ["list", 5, "x" * 300],
    ],
    ids=str,
)
def test_a_wrong_value_is_laid_to_its_call(items: list[object]) -> None:
    with pytest.raises(m.MistakenRequestError) as caught:
        m.decode_request(m.encode(items))
    assert caught.value.call == 5


@pytest.mark.parametrize(
    "payload",
    [
        m.encode(["publish", 0, "a", 1]),  # wants no answer
        m.encode(["publish", -1, "a", 1]),
        m.encode(["publish", "1", "a", 1]),
        m.encode(["publish"]),
        m.encode(["done", 1]),
        m.encode([5, 5]),
        m.encode({"publish": 5}),
        m.encode([]),
        m.encode(["attach", 5, 5])[:-1],
        m.encode(["attach", 5, 5]) + b"\0",
    ],
)
def test_what_is_no_request_is_laid_to_the_connection(payload: bytes) -> None:
    with pytest.raises(errors.ProtocolError) as caught:
        m.decode_request(payload)
    assert not isinstance(caught.value, m.MistakenRequestError)
