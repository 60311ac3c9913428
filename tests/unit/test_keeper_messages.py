"""What goes over the wire: golden bytes, tolerance for what is newer, none for what is wrong (S7, S9)."""

from __future__ import annotations

import msgspec
import pytest

from vram import errors
from vram.keeper import messages as m
from vram.keeper.failures import failure, raised
from vram.keeper.reports import holder_info, version_info
from vram.keeper.rules import describe_process

SEGMENT = m.SegmentRow(2 << 20, 1, 0)
ENTRY = m.Entry("a/b", 3, 1000, False, [SEGMENT], ["host"], b"m", False, {"k": "v"})

# Frozen: a keeper that runs today has to understand a client of next year, and the other way round. A change here is
# a new protocol version.
GOLDEN = [
    (m.Hello(1, "me", "box"), "94a568656c6c6f01a26d65a3626f78"),
    (
        m.Publish(5, "a/b", [SEGMENT], ["host"], b"m", False, True, {"k": "v"}, 1.5, 7, True, 9),
        "9da77075626c69736805a3612f629193ce00200000010091a4686f7374c4016dc2c381a16ba176cb3ff800000000000007c309",
    ),
    (m.Offer(5, "a/b", 100, 2, {}, None, 0), "98a56f6666657205a3612f62640280c000"),
    (m.Part(6, 5, 253), "94a4706172740605ccfd"),
    (
        m.Attach(7, "a/b", 2, "rw", {"k": "v"}, 1.5, True, 1000, "wake"),
        "9aa661747461636807a3612f6202a2727781a16ba176cb3ff8000000000000c3cd03e8a477616b65",
    ),
    (m.More(8, 9, 253), "94a46d6f72650809ccfd"),
    (m.Release(9, [1, 2]), "93a772656c6561736509920102"),
    (m.Abandon(10, 1), "93a76162616e646f6e0a01"),
    (m.Cancel(0, 7), "93a663616e63656c0007"),
    (m.Stale(11, 1), "93a57374616c650b01"),
    (m.Watch(12, "a", 1), "94a577617463680ca16101"),
    (m.List(13, "a", "ab", 512, True), "96a46c6973740da161a26162cd0200c3"),
    (m.Versions(14, "a", 1), "94a876657273696f6e730ea16101"),
    (m.Holders(15, "a", 1, 2), "95a7686f6c646572730fa1610102"),
    (m.Leases(18, "a", 2), "94a66c656173657312a16102"),
    (m.Remove(16, "a", 1, True, True), "96a672656d6f766510a16101c3c3"),
    (m.Statistics(17), "92aa7374617469737469637311"),
    (m.Measure(17), "92a76d65617375726511"),
    (m.Takeover(18, 5, 4711), "94a874616b656f7665721205cd1267"),
    (m.Welcome(99, "w"), "93a777656c636f6d6563a177"),
    (m.Recovered(0, 2, 99), "94a97265636f7665726564000263"),
    (m.Repeating(0, 2, [3, 9], [4], True), "96a9726570656174696e6700029203099104c3"),
    (m.Published(5, 3), "93a97075626c69736865640503"),
    (m.NextPart(5, 253), "93a8636f6e74696e756505ccfd"),
    (
        m.Attached(7, 4, 1, ENTRY, True, True),
        "97a8617474616368656407040199a3612f6203cd03e8c29193ce00200000010091a4686f7374c4016dc281a16ba176c3c3",
    ),
    (m.Descriptors(8, 253), "93ab64657363726970746f727308ccfd"),
    (m.Claimed(7, 4, 600.0), "94a7636c61696d65640704cb4082c00000000000"),
    (m.Done(9), "92a4646f6e6509"),
    (m.IsStale(11, True, 4), "94a869735f7374616c650bc304"),
    (m.Notice(0, "a", 1, "replaced", 2), "96a66e6f7469636500a16101a87265706c6163656402"),
    (m.Page(19, 4), "93a4706167651304"),
    (m.Update(20, "a", 1), "94a675706461746514a16101"),
    (m.Pages(21, "a", 1, 4, 2), "96a5706167657315a161010402"),
    (m.Cursors(24, "a", 1, 4), "95a7637572736f727318a1610104"),
    (
        m.CursorList(24, [m.CursorRow(4, 2**63 - 1, 9, 1000, "me", "box")], True, 5),
        "95ab637572736f725f6c69737418919604cf7fffffffffffffff09cd03e8a26d65a3626f78c305",
    ),
    (m.Updated(22, "a", 1, 3, True), "96a77570646174656416a1610103c3"),
    (m.UpdateState(23, 4), "93ac7570646174655f73746174651704"),
    (
        m.PageList(21, [m.PageRow(4, 9, 1000, "me", "box")], True, 5, [(9, 1000, 2)]),
        "96a9706167655f6c6973741591950409cd03e8a26d65a3626f78c305919309cd03e802",
    ),
    (m.Updates(23, 3, False, True, True), "96a7757064617465731703c2c3c3"),
    (m.Error(7, "BusyError", "x", ["y"], {}, {}), "97a56572726f7207a9427573794572726f72a17891a1798080"),
]
# The same, said in a planned restart.
SUCCESSION = [
    (m.HandOver(1, 5), "93a968616e645f6f7665720105"),
    (m.Takeover(18, 5, 4711), "94a874616b656f7665721205cd1267"),
]
REQUESTS = [message for message, _ in GOLDEN if isinstance(message, m.Request)]
REPLIES = [message for message, _ in GOLDEN if isinstance(message, m.Reply)]


def name(message: object) -> str:
    return "" if isinstance(message, str) else type(message).__name__


@pytest.mark.parametrize(("message", "golden"), GOLDEN, ids=name)
def test_s9_golden_bytes(message: msgspec.Struct, golden: str) -> None:
    assert m.encode(message).hex() == golden


@pytest.mark.parametrize(("message", "golden"), SUCCESSION, ids=name)
def test_s9_golden_bytes_of_a_restart(message: msgspec.Struct, golden: str) -> None:
    assert m.encode(message).hex() == golden
    assert m.decode_succession(bytes.fromhex(golden)) == message


OTHERWISE_TOO = {m.Descriptors, m.Error, m.Recovered, m.Welcome}  # replies that may come in a restart


def test_every_message_has_golden_bytes() -> None:
    golden = {type(message) for message, _ in GOLDEN}
    assert set(m.Succession.__args__) == {type(message) for message, _ in SUCCESSION} | OTHERWISE_TOO
    assert set(m.Request.__args__) | set(m.Reply.__args__) | {m.Hello} == golden | {
        # their rows are for people; they change with what is shown
        *(m.Listing, m.VersionList, m.HolderList, m.KeeperStatistics, m.Measurements)
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


def test_s7_what_a_keeper_says_of_others_is_cut_to_what_is_shown() -> None:
    """A keeper is believed as little as those of whom it tells."""
    holder = m.HolderRow(3, 1, 0, 0, "\x1b[2J" + "x" * 300, "r", 1.0, 1, "n", "a\x1bb" + "y" * 100)
    info = holder_info(holder)
    assert info.label == "?[2J" + "x" * 116
    assert info.host == "a?b" + "y" * 61
    version = m.VersionRow(1, 0, True, False, 1, [1], ["host"], 0, 1.0, None, 0, "a\nb", {}, False, "\u202e")
    assert (version_info(version, ()).publisher_label, version_info(version, ()).publisher_host) == ("a?b", "?")


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
    raw = m.AttachedRaw(7, 4, 1, msgspec.Raw(m.encode(ENTRY)), True, True)
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
    with pytest.raises(errors.ProtocolError):
        m.decode_succession(payload)


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
